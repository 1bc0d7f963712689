"""What indexers read, and in which threads."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cachefs.block import BlockLocation, block_key
from cachefs.job_messages import SampleMap
from cachefs.messages import BlockRef
from cachefs.segment import segment_path
from cachefs.snapshot import Snapshot
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_parts import FetchParts, SourceLookups
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.jobs.epoch_loader import EpochLoader, LoaderParts
from cachefs_daemon.jobs.plan_memory import PlanMemory
from cachefs_daemon.origin.base import ObjectRange, Origin
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from tests.blockstore import BLOCK_SIZE, OpenStore, opened, store_config

RECORDS = 3
# Three records of TFRecord with no data: length 0 and the checksums of that.
FILE = (bytes(8) + bytes.fromhex("29039807") + bytes.fromhex("d8ea82a2")) * RECORDS


class Scene:
    """An indexer at work on a file of an origin."""

    def __init__(self, root: Path, store: OpenStore) -> None:
        self.store = store
        self.fetched = 0
        objects = [ListedObject(b"shard", len(FILE), 7, b"v")]
        self.snapshot = Snapshot(
            build_snapshot_file(objects, "s3://bucket", BLOCK_SIZE, lambda key: b"s3:" + key, root)
        )
        entry = self.snapshot.find_path(b"shard")
        assert entry is not None
        self.entry = entry.number
        self.key = block_key(self.snapshot.size_and_content(self.entry)[1], 0)

    async def read(self, wanted: ObjectRange, patience: object) -> bytes:
        self.fetched += 1
        return FILE

    def source(self, ref: BlockRef) -> BlockSource:
        origin = cast(Origin, SimpleNamespace(url="test://origin", read=self.read, endpoint=Endpoint("test", 4)))
        return BlockSource(self.key, origin, ObjectRange(b"shard", b"v", len(FILE), 0, len(FILE)), ref.snapshot)

    def index(self) -> int:
        """How many records the indexer finds."""

        async def run() -> int:
            threads = Threads()
            fetcher = Fetcher(
                FetchParts(
                    self.store.blocks,
                    SourceLookups(self.source),
                    threads,
                    ConcurrencyLimiter(4, 1 << 30),
                    ErrorLog(),
                    20,
                )
            )
            watch = self.store.storage.presence_watch
            loader = EpochLoader(
                LoaderParts(self.store.plan, watch, self.store.blocks, fetcher, threads, PlanMemory(1 << 30))
            )
            try:
                wanted = SampleMap(kind="records", indexer="tfrecord", paths=[b"shard"])
                return len(await asyncio.wait_for(loader.load_samples(self.snapshot, wanted), 30))
            finally:
                await fetcher.close()
                threads.close()

        return asyncio.run(run())


def test_an_indexer_reads_in_its_own_thread(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []
    with opened(store_config(root)) as store:
        read = store.blocks.read

        def seen(key: bytes, location: BlockLocation) -> Any:
            readers.append(threading.current_thread().name.split("_")[0])
            return read(key, location)

        monkeypatch.setattr(store.blocks, "read", seen)
        assert Scene(root, store).index() == RECORDS
    assert readers == ["indexing"]


def test_a_block_that_is_evicted_or_damaged_before_it_is_indexed_is_fetched_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store_config(root)) as store:
        scene = Scene(root, store)
        location = store.put(scene.key, FILE)
        assert location is not None
        with segment_path(root / "memory", location.segment).open("r+b") as file:
            file.seek(location.offset)
            file.write(b"damage")
        assert scene.index() == RECORDS
        assert (scene.fetched, store.repairs) == (1, 1)
        read = store.blocks.read
        evicted = []

        def too_late(key: bytes, location: BlockLocation) -> Any:
            if not evicted:
                evicted.append(store.evict([key]))
            return read(key, location)

        monkeypatch.setattr(store.blocks, "read", too_late)
        assert scene.index() == RECORDS
        assert scene.fetched == 2
