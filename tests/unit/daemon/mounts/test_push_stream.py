"""Orders of one mount over several subscriptions, without a pusher."""

import asyncio
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import pytest

from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.pagecache import push_plan
from cachefs.planning.pagecache.push_lookahead import PushReader
from cachefs.planning.pagecache.push_plan import MountConsumers, PushPlan
from cachefs.planning.pagecache.states import Blocks
from cachefs.push_messages import PushCommand, PushReport, PushResult, PushSubscription, StoredPages
from cachefs_daemon.mounts.pushers import MountConsumersSource, Pushers, PushStream, TierFacts
from tests import virtual_time
from tests.blockstore import BLOCK_SIZE, OpenStore, fill, key_of, memory_directory, opened, store_config

COUNT = 30
SIZE = 100_000


@pytest.fixture
def store() -> Iterator[OpenStore]:
    contents = np.frombuffer(
        b"".join(key_of(number)[:16] for number in range(COUNT)), [("high", "<u8"), ("low", "<u8")]
    )
    with memory_directory() as root, opened(store_config(root, policy="clairvoyant")) as made:
        space = BlockSpace("s", BLOCK_SIZE, np.full(COUNT, SIZE, np.int64), contents)
        made.plan.add_space(space)
        made.plan.set_epoch("c", "s", 0, np.arange(COUNT), is_last=True)
        made.watch(space)
        fill(made, range(COUNT))
        yield made


def pusher_of(store: OpenStore, every: int = 0, audience: Callable[[], MountConsumers] | None = None) -> PushStream:
    """every: reads from one tripwire of its only reader to the next."""
    only = MountConsumers([PushReader("c", "s", 0, 0, every)])
    plan = PushPlan(store.plan, store.presence, lambda snapshot: True, first_serial=1)
    return PushStream(plan, lambda latency: audience() if audience is not None else only, lambda: 0.0)


def held(snapshot: str, *entries: int) -> StoredPages:
    return StoredPages(snapshot, np.array(entries, "<u8").tobytes(), np.zeros(len(entries), "<u4").tobytes())


def entries_of(order: PushCommand) -> list[int]:
    return np.frombuffer(order.entries, "<u8").tolist()


def report(*serials: int, **counters: int) -> PushReport:
    return PushReport("m", [PushResult(serial) for serial in serials], 64 * SIZE, counters)


def test_what_an_order_left_open_counts_as_pushed(store: OpenStore) -> None:
    async def run() -> None:
        pusher = pusher_of(store)
        first = pusher.commands(PushSubscription("m", 16 * SIZE))
        given = entries_of(await anext(first))
        assert given == list(range(len(given)))
        used = pusher.pages.used
        second = pusher.commands(PushSubscription("m", 32 * SIZE))
        following = entries_of(await anext(second))
        assert following == list(range(len(given), len(given) + len(following)))
        assert pusher.pages.used == used + len(following) * SIZE <= 32 * SIZE
        with pytest.raises(StopAsyncIteration):
            await anext(first)
        assert pusher.is_listening
        await second.aclose()
        assert not pusher.is_listening

    virtual_time.run(run())


def test_orders_end_with_the_daemon(store: OpenStore) -> None:
    async def run() -> None:
        pusher = pusher_of(store)
        orders = pusher.commands(PushSubscription("m", 16 * SIZE))
        await anext(orders)
        pusher.close()
        async with asyncio.timeout(20):
            assert [order async for order in orders] == []
        assert not pusher.is_listening

    virtual_time.run(run())


def test_a_daemon_that_is_ending_opens_no_stream_of_orders(store: OpenStore) -> None:
    async def run() -> None:
        pushers = Pushers(
            store.plan,
            store.presence,
            store.coverage,
            cast(MountConsumersSource, None),
            TierFacts(lambda: 0.0, lambda: 0.0),
        )
        pushers.close()
        assert [order async for order in pushers.commands(PushSubscription("m", 16 * SIZE))] == []

    virtual_time.run(run())


def test_pages_that_nobody_plans_are_dropped_before_more_is_pushed(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_plan, "UNPLANNED_SECONDS", 0.2)

    async def run() -> None:
        asked: list[bool] = []

        def audience() -> MountConsumers:
            asked.append(True)
            return MountConsumers([PushReader("c", "s", 0, 0, 0)])

        pusher = pusher_of(store, audience=audience)
        unplanned = list(range(5, 5 + push_plan.COMMAND_BLOCKS + 4))
        orders = pusher.commands(PushSubscription("m", 20 * SIZE, [held("s", 0, 1, 2), held("old", *unplanned)]))
        dropped = [await anext(orders), await anext(orders)]
        assert pusher.pages.used == 3 * SIZE
        assert [(one.snapshot, one.drop) for one in dropped] == [("old", True)] * 2
        assert [entry for one in dropped for entry in entries_of(one)] == unplanned
        assert not asked
        pusher.handle_report(report(*(one.serial for one in dropped)))
        checked = await anext(orders)
        assert (checked.check, entries_of(checked)) == (True, [0, 1, 2])
        pushed = await anext(orders)
        assert (pushed.drop, pushed.check, entries_of(pushed)[0]) == (False, False, 3)

    virtual_time.run(run())


