import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.planning.scheduling.cluster_facts import GRACE_SECONDS, TRUST_HALF_LIFE_SECONDS, ClusterFacts
from cachefs.planning.scheduling.estimates import estimates
from cachefs.planning.scheduling.facts import NodeCopy, SnapshotFacts

from .making import GB, SIZE, cluster_of, copy_of, job, node

CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(["put", "remove", "look", "forget", "away"]),
        st.sampled_from(["s", "t", "none"]),
        st.floats(0, 1),
        st.sampled_from(["x", "y"]),
    ),
    max_size=15,
)


@settings(max_examples=25)
@given(CHANGES)
def test_changes_one_by_one_end_where_all_at_once_do(changes):
    """However it came about, what is known depends on the last facts of each node alone."""
    cluster, last, now = ClusterFacts(), {}, 0.0
    sizes = {"s": SIZE, "t": 3 * GB}
    for snapshot, size in sizes.items():
        cluster.add_snapshot(SnapshotFacts(snapshot, size, 10))
    for name, what, snapshot, part, zone in changes:
        now += 200 * part
        if what == "look":
            cluster.advance_clock(now)
        elif what == "remove":
            if last.pop(name, None):
                cluster.remove_node(name)
        elif what == "forget":
            cluster.forget_snapshot("t")
            cluster.add_snapshot(SnapshotFacts("t", sizes["t"], 10))
        else:
            copies = {} if snapshot == "none" else {snapshot: copy_of(0, part, sizes[snapshot])}
            facts = node(
                name, zone=zone, state="away" if what == "away" else "up", copies=copies, jobs={snapshot: int(part * 3)}
            )
            last[name] = (facts, now)
            cluster.update_node(facts, now)
    cluster.advance_clock(now)
    again = ClusterFacts()
    for snapshot, size in sizes.items():
        again.add_snapshot(SnapshotFacts(snapshot, size, 10))
    for facts, heard in last.values():
        again.update_node(facts, heard)
    again.advance_clock(now)
    names = ["a", "b", "c", "d"]
    assert cluster.jobs_on("s") == again.jobs_on("s")
    for snapshot in (*sizes, "none"):
        assert cluster.is_read(snapshot) == bool(again.jobs_on(snapshot))
    for mine, its in zip(estimates(job(), names, cluster).sources, estimates(job(), names, again).sources, strict=True):
        np.testing.assert_allclose(mine, its)
    for one in (cluster, again):
        for name in list(one):
            one.remove_node(name)
        assert not list(one.spread("s").zones())
        assert not len(one)


def test_what_a_silent_node_said_counts_less_and_less():
    cluster = cluster_of(node("a", (0, 1)))
    counted = []
    for now in (
        0.0,
        GRACE_SECONDS,
        GRACE_SECONDS + TRUST_HALF_LIFE_SECONDS,
        GRACE_SECONDS + 2 * TRUST_HALF_LIFE_SECONDS,
        1e5,
    ):
        cluster.advance_clock(now)
        found = estimates(job(), ["a"], cluster).estimate_of(0)
        counted.append((found.trust, found.local, found.origin))
    assert counted == [
        (1.0, SIZE, 0),
        (1.0, SIZE, 0),
        (0.5, SIZE // 2, SIZE // 2),
        (0.25, SIZE // 4, SIZE * 3 // 4),
        (0.0, 0, SIZE),
    ]
    assert cluster.current_facts("a").age == 1e5
    cluster.update_node(node("a", (0, 1), age=5), 1e5)
    assert estimates(job(), ["a"], cluster).estimate_of(0).trust == 1


def test_a_node_that_is_away_gives_nothing():
    cluster = cluster_of(node("a", (0, 1), state="away"), node("b"))
    assert estimates(job(), ["b"], cluster).estimate_of(0).origin == SIZE


def test_what_is_spread_over_thousands_of_nodes_is_all_there():
    """Each of them has less than a shard of it."""
    nodes = [node(f"n{i}", copies={"s": NodeCopy(0, SIZE // 2000)}) for i in range(2000)]
    found = estimates(job(), ["n0"], cluster_of(*nodes)).estimate_of(0)
    assert found.origin < SIZE / 100
    assert found.local == pytest.approx(SIZE / 2000)


def test_what_is_not_known_is_guessed_from_others():
    cluster = cluster_of(node("a", (0, 1)), node("b", peer_rate=0.0), node("c", peer_rate=2e8), node("d"))
    first = estimates(job(), ["b", "d", "stranger"], cluster).first
    assert first[0] == first[1] == first[2]
    assert estimates(job(), ["c"], cluster).first[0] > first[0]


def test_too_many_nodes_are_refused(monkeypatch):
    monkeypatch.setattr("cachefs.planning.scheduling.cluster_facts.MAX_NODES", 2)
    cluster = cluster_of(node("a"), node("b"))
    with pytest.raises(ValueError, match="cannot add c"):
        cluster.update_node(node("c"), 0.0)
    cluster.update_node(node("b", (0, 1)), 1.0)
    assert list(cluster.holders("s")) == ["b"]
