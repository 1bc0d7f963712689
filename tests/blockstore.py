"""Block stores for tests: blocks whose bytes follow from their number, real directories, a child process to kill."""

import functools
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cachefs.block import MEMORY, SSD, BlockLocation, block_key, content_id
from cachefs.errors import StoreFull
from cachefs.planning.eviction.quotas import Quota
from cachefs_bench.lab import scratch_node
from cachefs_daemon.store.block_store import BlockToStore
from cachefs_daemon.store.segment_writer import Data
from cachefs_daemon.store.storage import PlanningParts, Storage, StoreConfig
from cachefs_daemon.store.tier import TierConfig

BLOCK_SIZE = 256 << 10
# On tmpfs, as a memory tier's is.
memory_directory = functools.partial(scratch_node.memory_directory, "cachefs-tests-")
# A reply that takes longer is a hang.
_DEADLINE = 60


def key_of(number: int) -> bytes:
    return block_key(content_id(b"object", b"%d" % number, BLOCK_SIZE, BLOCK_SIZE), 0)


def data_of(number: int, size: int = 100_000) -> bytes:
    return random.Random(number).randbytes(size)


def store_config(
    root: Path, *, memory: int = 4 << 20, ssd: int = 16 << 20, policy: str = "minio", segment: int = 1 << 20
) -> StoreConfig:
    return StoreConfig(
        root / "state",
        BLOCK_SIZE,
        TierConfig(root / "memory", memory, segment, policy),
        TierConfig(root / "ssd", ssd, segment, policy) if ssd else None,
    )


def disk_usage(directory: Path) -> int:
    """Bytes of disk a directory takes, as `du -s` counts them."""
    total = directory.stat().st_blocks
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_blocks
    return total * 512


class OpenStore:
    """A store with all that a node gives it, and in one place what the parts of a node do to it."""

    def __init__(self, config: StoreConfig, *, in_cluster: bool = False) -> None:
        foresight = PlanningParts.empty(in_cluster=in_cluster)
        self.standing = foresight.standing
        self.plan, self.coverage, self.presence = foresight.plan, foresight.coverage, foresight.presence
        self.storage = Storage(config, foresight)
        self.blocks, self.tiering, self.index = self.storage.blocks, self.storage.tiering, self.storage.index
        self.get, self.read, self.repair = self.blocks.get, self.blocks.read, self.blocks.repair
        self.evict, self.promote = self.blocks.evict, self.blocks.promote
        self.blocks_of, self.index_path = self.index.blocks_of, self.index.path
        self.usage = self.storage.usage
        self.watch, self.unwatch = self.storage.presence_watch.watch, self.storage.presence_watch.unwatch
        self.close = self.storage.close

    def put(self, key: bytes, data: Data, *, transient: bool = True, snapshot: str = "") -> BlockLocation | None:
        """Store one block. Raises StoreFull."""
        (outcome,) = self.blocks.put_many([BlockToStore(key, data, transient, snapshot)])
        if isinstance(outcome, StoreFull):
            raise outcome
        return outcome

    def put_together(self, blocks: Sequence[tuple[bytes, Data]]) -> list[BlockLocation | None]:
        """Store blocks in one batch; None for those that could not be stored."""
        outcomes = self.blocks.put_many([BlockToStore(key, data) for key, data in blocks])
        return [None if isinstance(one, StoreFull) else one for one in outcomes]

    def keys(self) -> list[bytes]:
        """Of all blocks that are here."""
        found = (key for portion in self.index.key_batches(1024) for key in portion)
        return [key for key in dict.fromkeys(found) if self.get(key) is not None]

    @property
    def repairs(self) -> int:
        return self.blocks.repairs

    def keep_limits(self) -> None:
        for tier in (MEMORY, SSD):
            self.storage.maintenance.enforce_limit(tier)
        self.storage.maintenance.enforce_quotas()

    def retry(self) -> None:
        for tier in (MEMORY, SSD):
            self.storage.maintenance.retry_tier(tier)

    def maintain(self) -> None:
        self.keep_limits()
        self.retry()
        self.storage.maintenance.compact()

    def accessed(self, keys: Sequence[bytes]) -> None:
        with self.tiering as tiering:
            tiering.note_accessed(keys, time.monotonic())

    def claim(self, keys: Iterable[bytes], snapshot: str) -> None:
        with self.tiering as tiering:
            tiering.claim_blocks(keys, snapshot, time.monotonic())

    def room_for(self, key: bytes, snapshot: str = "") -> int:
        with self.tiering as tiering:
            return tiering.room_for(key, snapshot)

    def set_limit(self, quota: Quota) -> None:
        with self.tiering as tiering:
            tiering.quotas.set_quota(quota)

    def remove_limit(self, dataset: str) -> None:
        with self.tiering as tiering:
            tiering.quotas.remove_quota(dataset)

    def pin(self, keys: Iterable[bytes]) -> None:
        with self.tiering as tiering:
            tiering.pin_blocks(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        with self.tiering as tiering:
            tiering.unpin_blocks(keys)


def fill(store: OpenStore, numbers: range, size: int = 100_000) -> None:
    for number in numbers:
        assert store.put(key_of(number), data_of(number, size)) is not None


def readable(store: OpenStore, numbers: range, size: int = 100_000) -> set[int]:
    """The blocks that are there; one that is there with other bytes fails the test."""
    found = set()
    for number in numbers:
        location = store.get(key_of(number))
        data = store.read(key_of(number), location) if location is not None else None
        if data is not None:
            assert data == data_of(number, size)
            found.add(number)
    return found


@contextmanager
def opened(config: StoreConfig) -> Iterator[OpenStore]:
    store = OpenStore(config)
    try:
        yield store
    finally:
        store.close()


class StoreProcess:
    """A store in a process of its own, so that it can be killed. `call` runs one of its methods there."""

    def __init__(self, config: StoreConfig) -> None:
        forking = multiprocessing.get_context("fork")
        self._pipe, theirs = forking.Pipe()
        self._process = forking.Process(target=_serve, args=(config, theirs, self._pipe))
        self._process.start()
        theirs.close()
        self._receive()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        self._pipe.send((method, args, options))
        return self._receive()

    def kill9(self) -> None:
        self._process.kill()
        self._process.join(_DEADLINE)
        self._pipe.close()

    def stop(self) -> None:
        self.call("close")
        self._process.join(_DEADLINE)
        self._pipe.close()

    def _receive(self) -> Any:
        assert self._pipe.poll(_DEADLINE), "the store's process does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(config: StoreConfig, pipe: Connection, other_end: Connection) -> None:
    other_end.close()
    try:
        store = OpenStore(config)
        pipe.send(None)
    except Exception as error:
        pipe.send(error)
        return
    while True:
        try:
            method, args, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(store, method)(*args, **options))
        except Exception as error:
            pipe.send(error)
        if method == "close":
            return
