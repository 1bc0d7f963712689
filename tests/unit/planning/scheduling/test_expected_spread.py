import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.scheduling.assignment import assign_ranks
from cachefs.planning.scheduling.cluster_facts import GRACE_SECONDS, TRUST_HALF_LIFE_SECONDS
from cachefs.planning.scheduling.copies import cached_copies, plan_clone
from cachefs.planning.scheduling.estimates import estimates, score_nodes
from cachefs.planning.scheduling.facts import SHARDS, JobRequest, NodeCopy

from .making import GB, SIZE, cluster_of, copy_of, job, node

READ = {"s": 1}
NODES = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.floats(0, 1),
        st.sampled_from(["blocks", "evenly", "none"]),
        st.booleans(),
        st.integers(0, 200),
        st.sampled_from(["up", "up", "draining", "away"]),
        st.sampled_from(["x", "y"]),
        st.floats(0, 3000),
    ),
    min_size=1,
    max_size=6,
)


def node_of(number, first, last, kind, reads, room, state, zone, age):
    first, last = sorted((first, last))
    copy = copy_of(first, last) if kind == "blocks" else NodeCopy(0, round((last - first) * SIZE))
    there = {} if kind == "none" else {"s": copy}
    held = copy.bytes if there else 0
    more = {"capacity": held + room * GB, "jobs": READ if reads else {}, "state": state, "zone": zone, "age": age}
    return node(str(number), copies=there, **more)


@given(NODES)
def test_readers_will_have_all_that_they_have_room_for_and_nothing_more(drawn):
    nodes = [node_of(number, *one) for number, one in enumerate(drawn)]
    cluster = cluster_of(*nodes)
    cluster.advance_clock(0.0)
    rows = cluster.rows([one.name for one in nodes])
    there, soon = cluster.spread("s"), cluster.expected_spread("s")
    now, then = there.matrix_of(rows), soon.matrix_of(rows)
    reads = np.array([bool(one.jobs) for one in nodes]) & (cluster.trust(rows) > 0)
    more = (then - now).astype(np.float64)

    assert (more >= 0).all()
    assert (then <= 1).all()
    assert not more[~reads].any()
    # Together they bring what they lack, and none more than it has room for.
    lack = np.maximum(1 - now[reads].sum(axis=0), 0)
    assert (more.sum(axis=0) <= lack + 1e-5).all()
    assert (more.mean(axis=1) * SIZE <= cluster.room(rows) + 1e-5 * SIZE).all()
    if reads.any() and (cluster.room(rows)[reads] >= SIZE).all():
        np.testing.assert_allclose(more.sum(axis=0), lack, atol=1e-5)
    # All answers are about the same parts.
    np.testing.assert_allclose(soon.coming_bytes(rows), more.mean(axis=1) * SIZE, atol=1e-5 * SIZE)
    # Parts of shards are rounded, the part of the whole is not: a sum may be a little more than all.
    np.testing.assert_allclose(
        soon.held_share(rows), np.minimum(there.held_share(rows) + more.mean(axis=1), 1), atol=1e-5
    )
    weights = np.linspace(0, 2, SHARDS).astype(np.float32) / SHARDS
    weighed = np.minimum(there.held_share(rows, weights) + more @ weights, 1)
    np.testing.assert_allclose(soon.held_share(rows, weights), weighed, atol=1e-5)
    counted = cluster.trust(rows)[:, None]
    for zone in (1, 2):
        of_zone = cluster.zones_of(rows) == zone
        counts = there.coverage([zone]) + (more * counted)[of_zone].sum(axis=0)
        np.testing.assert_allclose(soon.coverage([zone]), np.minimum(counts, 1), atol=1e-4)
    assert soon.coverage(soon.zones()).max() <= 1
    assert set(there.zones()) <= set(soon.zones())
    assert set(soon.rows()) >= set(there.rows())


