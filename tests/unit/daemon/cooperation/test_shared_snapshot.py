"""Copies go where they are read next: whole epochs of a simulated cluster, on a clock of its own."""

from tests.simulated_cluster import Setting, SimulatedCluster, simulated


def origin_reads(cluster: SimulatedCluster) -> float:
    """Of all blocks of the dataset."""
    return sum(epoch.from_origin for epoch in cluster.figures) / cluster.setting.files


def test_blocks_leave_the_origin_once_and_reads_become_local() -> None:
    cluster = simulated(Setting(capacity=1.1))
    assert origin_reads(cluster) <= 1.01
    for epoch in cluster.figures[1:]:
        assert epoch.local > 0.42, "0.25 if blocks stayed at home"
        assert epoch.from_origin <= 0.01 * epoch.reads
    assert sum(epoch.late for epoch in cluster.figures) <= 0.001 * 4 * cluster.setting.files


def test_a_rank_that_is_ahead_of_the_others_costs_hardly_anything() -> None:
    cluster = simulated(Setting(capacity=1.1, drift=20))
    assert origin_reads(cluster) <= 1.01
    assert all(epoch.local > 0.42 for epoch in cluster.figures[1:])


def test_caches_for_half_of_it_together_fetch_little_more_than_they_must() -> None:
    setting = Setting(nodes=2, files=1000, capacity=0.5, rate=25.0)
    cluster = simulated(setting)
    # What is fetched just before it is read takes the place of other blocks: 1/30 of an epoch's.
    assert origin_reads(cluster) <= 1.03 * (1 + (setting.epochs - 1) * 0.5)


def test_all_nodes_agree_who_holds_what() -> None:
    cluster = simulated(Setting(nodes=3, files=300, capacity=1.2))
    first, *others = cluster.remembered.values()
    assert others
    for other in others:
        assert (other.job, other.epoch, other.count, other.ids) == (first.job, first.epoch, first.count, first.ids)
        assert (other.holders == first.holders).all()


def test_a_node_that_is_lost_costs_its_share_and_no_more() -> None:
    # The others have room for all of it.
    cluster = simulated(Setting(capacity=1.5, loss=9.0))
    again = sum(epoch.again for epoch in cluster.figures) / cluster.setting.files
    assert 0.1 <= again <= 0.25 + 0.02


def test_with_second_copies_a_node_that_is_lost_costs_no_read_of_the_origin() -> None:
    cluster = simulated(Setting(capacity=3.0, loss=9.0, replicas=2))
    assert sum(epoch.again for epoch in cluster.figures) == 0
    assert origin_reads(cluster) == 1.0
