"""Capacity of the nodes, and demand of the jobs: the figures that an autoscaler uses."""

from dataclasses import dataclass

from cachefs_scheduler.duties.job_table import JobTable
from cachefs_scheduler.view.reported_cluster import ReportedCluster


@dataclass(frozen=True, slots=True)
class ClusterCapacity:
    """Cluster capacity and demand, in bytes and nodes."""

    # Sum over nodes in state "up": bytes that their tiers can hold, and hold.
    capacity: int
    used: int
    # Bytes that running and waiting jobs read, each snapshot once.
    needed: int
    nodes: int
    # Number of average nodes that would hold `needed`; 0 if no capacity is known or nothing is needed.
    nodes_needed: int


def cluster_capacity(view: ReportedCluster, jobs: JobTable) -> ClusterCapacity:
    """Return the current figures."""
    up = [
        facts
        for name in view.cluster
        if (facts := view.cluster.reported_facts(name)) is not None and facts.state == "up"
    ]
    read = {one.snapshot for one in jobs if one.snapshot} | {snapshot for facts in up for snapshot in facts.jobs}
    sizes = [size.bytes for snapshot in read if (size := view.cluster.snapshot_facts(snapshot)) is not None]
    total, needed = sum(facts.capacity for facts in up), sum(sizes)
    nodes_needed = -(-needed * len(up) // total) if total else 0
    return ClusterCapacity(total, sum(facts.used for facts in up), needed, len(up), nodes_needed)
