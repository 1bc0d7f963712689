"""Nodes of a cluster as memberships without daemons, for tests of what keeps their records."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cachefs_cluster.membership.shared import SharedMembership
from cachefs_cluster.membership.view import NodeRecord
from tests import virtual_time
from tests.waiting import until_async


def on_loop(
    test: Callable[..., Coroutine[Any, Any, None]], runs: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
) -> Callable[..., None]:
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        runs(test(*arguments, **fixtures))

    return run


on_virtual_time = functools.partial(on_loop, runs=virtual_time.run)


def member_id(number: int) -> str:
    return f"{number:016x}"


def member_record(number: int, *, incarnation: int = 1, port: int = 0) -> NodeRecord:
    """What node *number* says of itself at a start."""
    return NodeRecord(
        member_id(number), f"{incarnation:016x}", f"node{number}", "127.0.0.1", port or 7000 + 10 * number,
        7001 + 10 * number, weight=float(number), memory=1 << 30,
    )  # fmt: skip


async def all_active(found: Sequence[SharedMembership], numbers: Sequence[int]) -> None:
    """Start nodes, and wait until they all know of each other."""
    await asyncio.gather(*(each.start() for each in found))
    for each in found:
        await each.announce("active")
    await until_async(lambda: all(ring(each) == list(numbers) for each in found) and one_epoch(found))


def ring(each: SharedMembership) -> list[int]:
    """Numbers of the nodes that count for placement."""
    return [int(node.id, 16) for node in each.view.placed_members]


def one_epoch(found: Sequence[SharedMembership]) -> bool:
    """Have all the same epoch?"""
    return len({each.view.epoch for each in found}) == 1 and found[0].view.epoch > 0


def state(each: SharedMembership, number: int) -> str:
    """The state of node *number* in a view."""
    found = each.view.get(member_id(number))
    return found.state if found is not None else "gone"
