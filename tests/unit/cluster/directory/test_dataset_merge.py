"""Nodes that make changes at the same time, and hear of them in any order, come to the same end."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cachefs.messages import OriginOptions
from cachefs_cluster.directory.dataset_merge import includes, is_same, resolve
from cachefs_cluster.sharing.sections import SharedDataset
from cachefs_daemon.datasets.stamps import ChangeStamp, StampClock

NODES = 3
NODE = st.integers(0, NODES - 1)
STEP = st.one_of(
    st.tuples(st.just("add"), NODE, st.sampled_from("xy")),
    st.tuples(st.just("refresh"), NODE, st.integers(0, 9)),
    st.tuples(st.just("limit"), NODE, st.integers(1, 9)),
    st.tuples(st.just("reach"), NODE, st.integers(0, 9)),
    st.tuples(st.just("remove"), NODE, st.none()),
    st.tuples(st.just("hear"), NODE, NODE),
)


class Cluster:
    """Nodes without anything but what they know of one name."""

    def __init__(self) -> None:
        self.clocks = [StampClock(f"{number:016x}") for number in range(NODES)]
        self.have = [SharedDataset() for _ in range(NODES)]
        self.ever: list[SharedDataset] = []  # each dataset as it was added
        self.removed: list[SharedDataset] = []  # as it was where it was removed
        self.had: list[SharedDataset] = []  # by any node at any time

    def do(self, what: str, node: int, argument: Any) -> None:
        getattr(self, what)(node, argument)
        self.had.append(self.have[node])

    def may_be_gone(self) -> set[ChangeStamp]:
        """What was removed, and what a node had as one with it."""
        gone = {stamp for one in self.removed for stamp in one.added}
        while more := {stamp for one in self.had if not gone.isdisjoint(one.added) for stamp in one.added} - gone:
            gone |= more
        return gone

    def add(self, node: int, url: str) -> None:
        if not self.have[node].added:
            stamp = self.clocks[node].tick()
            added = SharedDataset(gone=self.have[node].gone, added=[stamp], url=url, listed=stamp, snapshot="0")
            self.have[node] = added
            self.ever.append(added)

    def refresh(self, node: int, snapshot: int) -> None:
        self.change(node, snapshot=str(snapshot), listed=self.clocks[node].tick())

    def limit(self, node: int, tenths: int) -> None:
        self.change(node, share=tenths / 10, limited=self.clocks[node].tick())

    def reach(self, node: int, way: int) -> None:
        options = OriginOptions(region=str(way))
        self.change(node, options=options, named=b"x", reached=self.clocks[node].tick())

    def change(self, node: int, **fields: Any) -> None:
        if self.have[node].added:
            self.have[node] = msgspec.structs.replace(self.have[node], **fields)

    def remove(self, node: int, _: None) -> None:
        own = self.have[node]
        if own.added:
            self.removed.append(own)
            self.have[node] = SharedDataset(gone=sorted({*own.gone, *own.added}))

    def hear(self, node: int, other: int) -> None:
        self.take(node, [self.have[other]])

    def take(self, node: int, others: list[SharedDataset]) -> None:
        for one in others:
            self.clocks[node].see([*one.gone, *one.added, one.listed, one.limited, one.reached])
        self.have[node] = resolve(self.have[node], others).value
        self.had.append(self.have[node])

    def settle(self) -> None:
        for _ in range(4):
            for node in range(NODES):
                self.take(node, [other for number, other in enumerate(self.have) if number != node])


@given(st.lists(STEP, max_size=30))
def test_all_nodes_come_to_the_same_end(steps: list[Any]) -> None:
    cluster = Cluster()
    for step in steps:
        cluster.do(*step)
    cluster.settle()
    assert len({tuple(one.gone) for one in cluster.have}) == 1
    gone = set(cluster.have[0].gone)
    assert gone <= cluster.may_be_gone()
    live = [one for one in cluster.have if one.added]
    # What was removed is nowhere.
    assert all(gone.isdisjoint(one.added) for one in live)
    for one in cluster.removed:
        assert set(one.added) <= gone
    # What was not removed, nor had become one with what was, is somewhere: nothing is lost without a word.
    for one in cluster.ever:
        assert any(is_same(one, other) for other in live) or not gone.isdisjoint(one.added)
    # Either all have the same, or each knows of the other one.
    if all(is_same(live[0], one) for one in live):
        assert len({msgspec.json.encode(one) for one in cluster.have}) == 1
        assert all(includes(one, other) for one in cluster.have for other in cluster.have)
    else:
        for node, own in enumerate(cluster.have):
            rival = resolve(own, [other for number, other in enumerate(cluster.have) if number != node]).rival
            assert rival is not None
            assert not is_same(own, rival)
    # A node that knew nothing takes the one that was added first.
    fresh = resolve(SharedDataset(), cluster.have).value
    if live:
        assert fresh.added == min(one.added for one in live)


def stamped(*clocks: int) -> list[ChangeStamp]:
    return [ChangeStamp(clock, "a" * 16) for clock in clocks]


def test_the_later_listing_and_the_later_limits_hold() -> None:
    one = SharedDataset(added=stamped(1), url="s3://a", snapshot="1", listed=ChangeStamp(5, "b"), share=0.1)
    other = SharedDataset(
        added=stamped(1), url="s3://a", snapshot="2", listed=ChangeStamp(2, "c"), share=0.2, limited=ChangeStamp(3, "c")
    )
    value = resolve(one, [other]).value
    assert (value.snapshot, value.share) == ("1", 0.2)


def test_the_later_way_to_the_origin_holds_also_with_an_older_listing() -> None:
    ceph, minio = OriginOptions(endpoint_url="http://ceph"), OriginOptions(endpoint_url="http://minio")
    one = SharedDataset(added=stamped(1), url="s3://a", options=ceph, snapshot="1", listed=ChangeStamp(5, "b"))
    other = msgspec.structs.replace(one, options=minio, named=b"s3:http://ceph:a/", reached=ChangeStamp(4, "c"))
    for value in (resolve(one, [other]).value, resolve(other, [one]).value):
        assert (value.options, value.named, value.snapshot) == (minio, b"s3:http://ceph:a/", "1")


def test_a_dataset_that_was_away_when_it_was_removed_is_removed_when_it_is_back() -> None:
    back = SharedDataset(added=stamped(1, 7), url="s3://a", snapshot="1", listed=ChangeStamp(90, "b"))
    value = resolve(back, [SharedDataset(gone=stamped(7))]).value
    assert value == SharedDataset(gone=stamped(1, 7))


def test_a_dataset_that_is_added_again_is_another_one() -> None:
    fresh = SharedDataset(added=stamped(8), url="s3://a", snapshot="1", listed=ChangeStamp(8, "b"))
    value = resolve(SharedDataset(gone=stamped(1, 7)), [fresh]).value
    assert (value.added, value.gone) == (stamped(8), stamped(1, 7))


def test_a_dataset_that_is_added_again_stays_when_one_that_was_away_still_has_the_removed_one() -> None:
    away = SharedDataset(added=stamped(1), url="s3://a", snapshot="1", listed=ChangeStamp(9, "b"))
    fresh = SharedDataset(gone=stamped(1), added=stamped(8), url="s3://a", snapshot="2", listed=ChangeStamp(8, "b"))
    for own, other in ((away, fresh), (fresh, away), (SharedDataset(), fresh)):
        assert resolve(own, [other]).value == fresh
    assert resolve(SharedDataset(), [away, fresh]).value == fresh
