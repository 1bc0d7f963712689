"""Who may read from an origin, and who goes next."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from cachefs_daemon.fetch.slots import FetchSlots


class Crowd:
    """Tasks at a gate. inside: names of those that are in; each stays until told to leave."""

    def __init__(self, gate: FetchSlots) -> None:
        self.gate = gate
        self.inside: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, size: int = 1, *, ahead: bool = False, needed: float = math.inf) -> None:
        self._leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._visit(name, size, ahead, needed))
        await settle()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await settle()

    async def _visit(self, name: str, size: int, ahead: bool, needed: float) -> None:
        async with self.gate.passage(name.encode(), size, ahead=ahead, needed=needed):
            self.inside.append(name)
            try:
                await self._leave[name].wait()
            finally:
                self.inside.remove(name)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def with_gate(slots: int, capacity: int, scene: Callable[[Crowd], Awaitable[None]]) -> None:
    async def play() -> None:
        crowd = Crowd(FetchSlots(slots, capacity))
        await scene(crowd)
        for task in crowd.tasks.values():
            task.cancel()
        await asyncio.gather(*crowd.tasks.values(), return_exceptions=True)
        assert (crowd.gate.inside, crowd.gate.bytes_inside, crowd.gate.ahead_waiting) == (0, 0, 0)

    asyncio.run(play())


def test_slots_are_never_exceeded_and_the_first_to_come_goes_first() -> None:
    async def scene(crowd: Crowd) -> None:
        for name in "abcd":
            await crowd.come(name)
        assert crowd.inside == ["a", "b"]
        await crowd.leave("b")
        assert crowd.inside == ["a", "c"]

    with_gate(2, 100, scene)


def test_bytes_are_never_exceeded_but_by_one_alone() -> None:
    async def scene(crowd: Crowd) -> None:
        await crowd.come("a", 60)
        await crowd.come("b", 60)
        await crowd.come("c", 10)
        assert crowd.inside == ["a"]  # c does not overtake b
        await crowd.leave("a")
        assert crowd.inside == ["b", "c"]
        await crowd.come("huge", 1000)
        await crowd.leave("b")
        assert crowd.inside == ["c"]
        await crowd.leave("c")
        assert crowd.inside == ["huge"]

    with_gate(8, 100, scene)


def test_demand_goes_before_ahead_and_finds_a_slot_kept_for_it() -> None:
    async def scene(crowd: Crowd) -> None:
        for name in ("a1", "a2", "a3", "a4", "a5"):
            await crowd.come(name, ahead=True)
        assert crowd.inside == ["a1", "a2", "a3"]
        await crowd.come("d1")
        await crowd.come("d2")
        assert crowd.inside == ["a1", "a2", "a3", "d1"]
        await crowd.leave("a1")
        assert crowd.inside == ["a2", "a3", "d1", "d2"]

    with_gate(4, 100, scene)


def test_who_is_waited_for_meanwhile_goes_before_others() -> None:
    async def scene(crowd: Crowd) -> None:
        for name in ("a1", "a2", "a3"):
            await crowd.come(name, ahead=True)
        assert crowd.inside == ["a1"]
        crowd.gate.promote(b"a3")
        await settle()
        assert crowd.inside == ["a1", "a3"]
        assert crowd.gate.ahead_waiting == 1

    with_gate(2, 100, scene)


def test_who_gives_up_leaves_no_trace() -> None:
    async def scene(crowd: Crowd) -> None:
        for name in "abc":
            await crowd.come(name)
        crowd.tasks["b"].cancel()
        await crowd.leave("a")
        assert crowd.inside == ["c"]
        # Let in and cancelled before it could notice.
        await crowd.come("d")
        crowd._leave["c"].set()
        while "c" in crowd.inside:  # noqa: ASYNC110
            await asyncio.sleep(0)
        crowd.tasks["d"].cancel()
        await settle()
        assert crowd.inside == []
        await crowd.come("e")
        assert crowd.inside == ["e"]

    with_gate(1, 100, scene)


def test_reads_ahead_go_in_by_the_time_they_are_needed() -> None:
    async def scene(crowd: Crowd) -> None:
        await crowd.come("first", ahead=True)
        await crowd.come("whenever", ahead=True)
        await crowd.come("later", ahead=True, needed=20.0)
        await crowd.come("soon", ahead=True, needed=10.0)
        await crowd.come("also whenever", ahead=True)
        order = []
        while crowd.inside:
            [name] = crowd.inside
            order.append(name)
            await crowd.leave(name)
        assert order == ["first", "soon", "later", "whenever", "also whenever"]

    with_gate(2, 100, scene)