@given(NODES, st.booleans())
def test_nothing_changes_where_nobody_reads_or_readers_have_all_of_it(drawn, complete):
    nodes = [node_of(number, *(*one[:3], False, *one[4:])) for number, one in enumerate(drawn)]
    if complete:
        nodes.append(node("all", (0, 1), jobs=READ))
    cluster = cluster_of(*nodes)
    names = [one.name for one in nodes]
    now, soon = (estimates(job(2), names, cluster, includes_expected=soon) for soon in (False, True))
    for one, other in zip((now.first, now.later, *now.sources), (soon.first, soon.later, *soon.sources), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@given(st.lists(NODES, min_size=2, max_size=4))
def test_news_of_readers_count_at_once(changes):
    """Whatever was asked before, the answer is that of a fresh start."""
    cluster, last = cluster_of(), {}
    for time, drawn in enumerate(changes):
        for number, one in enumerate(drawn):
            facts = node_of(number, *one)
            cluster.update_node(facts, 1000.0 * time)
            last[facts.name] = (facts, 1000.0 * time)
            cluster.expected_spread("s")
        if time % 2:
            cluster.advance_clock(1000.0 * time + 500)
            cluster.expected_spread("s")
    gone = next(iter(last))
    cluster.remove_node(gone)
    del last[gone]
    now = 1000.0 * len(changes)
    cluster.advance_clock(now)
    again = cluster_of()
    for facts, heard in last.values():
        again.update_node(facts, heard)
    again.advance_clock(now)
    names = sorted(last)
    mine, its = (each.expected_spread("s").matrix_of(each.rows(names)) for each in (cluster, again))
    np.testing.assert_allclose(mine, its, atol=1e-6)
    mine, its = (estimates(job(2), names, each, includes_expected=True) for each in (cluster, again))
    for left, right in zip(mine.sources, its.sources, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5 * SIZE)


def test_a_second_job_goes_where_the_first_one_brings_the_data():
    """Nobody has anything yet: without what is coming both nodes are alike, and the origin would be read twice."""
    cluster = cluster_of(node("busy", jobs=READ), node("idle"))
    assert score_nodes(job(), ["busy", "idle"], cluster).tolist() == [1.0, pytest.approx(0.8, abs=0.2)]
    assert assign_ranks(job(), ["idle", "busy"], cluster) == ("busy",)
    soon = estimates(job(), ["busy", "idle"], cluster, includes_expected=True)
    assert soon.sources[0].tolist() == [SIZE, 0]
    assert soon.sources[-1].tolist() == [0, 0]
    # What is there is what it was.
    assert estimates(job(), ["busy", "idle"], cluster).sources[-1].tolist() == [SIZE, SIZE]


def test_copies_and_clones_are_of_what_is_there():
    cluster = cluster_of(node("busy", (0, 0.5), jobs=READ), node("other"))
    assert cached_copies("s", cluster) == ()
    found = plan_clone(job(), ["other"], cluster)
    assert found is not None
    assert found.missing_bytes == SIZE
    # Half of it comes from the origin, whatever is on its way.
    assert found.seconds == pytest.approx(SIZE / 2 / 2e8)


def test_what_a_silent_reader_would_bring_counts_less_and_less():
    cluster = cluster_of(node("a", (0, 0.5), jobs=READ))
    found = []
    for now in (0.0, GRACE_SECONDS + TRUST_HALF_LIFE_SECONDS, 1e5):
        cluster.advance_clock(now)
        found.append(estimates(job(), ["a"], cluster, includes_expected=True).estimate_of(0).local)
    assert found == [SIZE, SIZE // 2, 0]


def test_a_reader_without_room_brings_nothing():
    full = node("a", (0, 0.5), capacity=SIZE // 2, jobs=READ)
    cluster = cluster_of(full, node("b", jobs=READ))
    soon = cluster.expected_spread("s")
    np.testing.assert_allclose(soon.held_share(cluster.rows(["a", "b"])), [0.5, 0.25], atol=1e-6)


def test_what_comes_into_memory_is_not_read_from_ssd():
    rows = ["disk", "memory"]
    cluster = cluster_of(node("disk", jobs=READ), node("memory", memory=400 * GB, jobs=READ))
    assert cluster.expected_spread("s").on_ssd(cluster.rows(rows)).tolist() == [1.0, 0.0]


def test_a_snapshot_that_nobody_has_told_of_or_of_no_bytes():
    cluster = cluster_of(node("a", jobs={"s": 1, "none": 1}), size=0)
    for snapshot in ("s", "none"):
        assert cluster.expected_spread(snapshot).coming_bytes(cluster.rows(["a", "b"])).tolist() == [0, 0]
        assert np.isfinite(score_nodes(JobRequest("j", snapshot), ["a", "b"], cluster)).all()


def test_each_job_brings_all_that_it_reads():
    """A node of one job has half of it; those of another one, which has begun, bring the whole of it to their nodes."""
    one = node("one", (0, 0.5), jobs=READ, names={"s": ["first"]})
    others = [node(name, jobs=READ, names={"s": ["second"]}) for name in ("two", "three")]
    cluster = cluster_of(one, *others)
    soon = cluster.expected_spread("s")
    np.testing.assert_allclose(soon.held_share(cluster.rows(["one", "two", "three"])), [1, 0.5, 0.5], atol=1e-6)
    # A node of both has it once at most.
    both = node("one", (0, 0.5), jobs={"s": 2}, names={"s": ["first", "second"]})
    cluster.update_node(both, 1.0)
    soon = cluster.expected_spread("s").matrix_of(cluster.rows(["one", "two", "three"]))
    np.testing.assert_allclose(soon[0], 1, atol=1e-6)
    np.testing.assert_allclose(soon[1], np.repeat([0, 1 / 3], SHARDS // 2), atol=1e-6)
