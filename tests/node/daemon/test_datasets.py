"""Which snapshots a dataset keeps, and what is left of a listing whose caller went away."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from cachefs_daemon.datasets import records as registry
from cachefs_daemon.datasets.catalog import KEPT_GENERATIONS, Catalog
from cachefs_daemon.datasets.held_snapshots import HeldSnapshots
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.runtime.boot_clock import now
from cachefs_daemon.runtime.threads import Threads

from cachefs.messages import BlockRef, DatasetAdd, Empty, ListingProgress, Warmup
from cachefs.rpc import DATASET_ADD, DATASET_LIST, WARMUP
from tests.daemon import Daemon


def with_datasets(state: Path, scene: Callable[[Catalog], Awaitable[None]]) -> None:
    with_held_snapshots(state, lambda datasets, _: scene(datasets))


def with_held_snapshots(state: Path, scene: Callable[[Catalog, HeldSnapshots], Awaitable[None]]) -> None:
    async def play() -> None:
        threads = Threads()
        held = HeldSnapshots(state / "snapshots", 1 << 20)
        datasets = Catalog(state, held, OriginSettings(), threads)
        try:
            await scene(datasets, held)
        finally:
            await datasets.close()
            threads.close()

    asyncio.run(play())


def files(state: Path) -> set[str]:
    return {path.stem for path in (state / "snapshots").iterdir()}


def test_old_snapshots_stay_while_a_mount_may_use_them(tmp_path: Path) -> None:
    origin, state = tmp_path / "origin", tmp_path / "state"
    origin.mkdir()
    (origin / "0").touch()

    async def grow(datasets: Catalog) -> None:
        await _drain(datasets.add(DatasetAdd(name="d", url=f"file://{origin}")))
        for number in range(1, 4):
            (origin / str(number)).touch()
            await _drain(datasets.refresh("d"))
        newest_first = [known.id for known in datasets.get("d").record.snapshots]
        assert len(newest_first) == 4
        third = newest_first[2]
        await datasets.prune(lambda snapshot: snapshot.id == third and 0 <= now().seconds - snapshot.replaced < 60)
        assert [known.id for known in datasets.get("d").record.snapshots] == newest_first[:3]
        assert files(state) == set(newest_first[:3])

    async def restart(datasets: Catalog) -> None:
        newest_first = [known.id for known in datasets.get("d").record.snapshots]
        assert len(datasets.generations(datasets.get("d"))) == 3
        await datasets.prune(lambda snapshot: False)
        assert files(state) == set(newest_first[:KEPT_GENERATIONS])
        assert datasets.snapshot("d").id == newest_first[0]

    with_datasets(state, grow)
    with_datasets(state, restart)


def test_two_datasets_share_a_snapshot_until_both_are_gone(tmp_path: Path) -> None:
    origin, state = tmp_path / "origin", tmp_path / "state"
    origin.mkdir()
    (origin / "file").touch()

    async def scene(datasets: Catalog) -> None:
        for name in ("a", "b"):
            await _drain(datasets.add(DatasetAdd(name=name, url=f"file://{origin}")))
        shared = datasets.snapshot("a").id
        await datasets.remove("a")
        assert files(state) == {shared}
        assert datasets.snapshot("b").files == 1
        await datasets.remove("b")
        assert files(state) == set()

    with_datasets(state, scene)


def test_the_origin_of_a_removed_dataset_serves_no_other_one(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "file").write_bytes(b"x")

    async def scene(datasets: Catalog, held: HeldSnapshots) -> None:
        for name in ("a", "b"):
            await _drain(datasets.add(DatasetAdd(name=name, url=f"file://{origin}")))
        snapshot = datasets.snapshot("b")
        file = snapshot.find(b"file")
        assert file is not None
        async with contextlib.aclosing(datasets.add(DatasetAdd(name="c", url=f"file://{tmp_path}"))) as listing:
            await anext(listing)
            await datasets.remove("a")
            source = held.source(BlockRef(snapshot=snapshot.id, entry=file.number, number=0))
            assert source.origin is datasets.get("b").origin

    with_held_snapshots(tmp_path / "state", scene)


def test_changes_at_once_are_all_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "file").touch()
    state = tmp_path / "state"
    save, calls = registry.save, itertools.count()

    def first_is_slow(*args: Any) -> None:
        if next(calls) == 0:
            time.sleep(0.2)
        save(*args)

    async def scene(datasets: Catalog) -> None:
        for name in ("a", "b"):
            await _drain(datasets.add(DatasetAdd(name=name, url=f"file://{tmp_path}/origin")))
        monkeypatch.setattr(registry, "save", first_is_slow)
        await asyncio.gather(datasets.set_pins("a", [b"file"]), datasets.set_pins("b", [b"file"]))

    with_datasets(state, scene)
    assert [record.pins for record in registry.load(state)] == [[b"file"], [b"file"]]


async def _drain(steps: AsyncIterator[ListingProgress]) -> None:
    async for _ in steps:
        pass


def test_a_listing_ends_with_its_caller(tmp_path: Path) -> None:
    for number in range(20_000):
        path = tmp_path / "origin" / str(number % 100) / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with Daemon(tmp_path / "node") as daemon:
        assert daemon.process is not None
        listing = daemon.client.stream(DATASET_ADD, DatasetAdd(name="d", url=f"file://{tmp_path}/origin"), timeout=60)
        next(listing)
        listing.close()
        cachefsd = psutil.Process(daemon.process.pid)
        deadline = time.monotonic() + 20
        while cachefsd.children() or list((daemon.home / "state" / "snapshots").iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert daemon.client.call(DATASET_LIST, Empty()).datasets == []
        assert daemon.add_dataset("d", f"file://{tmp_path}/origin").files == 20_000
        assert "Traceback" not in daemon.log.read_text()


def test_a_warmup_ends_with_its_caller(tmp_path: Path) -> None:
    for number in range(3000):
        path = tmp_path / "origin" / str(number % 10) / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 2000)
    with Daemon(tmp_path / "node", {"origin": {"max_connections": 1}}) as daemon:
        daemon.add_dataset("d", f"file://{tmp_path}/origin")
        warmup = daemon.client.stream(WARMUP, Warmup(dataset="d"), timeout=60)
        next(warmup)
        warmup.close()
        deadline = time.monotonic() + 20
        while daemon.status().warmups:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "warmup 1 of d cancelled" in daemon.log.read_text()
        assert daemon.status().index_blocks < 3000
        assert "Traceback" not in daemon.log.read_text()
