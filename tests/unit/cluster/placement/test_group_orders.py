"""What the consumers of a group read, in blocks."""

from dataclasses import replace

import numpy as np
import pytest

from cachefs.planning.blocks.space import Samples
from cachefs.planning.sequences.sampler import EpochOrder, epoch_order
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_cluster.placement.group_orders import (
    GroupOrders,
    Orders,
    is_epoch_known,
    is_last,
    is_shared_out,
    published_samples,
)
from cachefs_cluster.placement.groups import ConsumerGroup, GroupMember, groups_of
from cachefs_cluster.sharing.sections import ConsumerFacts, OrderRef
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.simulated import space_of

SPACE = space_of([10] * 101)
SAMPLES = Samples(SPACE, np.arange(102), np.arange(101, dtype=np.int32))


def orders_of(group: ConsumerGroup, epoch: int, published: dict[tuple[str, int], EpochOrder] | None = None) -> Orders:
    async def given(member: GroupMember, number: int) -> EpochOrder:
        assert published is not None
        return published[member.facts.consumer, number]

    threads = Threads()
    try:
        return virtual_time.run(GroupOrders(threads, given).orders_of(group, {"": SAMPLES}, epoch))
    finally:
        threads.close()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_rank_reads_what_its_own_sampler_says(drop_last: bool, shuffle: bool) -> None:
    spec = SamplerSpec(
        kind="torch-distributed", size=101, epochs=3, replicas=4, seed=5, drop_last=drop_last, shuffle=shuffle
    )
    facts = [ConsumerFacts("j", f"r{rank}", "ds", "a" * 32, rank, 4, replace(spec, rank=rank)) for rank in range(4)]
    [group] = groups_of({"a": facts[:2], "b": facts[2:]})
    for epoch in range(3):
        found = orders_of(group, epoch)
        assert [node for node, _ in found] == ["a", "a", "b", "b"]
        for rank, (_, blocks) in enumerate(found):
            expected = epoch_order(replace(spec, rank=rank), epoch)[: len(blocks)]
            assert blocks.tolist() == expected.tolist(), "what pads an order is read before, by another rank"
            assert len(blocks) >= 101 // 4
    assert is_epoch_known(group, 2)
    assert is_last(group, 2)
    assert not is_epoch_known(group, 3)
    assert orders_of(group, 3) == []


def test_consumers_with_one_order_read_the_same() -> None:
    spec = SamplerSpec(kind="numpy", size=101, epochs=2)
    facts = [ConsumerFacts("j", name, "ds", "a" * 32, spec=spec) for name in "xy"]
    [group] = groups_of({"a": facts[:1], "b": facts[1:]})
    first, second = orders_of(group, 1)
    assert first[1].tolist() == second[1].tolist() == epoch_order(spec, 1).tolist()


def test_published_orders_are_asked_for_where_they_are_known() -> None:
    x = ConsumerFacts("j", "x", "ds", "a" * 32, orders=[OrderRef(4, "b" * 32, 3)])
    y = ConsumerFacts("j", "y", "ds", "a" * 32, orders=[OrderRef(4, "b" * 32, 3), OrderRef(5, "c" * 32, 2)])
    [group] = groups_of({"a": [x], "b": [y]})
    orders = {
        ("x", 4): np.array([7, 8, 9], np.uint32),
        ("y", 4): np.array([1, 200, 2], np.uint32),  # the second one does not exist
        ("y", 5): np.array([3, 4], np.uint32),
    }
    assert [(node, blocks.tolist()) for node, blocks in orders_of(group, 4, orders)] == [
        ("a", [7, 8, 9]),
        ("b", [1, 2]),
    ]
    assert [(node, blocks.tolist()) for node, blocks in orders_of(group, 5, orders)] == [("b", [3, 4])]
    assert is_epoch_known(group, 4)
    assert not is_epoch_known(group, 5), "x has not said how it reads then"
    assert not is_last(group, 5)


def test_an_order_that_nobody_reads_costs_nothing() -> None:
    spec = SamplerSpec(kind="torch-distributed", size=200_000_000, epochs=9, replicas=2)
    facts = [ConsumerFacts("j", "x", "ds", "a" * 32, spec=spec)]
    [group] = groups_of({"a": facts})
    assert orders_of(group, 0) == []
    # One of those that are published one by one is not even asked for.
    orders = [[OrderRef(0, "b" * 32, 3)], [OrderRef(0, "c" * 32, 2_000_000_000)]]
    named = [ConsumerFacts("j", name, "ds", "a" * 32, orders=one) for name, one in zip("xy", orders, strict=True)]
    [group] = groups_of({"a": named[:1], "b": named[1:]})
    published: dict[tuple[str, int], EpochOrder] = {("x", 0): np.array([5, 6, 7], np.uint32)}
    assert [(node, blocks.tolist()) for node, blocks in orders_of(group, 0, published)] == [("a", [5, 6, 7])]


def test_an_order_is_asked_for_once_and_again_when_another_one_is_published_in_its_place() -> None:
    asked: list[int] = []

    async def given(member: GroupMember, number: int) -> EpochOrder:
        asked.append(number)
        return np.array([number, len(asked)], np.uint32)

    def named(digest: str) -> ConsumerGroup:
        orders = [OrderRef(4, digest * 32, 2), OrderRef(5, "e" * 32, 2)]
        [group] = groups_of({"a": [ConsumerFacts("j", "0", "ds", "a" * 32, orders=orders)]})
        return group

    async def ask() -> None:
        threads = Threads()
        try:
            orders, samples = GroupOrders(threads, given), {"": SAMPLES}
            first = await orders.orders_of(named("b"), samples, 4)
            assert await orders.orders_of(named("b"), samples, 4) is first
            assert asked == [4]
            [(_, blocks)] = await orders.orders_of(named("c"), samples, 4)
            assert blocks.tolist() == [4, 2]
        finally:
            threads.close()

    virtual_time.run(ask())


def test_each_member_means_by_a_sample_what_its_own_map_says() -> None:
    shards = {digest * 32: Samples(SPACE, np.arange(3), np.array(ids, np.int32)) for digest, ids in
              (("b", [10, 11]), ("c", [20, 21]))}  # fmt: skip
    facts = [
        ConsumerFacts("j", str(rank), "ds", "a" * 32, rank, 2, orders=[OrderRef(0, f"{rank:032}", 2)], map=digest)
        for rank, digest in enumerate(shards)
    ]
    [group] = groups_of({"n": facts})

    async def given(member: GroupMember, number: int) -> EpochOrder:
        return np.array([1, 0], np.uint32)

    threads = Threads()
    try:
        found = virtual_time.run(GroupOrders(threads, given).orders_of(group, shards, 0))
    finally:
        threads.close()
    assert [blocks.tolist() for _, blocks in found] == [[11, 10], [21, 20]]
    assert published_samples(group, 0) == 4


def test_samples_are_shared_out_where_few_of_them_have_several_readers() -> None:
    def orders(*parts: range) -> Orders:
        return [("n", np.array(part, np.int32)) for part in parts]

    assert is_shared_out(orders(range(50), range(50, 100)))
    assert is_shared_out(orders(range(51), range(50, 100))), "what pads a share"
    assert is_shared_out([("n", np.array([1, 1, 1, 2], np.int32)), ("m", np.array([3, 4], np.int32))])
    assert not is_shared_out(orders(range(100), range(100)))
    assert not is_shared_out(orders(range(80), range(20, 100)))
    assert is_shared_out([])
