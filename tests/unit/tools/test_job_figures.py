"""How figures of all nodes are divided among the jobs that read at the same time."""

import pytest

from cachefs_bench.cluster.run import local_share, waited_for_peer_share
from cachefs_bench.lab.cluster import ClusterCounters, LabJobCounters, LabNodeCounters


def counters(jobs: dict[str, LabJobCounters]) -> ClusterCounters:
    """30 blocks from other nodes and 10 requests to the origin; 8 reads waited for another node."""
    return ClusterCounters(1.0, {"node1": LabNodeCounters(peer_blocks=30, stalls_peer=8)}, 0, 10, jobs)


def test_all_is_of_the_only_job_whatever_the_daemons_attribute() -> None:
    for alone in (LabJobCounters(), LabJobCounters(fetched=7, stalls_peer=1)):
        assert local_share(counters({"a": alone}), "a", 100) == pytest.approx(0.6)
        assert waited_for_peer_share(counters({"a": alone}), "a", 100) == pytest.approx(0.08)


def test_jobs_share_in_the_ratio_of_what_the_daemons_attribute() -> None:
    both = counters({"a": LabJobCounters(fetched=300, stalls_peer=0), "b": LabJobCounters(fetched=100, stalls_peer=4)})
    assert local_share(both, "a", 100) == pytest.approx(0.7)
    assert local_share(both, "b", 100) == pytest.approx(0.9)
    assert waited_for_peer_share(both, "a", 100) == 0
    assert waited_for_peer_share(both, "b", 100) == pytest.approx(0.08)


def test_counters_grow_from_nothing_where_a_job_has_just_come() -> None:
    before, after = counters({"a": LabJobCounters(5)}), counters({"a": LabJobCounters(9), "b": LabJobCounters(2)})
    assert (after - before).jobs == {"a": LabJobCounters(4), "b": LabJobCounters(2)}
