"""How much the nodes hold, and how much running jobs need: what whoever scales the cluster goes by."""

from dataclasses import dataclass

from cachefs_scheduler.duties.book import Book
from cachefs_scheduler.view.cluster_view import ClusterView


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes, and nodes."""

    # Of all nodes that take jobs: what their tiers may take, and what they take.
    capacity: int
    used: int
    # What running and waiting jobs read, each snapshot once.
    needed: int
    nodes: int
    # Of average capacity that would hold what is needed; 0: no capacity is known, or nothing is needed.
    nodes_needed: int


def capacity(view: ClusterView, book: Book) -> Capacity:
    """As it is now."""
    up = [facts for name in view.cluster if (facts := view.cluster.said(name)) is not None and facts.state == "up"]
    read = {one.snapshot for one in book if one.snapshot} | {snapshot for facts in up for snapshot in facts.jobs}
    sizes = [size.bytes for snapshot in read if (size := view.cluster.snapshot(snapshot)) is not None]
    total, needed = sum(facts.capacity for facts in up), sum(sizes)
    nodes_needed = -(-needed * len(up) // total) if total else 0
    return Capacity(total, sum(facts.used for facts in up), needed, len(up), nodes_needed)
