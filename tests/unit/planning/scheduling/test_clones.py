import pytest

from cachefs.planning.scheduling.copies import plan_clone

from .making import GB, SIZE, cluster_of, job, node


def test_a_copy_goes_where_it_is_soonest():
    full = {"capacity": 400 * GB, "needed": 350 * GB}
    nodes = [node("has", (0, 1)), node("empty"), node("part", (0, 0.4)), node("full", **full)]
    found = plan_clone(job(), ["empty", "part", "full"], cluster_of(*nodes))
    assert (found.nodes, found.bytes) == (("part",), (SIZE,))
    assert found.missing_bytes == pytest.approx(0.6 * SIZE, rel=0.01)
    assert found.seconds == pytest.approx(found.missing_bytes / 1.25e9)


def test_several_nodes_of_one_zone_where_none_has_the_room():
    small = {"capacity": 60 * GB}
    nodes = [node("has", (0, 1)), node("a", zone="1", **small), node("b", zone="1", **small), node("c", **small)]
    found = plan_clone(job(), ["a", "b", "c"], cluster_of(*nodes))
    assert set(found.nodes) == {"a", "b"}
    assert sum(found.bytes) == pytest.approx(SIZE, abs=2)
    assert found.seconds == pytest.approx(SIZE / 2 / 1.25e9)
    assert plan_clone(job(), ["a", "c"], cluster_of(*nodes)) is None
    assert plan_clone(job(), [], cluster_of(*nodes)) is None


def test_what_drains_gets_no_copy():
    assert plan_clone(job(), ["off"], cluster_of(node("has", (0, 1)), node("off", state="draining"))) is None
