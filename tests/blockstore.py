"""Block stores for tests: blocks whose bytes follow from their number, real directories, a child process to kill."""

import multiprocessing
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cachefs_daemon.store.block_store import BlockStore, StoreConfig, TierConfig

from cachefs.block import block_key, content_id

BLOCK_SIZE = 256 << 10
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


def fill(store: BlockStore, numbers: range, size: int = 100_000) -> None:
    for number in numbers:
        assert store.put(key_of(number), data_of(number, size)) is not None


def readable(store: BlockStore, numbers: range, size: int = 100_000) -> set[int]:
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
def opened(config: StoreConfig) -> Iterator[BlockStore]:
    store = BlockStore(config)
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
        store = BlockStore(config)
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


@contextmanager
def memory_directory() -> Iterator[Path]:
    """On tmpfs, as a memory tier's is."""
    with tempfile.TemporaryDirectory(prefix="cachefs-test-", dir="/dev/shm") as name:
        yield Path(name)
