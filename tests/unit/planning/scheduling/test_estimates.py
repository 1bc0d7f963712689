import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.cluster.scale import local_share
from cachefs.planning.scheduling.estimates import estimate, estimates, score_nodes, silod_rate
from cachefs.planning.scheduling.facts import SHARDS, Links, NodeCopy

from .making import SIZE, cluster_of, job, node

NO_LIMIT = 1e15


@given(st.floats(1e6, 1e10), st.floats(1e6, 1e10), st.floats(0, 1), st.integers(2, 50))
def test_later_epochs_are_silods_for_one_node_and_one_source(rate, remote, cached, epochs):
    alone = node("a", capacity=round(cached * SIZE), origin_rate=remote, peer_rate=NO_LIMIT, tier_rate=NO_LIMIT)
    found = estimate(job(rate=rate, epochs=epochs), 0, "a", cluster_of(alone))
    ours = SIZE / (SIZE / rate + found.later)
    assert ours == pytest.approx(silod_rate(rate, remote, round(cached * SIZE) / SIZE), rel=1e-6)


def test_ours_differs_from_silods_where_it_knows_nothing():
    """First epochs, what other nodes have, and links that are slower than the source."""
    cold, warm = node("a", capacity=SIZE), node("b", (0, 1), capacity=SIZE)
    both = cluster_of(cold, warm)
    silod = silod_rate(4e8, 2e8, 0.0)
    assert estimate(job(), 0, "a", cluster_of(cold)).first == pytest.approx(SIZE / silod - SIZE / 4e8)
    assert estimate(job(rate=2e9), 0, "a", both).first == pytest.approx(SIZE / 1.25e9 - SIZE / 2e9)
    assert estimate(job(), 0, "b", both).first == 0
    assert estimate(job(), 0, "a", both).later == 0


def test_bytes_are_counted_where_they_are():
    nodes = [
        node("here", (0.0, 0.1), zone="1", region="r"),
        node("zone", (0.1, 0.3), zone="1", region="r"),
        node("region", (0.3, 0.6), zone="2", region="r"),
        node("far", (0.6, 0.7), zone="1", region="q"),
    ]
    found = estimate(job(2), 1, "here", cluster_of(*nodes))
    each = SIZE / 2
    parts = (found.local, found.zone, found.region, found.elsewhere, found.origin)
    assert parts == pytest.approx((0.1 * each, 0.2 * each, 0.3 * each, 0.1 * each, 0.3 * each), rel=0.05)
    assert sum(parts) == pytest.approx(each)


def test_copies_of_the_same_part_count_once():
    cluster = cluster_of(node("a", (0, 0.5)), node("b", (0, 0.5)), node("c"))
    assert estimate(job(), 0, "c", cluster).origin == SIZE / 2


