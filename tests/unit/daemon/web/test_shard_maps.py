"""Which datasets are counted for those who look, and how often."""

import asyncio
import threading
import types
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from cachefs.planning.blocks.presence import IN_SSD, ShardBytes
from cachefs_daemon.web import shard_maps
from cachefs_daemon.web.shard_maps import COUNTING, EMPTY_MAP, MAX_FILES, MAX_MAPS, TOO_LARGE, ShardMaps
from tests.simulated import space_of


class Snapshot:
    """So much of one as is asked for."""

    def __init__(self, name: str, files: int = 4) -> None:
        self.id, self.files = name, files


class Residency:
    """Counts as soon as it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.may.set()
        self.asked: list[list[str]] = []
        self.forgotten = threading.Event()
        self.here: dict[str, ShardBytes] = {}

    def count_changes(self, _: str, wanted: Mapping[str, object]) -> set[str]:
        assert self.may.wait(60)
        self.asked.append(list(wanted))
        return set()

    def forget(self, _: str) -> None:
        self.forgotten.set()

    def counts_of(self, snapshot: str) -> ShardBytes | None:
        return self.here.get(snapshot)

    def is_too_large(self, _: str) -> bool:
        return False


def looked_at(work: Callable[[ShardMaps, Residency, dict[str, object]], Awaitable[None]]) -> None:
    """*work* gets the maps of a node, what it counts with, and the spaces of its plan."""

    async def run() -> None:
        residency, spaces = Residency(), dict[str, object]()
        node: Any = types.SimpleNamespace(
            residency=residency,
            threads=types.SimpleNamespace(background=asyncio.to_thread),
            storage=types.SimpleNamespace(planning=types.SimpleNamespace(plan=types.SimpleNamespace(spaces=spaces))),
        )
        maps = ShardMaps(node)
        await work(maps, residency, spaces)
        maps.close()

    asyncio.run(asyncio.wait_for(run(), 100))


def test_a_map_of_what_is_here() -> None:
    async def work(maps: ShardMaps, residency: Residency, _: object) -> None:
        space = space_of([100] * 4, "s")
        residency.here["s"] = ShardBytes(space)
        residency.here["s"].apply_changes(space.keys(np.array([2])), np.array([IN_SSD], np.uint8))
        found = await maps.map_of(Snapshot("s"))  # type: ignore[arg-type]
        assert (found.memory, found.ssd, found.blocks) == (0, 100, 4)
        assert (found.in_ssd[::64], found.in_memory[::64]) == ([0, 0, 255, 0], [0, 0, 0, 0])
        assert await maps.map_of(Snapshot("t")) == EMPTY_MAP  # type: ignore[arg-type]

    looked_at(work)


def test_who_looks_at_much_is_not_counted_for_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_maps, "PAUSE_FACTOR", 0)
    monkeypatch.setattr(shard_maps, "MIN_PAUSE", 1000)

    async def work(maps: ShardMaps, residency: Residency, _: object) -> None:
        for _ in range(10):
            await maps.map_of(Snapshot("s"))  # type: ignore[arg-type]
        assert residency.asked == [["s"]]
        for number in range(MAX_MAPS + 2):
            await maps.map_of(Snapshot(f"s{number}"))  # type: ignore[arg-type]
        assert residency.asked[-1] == [f"s{number}" for number in range(MAX_MAPS + 1, 1, -1)], "the latest ones"

    looked_at(work)


def test_nobody_waits_for_a_long_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_maps, "WAIT_SECONDS", 0.01)

    async def work(maps: ShardMaps, residency: Residency, _: object) -> None:
        residency.may.clear()
        assert await maps.map_of(Snapshot("s")) == COUNTING  # type: ignore[arg-type]
        monkeypatch.setattr(shard_maps, "WAIT_SECONDS", 60)
        residency.may.set()
        assert await maps.map_of(Snapshot("s")) == EMPTY_MAP  # type: ignore[arg-type]
        monkeypatch.setattr(shard_maps, "FORGET_SECONDS", 0)
        maps.forget_unseen()
        assert await asyncio.to_thread(residency.forgotten.wait, 60)

    looked_at(work)


def test_very_large_ones_are_followed_where_a_job_reads_them() -> None:
    async def work(maps: ShardMaps, residency: Residency, spaces: dict[str, object]) -> None:
        large = Snapshot("large", MAX_FILES + 1)
        assert await maps.map_of(large) == TOO_LARGE  # type: ignore[arg-type]
        assert residency.asked == []
        spaces["large"] = None
        assert await maps.map_of(large) == EMPTY_MAP  # type: ignore[arg-type]

    looked_at(work)
