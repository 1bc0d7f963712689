"""Pins are what their record says, also where the caller goes away in the middle, or the daemon is killed."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest

from cachefs.errors import NotFound
from cachefs.messages import OriginOptions, Selection
from cachefs.snapshot_builder import ListedObject, build_snapshot_file
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.datasets import records, selection
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.datasets.records import DatasetRecord, SnapshotRecord
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.runtime.threads import Threads
from tests.blockstore import BLOCK_SIZE, OpenStore, opened, store_config

FILES = 50


class Bench:
    """Pins on a bench, of one dataset with FILES files."""

    def __init__(self, root: Path, store: OpenStore) -> None:
        state = root / "state"
        (state / "snapshots").mkdir(exist_ok=True)
        url = f"file://{root}"
        listed = (ListedObject(b"%02d" % number, 1000, 1, b"v") for number in range(FILES))
        path = build_snapshot_file(listed, url, BLOCK_SIZE, lambda key: b"file:" + key, state / "snapshots")
        records.save(state, records.Registry([DatasetRecord("d", url, OriginOptions(), [SnapshotRecord(path.stem)])]))
        self.threads = Threads()
        self.catalog = Catalog(state, OpenSnapshots(state / "snapshots", BLOCK_SIZE), OriginSettings(), self.threads)
        self.pins = Pins(store.tiering, self.catalog, self.threads)
        snapshot = self.catalog.snapshot("d")
        self.keys = [key for entry in selection.files(snapshot, []) for key in selection.block_keys(snapshot, entry)]
        self._store = store

    @property
    def pinned(self) -> int:
        """Blocks that are pinned in the tiers."""
        with self._store.tiering as tiering:
            return len(self.keys) - len(tiering.filter_unpinned(self.keys))

    @property
    def recorded(self) -> list[bytes]:
        return self.catalog.get("d").record.pins


def on_bench(root: Path, scene: Callable[[Bench], Awaitable[None]]) -> None:
    async def play(store: OpenStore) -> None:
        bench = Bench(root, store)
        try:
            await asyncio.wait_for(scene(bench), 30)
        finally:
            await bench.catalog.close()
            bench.threads.close()

    with opened(store_config(root)) as store:
        asyncio.run(play(store))


async def abandon(call: Awaitable[object], pins: Pins, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel *call* while it is in the function *step* of *pins*, and wait until what it began is done."""
    reached, released = asyncio.Event(), threading.Event()
    loop, apply = asyncio.get_running_loop(), getattr(pins, step)

    def slowly(keys: Iterable[bytes]) -> None:
        loop.call_soon_threadsafe(reached.set)
        assert released.wait(60)
        apply(keys)

    monkeypatch.setattr(pins, step, slowly)
    caller = asyncio.ensure_future(call)
    await reached.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    released.set()
    async with pins._changing:
        monkeypatch.undo()


def test_a_caller_that_goes_away_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(bench: Bench) -> None:
        await abandon(bench.pins.pin(Selection(dataset="d")), bench.pins, "_pin", monkeypatch)
        assert (bench.pinned, bench.recorded) == (FILES, [b""])
        await abandon(bench.pins.unpin(Selection(dataset="d")), bench.pins, "_unpin", monkeypatch)
        assert (bench.pinned, bench.recorded) == (0, [])

    on_bench(tmp_path, scene)


def test_a_path_that_is_not_there_is_not_recorded(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        with pytest.raises(NotFound, match="no 'nothing' in snapshot"):
            await bench.pins.pin(Selection(dataset="d", paths=[b"01", b"nothing"]))
        assert bench.recorded == []
        assert bench.pinned == 0

    on_bench(tmp_path, scene)
