"""Capacity of the nodes, and demand of the jobs: the figures that an autoscaler uses."""

from dataclasses import dataclass

from cachefs_scheduler.duties.book import Book
from cachefs_scheduler.view.cluster_view import ClusterView


@dataclass(frozen=True, slots=True)
class Capacity:
    """Cluster capacity and demand, in bytes and nodes."""

    # Sum over nodes in state "up": bytes that their tiers can hold, and hold.
    capacity: int
    used: int
    # Bytes that running and waiting jobs read, each snapshot once.
    needed: int
    nodes: int
    # Number of average nodes that would hold `needed`; 0 if no capacity is known or nothing is needed.
    nodes_needed: int


def capacity(view: ClusterView, book: Book) -> Capacity:
    """Return the current figures."""
    up = [facts for name in view.cluster if (facts := view.cluster.said(name)) is not None and facts.state == "up"]
    read = {one.snapshot for one in book if one.snapshot} | {snapshot for facts in up for snapshot in facts.jobs}
    sizes = [size.bytes for snapshot in read if (size := view.cluster.snapshot(snapshot)) is not None]
    total, needed = sum(facts.capacity for facts in up), sum(sizes)
    nodes_needed = -(-needed * len(up) // total) if total else 0
    return Capacity(total, sum(facts.used for facts in up), needed, len(up), nodes_needed)
