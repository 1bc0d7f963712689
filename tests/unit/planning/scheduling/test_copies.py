from cachefs.planning.scheduling.copies import cached_copies, job_slots

from .making import cluster_of, node


def names(*nodes, **more):
    return [set(copy.nodes) for copy in cached_copies("s", cluster_of(*nodes), **more)]


def test_a_copy_is_one_node_or_a_zone_or_the_rest():
    alone = node("alone", (0, 1), zone="1")
    halves = [node("left", (0, 0.5), zone="1"), node("right", (0.5, 1), zone="1")]
    far = [node("near", (0, 0.5), zone="2"), node("far", (0.5, 1), zone="3")]
    assert names(alone) == [{"alone"}]
    assert names(alone, *halves) == [{"alone"}, {"left", "right"}]
    assert names(*far) == [{"near", "far"}]
    assert names(alone, *halves, *far) == [{"alone"}, {"left", "right"}, {"near", "far"}]
    assert names(halves[0], node("same", (0, 0.5))) == []
    assert names(node("most", (0, 0.9)), enough=0.95) == []
    assert names(node("none")) == []


def test_each_job_reads_one_copy():
    nodes = [node("a", (0, 1)), node("l", (0, 0.5)), node("r", (0.5, 1))]
    running = [{"a"}, {"l", "r"}, {"l", "r", "a"}, {"elsewhere"}]
    copies = cached_copies("s", cluster_of(*nodes), running)
    assert [(copy.nodes[0], copy.jobs) for copy in copies] == [("a", 2), ("l", 2)]


def test_slots_are_those_of_all_copies():
    copies = cached_copies("s", cluster_of(node("a", (0, 1)), node("b", (0, 1))), [{"a"}, {"a"}, {"b"}])
    found = job_slots(copies, 2, 3)
    assert (found.limit, found.free, found.nodes) == (4, 1, ("b",))
    assert job_slots(copies, 2, 3, making=1).free == 3
    assert job_slots(copies, 2, 9).free == 0
    assert job_slots(copies, 0, 1000).free > 1000
    assert job_slots((), 2, 1).free == 1
    assert job_slots((), 2, 1).nodes == ()


def test_what_silent_nodes_had_is_no_copy():
    cluster = cluster_of(node("a", (0, 1)))
    cluster.advance_clock(10_000)
    assert cached_copies("s", cluster) == ()