def test_counters_go_on_where_another_pusher_begins_at_nothing(store: OpenStore) -> None:
    async def run() -> None:
        pusher = pusher_of(store)
        for counters in (
            {"stored": 5, "errors": 0},
            {"stored": 9, "errors": 1},
            {"stored": 2, "errors": 0},
            {"stored": 3, "errors": 0},
        ):
            pusher.handle_report(report(**counters))
        assert pusher.counters == {"stored": 12, "errors": 1}

    virtual_time.run(run())


def test_what_is_read_through_another_mount_is_dropped_unless_somebody_here_has_read_it(store: OpenStore) -> None:
    here = MountConsumers([PushReader("c", "s", 0, 0, 0)])
    audiences = [here]

    async def run() -> None:
        pusher = pusher_of(store, audience=lambda: audiences[-1])
        orders = pusher.commands(PushSubscription("m", 64 * SIZE))
        pushed = await anext(orders)
        assert len(entries_of(pushed)) == COUNT
        pusher.handle_report(report(pushed.serial))
        pusher.pages.note_read(Blocks("s", np.array([3, 4], np.int32)), np.zeros(0, np.int32), now=0.0)
        assert len(pusher.states["s"]) == COUNT
        audiences.append(MountConsumers([], frozenset({"s"})))
        dropped = await anext(orders)
        assert dropped.drop
        assert entries_of(dropped) == [entry for entry in range(COUNT) if entry not in (3, 4)]
        assert pusher.states == {}
        pusher.handle_report(report(dropped.serial))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(orders), 0.3)

    virtual_time.run(run())


def test_a_block_that_is_larger_than_an_order_is_ordered_alone(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_plan, "COMMAND_BYTES", SIZE // 2)

    async def run() -> None:
        orders = pusher_of(store).commands(PushSubscription("m", 64 * SIZE))
        assert [entries_of(await anext(orders)) for _ in range(3)] == [[0], [1], [2]]

    virtual_time.run(run())


def test_who_subscribes_anew_gets_what_the_last_one_would_have_got(
    store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_plan, "COMMAND_BYTES", SIZE)

    async def run() -> None:
        pusher = pusher_of(store)
        request = PushSubscription("m", 64 * SIZE)
        old = pusher.commands(request)
        assert entries_of(await anext(old)) == [0]
        new = pusher.commands(request)
        assert entries_of(await anext(new)) == [1]
        with pytest.raises(StopAsyncIteration):
            await anext(old)
        assert entries_of(await anext(new)) == [2]

    virtual_time.run(run())


def test_tripwires_of_which_a_part_is_there_are_dropped() -> None:
    """Or they would not show in the next epoch."""
    large, count = 4 << 20, 64
    contents = np.frombuffer(bytes(range(16)) * count, [("high", "<u8"), ("low", "<u8")]).copy()
    contents["low"] += np.arange(count, dtype="<u8")
    with memory_directory() as root, opened(store_config(root, policy="clairvoyant")) as store:
        space = BlockSpace("s", large, np.full(count, large, np.int64), contents)
        store.plan.add_space(space)
        store.plan.set_epoch("c", "s", 0, np.arange(count), is_last=True)

        async def run() -> None:
            pusher = pusher_of(store, every=8)
            orders = pusher.commands(PushSubscription("m", count * large))
            pusher.pages.budget = count * large
            pusher.pages.follow_plan()
            pusher.pages.note_read(Blocks("s", np.arange(count, dtype=np.int32)), np.zeros(0, np.int32), now=0.0)
            dropped = await anext(orders)
            assert (dropped.drop, entries_of(dropped)) == (True, list(range(7, count, 8)))

        virtual_time.run(run())


def test_what_a_pusher_has_counted_before_a_restart_of_the_daemon_does_not_count_again(store: OpenStore) -> None:
    async def run() -> None:
        stream = pusher_of(store)
        first = stream.commands(PushSubscription("m", 64 * SIZE, counters={"stored_blocks": 100}))
        await anext(first)
        stream.handle_report(report(stored_blocks=103))
        assert (stream.counters["stored_blocks"], stream.counters_since_start["stored_blocks"]) == (103, 3)
        stream.handle_report(report(stored_blocks=2))  # another process
        second = stream.commands(PushSubscription("m", 32 * SIZE, counters={"stored_blocks": 2}))
        await anext(second)
        assert stream.counters_since_start["stored_blocks"] == 5
        await second.aclose()
        await first.aclose()

    virtual_time.run(run())