def test_each_rank_is_asked_for_what_it_reads():
    order = np.zeros((2, SHARDS), np.float32)
    order[0, :128], order[1, 128:] = 1 / 128, 1 / 128
    cluster = cluster_of(node("a", (0, 0.5)), node("b", (0.5, 1)))
    ask = job(2, distribution=order)
    assert [estimate(ask, rank, "a", cluster).local for rank in (0, 1)] == [SIZE // 2, 0]
    assert [estimate(ask, rank, "b", cluster).local for rank in (0, 1)] == [0, SIZE // 2]


def test_a_job_waits_for_what_is_slowest():
    def first(*nodes, links=None, **more):
        return estimate(job(rate=1e10, **more), 0, "a", cluster_of(*nodes, links=links)).first + SIZE / 1e10

    assert first(node("a")) == SIZE / 2e8  # the origin
    assert first(node("a"), links=Links(origin=1e8)) == SIZE / 1e8
    assert first(node("a", (0, 1))) == SIZE / 2e9  # its SSD
    assert first(node("a"), node("b", (0, 1))) == SIZE / 1.25e9  # its link
    assert first(node("a"), node("b", (0, 1), given=1.15e9, jobs={"s": 11})) == pytest.approx(SIZE / 1.25e9 * 12)
    assert first(node("a"), node("b", (0, 1), zone="2"), links=Links(zone=5e8)) == SIZE / 5e8
    assert first(node("a"), node("b", (0, 1), region="2"), links=Links(region=3e8)) == SIZE / 3e8


def test_running_jobs_leave_what_they_do_not_take():
    ask = job(rate=1e10)
    busy = node("a", fetched=1.5e8, jobs={"t": 1})
    assert estimate(ask, 0, "a", cluster_of(busy)).first + 10 == pytest.approx(SIZE / 1e8)  # an equal share
    assert estimate(ask, 0, "a", cluster_of(node("a", fetched=0.5e8, jobs={"t": 1}))).first + 10 == pytest.approx(
        SIZE / 1.5e8
    )


def test_what_stays_is_what_there_is_room_for():
    def later(ranks, *nodes):
        return estimate(job(ranks, rate=1e10), 0, "a", cluster_of(*nodes)).later + SIZE / ranks / 1e10

    full = {"capacity": SIZE, "needed": SIZE}
    assert later(1, node("a", tier_rate=NO_LIMIT)) == SIZE / 1e10  # all of it stays: it never waits
    assert later(1, node("a", **full)) == SIZE / 2e8  # nothing does
    assert later(1, node("a", **full), node("b")) == SIZE / 1.25e9  # on another node
    # What jobs read here already has its room.
    assert later(1, node("a", (0, 1), capacity=SIZE, jobs={"s": 1}, tier_rate=NO_LIMIT)) == SIZE / 1e10
    # Four ranks on nodes that keep a quarter each.
    quarter = node("a", capacity=SIZE // 4, tier_rate=NO_LIMIT)
    assert later(4, quarter) == pytest.approx((1 - local_share(4)) * SIZE / 4 / 1.25e9)


def test_memory_is_faster_than_an_ssd():
    ask = job(rate=1e10)
    slow = {"capacity": SIZE, "tier_rate": 1e9}
    on_ssd = node("a", copies={"s": NodeCopy(0, SIZE)}, **slow)
    in_memory = node("b", copies={"s": NodeCopy(SIZE, 0)}, memory=SIZE, **slow)
    found = estimates(ask, ["a", "b"], cluster_of(on_ssd, in_memory))
    assert found.first.tolist() == [90.0, 0.0]
    assert found.later.tolist() == [90.0, 0.0]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.sampled_from(["1", "2"])), min_size=1, max_size=8))
def test_estimates_are_whole_and_scores_follow_them(parts):
    nodes = [node(f"n{i}", (min(a, b), max(a, b)), zone=zone) for i, (a, b, zone) in enumerate(parts)]
    cluster, names = cluster_of(*nodes), [one.name for one in nodes]
    found = estimates(job(), names, cluster)
    assert (np.array(found.sources) >= -1).all()
    np.testing.assert_allclose(np.sum(found.sources, axis=0), SIZE)
    assert np.isfinite(found.first).all()
    assert (found.first >= 0).all()
    given = score_nodes(job(), names, cluster)
    assert given.max() == 1
    assert (given > 0).all()
    seconds = found.first + 9 * found.later + 0.1 * (found.first_load + 9 * found.later_load)
    assert (np.diff(seconds[np.argsort(-given, kind="stable")]) >= -1e-6).all()


def test_more_data_is_never_worse():
    nodes = [node(f"n{i}", (0, i / 10)) for i in range(11)]
    given = score_nodes(job(), [one.name for one in nodes], cluster_of(*nodes, node("all", (0, 0))))
    assert (np.diff(given) >= 0).all()
    assert given[10] > given[5] > given[0] > 0.5


def test_what_takes_no_jobs_scores_nothing():
    cluster = cluster_of(node("up"), node("off", (0, 1), state="draining"), node("away", (0, 1), state="away"))
    assert score_nodes(job(), ["up", "off", "away", "stranger"], cluster).tolist() == [1, 0, 0, 0]


def test_nobody_has_told_of_the_snapshot():
    cluster = cluster_of(node("a"), node("b"))
    ask = job()
    cluster.forget_snapshot("s")
    assert score_nodes(ask, ["a", "b"], cluster).tolist() == [1, 1]


def test_a_job_of_unknown_rate_is_as_fast_as_its_data():
    cluster = cluster_of(node("a", (0, 1)), node("b"))
    found = estimates(job(rate=0.0, epochs=0), ["a", "b"], cluster)
    assert found.first[0] == pytest.approx(SIZE / 2e9)
    assert found.first[1] > found.first[0]
