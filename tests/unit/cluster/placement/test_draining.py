"""Nodes that drain at the same moment: one of them stays, and the others leave what they hold to it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from cachefs.errors import ConfigError
from cachefs_cluster.membership.view import ClusterView, State
from cachefs_cluster.placement import draining
from cachefs_cluster.placement.draining import DrainController
from cachefs_cluster.placement.rebalance_status import ring_digest
from cachefs_cluster.sharing.sections import REBALANCE, REBALANCE_NAME, RebalanceFacts
from cachefs_daemon.runtime.threads import Threads
from tests.members import on_virtual_time
from tests.sharing import SharingNode, introduce, node_record
from tests.waiting import until_async


class Drained(SharingNode):
    """A node whose state other nodes learn when the test says so."""

    def __init__(self, number: int, threads: Threads) -> None:
        super().__init__(node_record(number), threads)
        self.membership.announce = self._announce  # type: ignore[method-assign]
        self.membership.leave = self._leave  # type: ignore[attr-defined]
        self.draining = DrainController(self.membership, self.shared, lambda: False)  # type: ignore[arg-type]
        self.has_left = False

    async def _announce(self, state: State) -> None:
        self.record = dataclasses.replace(self.record, state=state)
        self.see([self.record, *self.membership.view.others])

    async def _leave(self) -> None:
        self.has_left = True

    def see(self, records: list) -> None:  # type: ignore[type-arg]
        """Show it these members; those that are active count for placement."""
        records.sort(key=lambda one: one.id)
        ring = tuple(one.id for one in records if one.state == "active")
        self.membership.view = ClusterView(1, self.record.id, tuple(records), ring, "test")
        for callback in self.membership.callbacks:
            callback(self.membership.view)
        self.shared.publish(REBALANCE, REBALANCE_NAME, RebalanceFacts(ring_digest(ring), 0, 0))


@contextlib.asynccontextmanager
async def drained_nodes(count: int) -> AsyncIterator[list[Drained]]:
    threads = Threads()
    nodes = [Drained(number + 1, threads) for number in range(count)]
    tasks = []
    try:
        for node in nodes:
            await node.start()
        introduce(nodes)
        tasks = [asyncio.create_task(node.draining.run()) for node in nodes]
        for node in nodes:
            await until_async(
                lambda node=node: all(node.shared.has_responded(one.id) for one in node.membership.view.others)
            )
        yield nodes
    finally:
        for task in tasks:
            task.cancel()
        for node in nodes:
            await node.shared.stop()
        threads.close()


def deliver(nodes: list[Drained], away: tuple[Drained, ...] = ()) -> None:
    """All nodes learn what all have announced by now."""
    records = [dataclasses.replace(one.record, state="away") if one in away else one.record for one in nodes]
    for node in nodes:
        node.see(list(records))


@pytest.mark.parametrize("count", [2, 3, 5])
@on_virtual_time
async def test_of_nodes_that_all_drain_at_once_the_first_by_name_stays_and_the_others_leave(count: int) -> None:
    async with drained_nodes(count) as nodes:
        for node in nodes:
            assert not (await node.draining.drain_this_node()).done  # each sees the others active
        deliver(nodes)
        first, *others = nodes
        for node in nodes:
            with contextlib.suppress(ConfigError):  # the first one may have taken its drain back already
                assert not (await node.draining.drain_this_node()).done
        await until_async(lambda: first.record.state == "active")
        assert [one.record.state for one in others] == ["draining"] * (count - 1)
        with pytest.raises(ConfigError, match=r"drains? too"):
            await first.draining.drain_this_node()
        deliver(nodes)

        for node in others:
            while not (await node.draining.drain_this_node()).has_left:  # noqa: ASYNC110
                await asyncio.sleep(1)  # the command asks like this
        assert [one.has_left for one in nodes] == [False] + [True] * (count - 1)


@on_virtual_time
async def test_a_node_that_drains_waits_for_one_that_is_away_and_counts_and_stays_when_that_counts_no_more() -> None:
    async with drained_nodes(2) as nodes:
        one, two = nodes
        await one.draining.drain_this_node()
        away = dataclasses.replace(two.record, state="away")
        one.membership.view = ClusterView(2, one.record.id, (one.record, away), (two.record.id,), "test")
        for callback in one.membership.callbacks:
            callback(one.membership.view)
        assert not (await one.draining.drain_this_node()).done
        assert one.record.state == "draining"
        one.see([one.record, away])  # it counts no more
        await until_async(lambda: one.record.state == "active")


@on_virtual_time
async def test_a_node_that_was_to_stay_and_does_not_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "STAY_SECONDS", 0.05)
    async with drained_nodes(2) as nodes:
        one, two = nodes
        await two.draining.drain_this_node()
        # With a static list a node that has left is seen as draining for good.
        two.see([dataclasses.replace(one.record, state="draining"), two.record])
        await until_async(lambda: two.record.state == "active")
