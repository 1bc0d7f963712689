"""How many nodes the published jobs need, and what one more or one fewer would change.

Origin bytes of F bytes that are read in E epochs, by nodes that together keep C of them: at least F + (E - 1) (F - C),
and that is what the policies reach. So what a cluster lacks of F is fetched once in each epoch that is still to come.
Where several jobs read, what is read most often is kept first.

Local reads: with one copy of each block, a read is local as soon as a node reads it that has read it since the last
local read, for then that node was the one of all holders since that would read it soonest, and the copy is with it. So
the number of reads from one local read to the next is that of draws among N nodes until one comes the second time,
less one: Ramanujan's Q(N) = 1 + (1 - 1/N) + (1 - 1/N)(1 - 2/N) + ... on average, about sqrt(pi N / 2) - 1/3 (Knuth,
"The Art of Computer Programming", volume 1, section 1.2.11.3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cachefs.planning.cluster.copies import SLACK


@dataclass(frozen=True, slots=True)
class Demand:
    """What the consumers of one snapshot read, all jobs together."""

    # Bytes that are read in an epoch, each block counted once.
    bytes: int
    # Epochs that are still to come, of the job that has most of them; inf where nobody knows.
    epochs: float
    # Seconds that an epoch takes; 0 where nobody knows.
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What so many nodes would make of the demands."""

    nodes: int
    # Bytes that all their tiers have room for.
    capacity: int
    # Of the bytes that are read, those that stay in the cluster from one epoch to the next.
    kept: int
    # Bytes from the origins in all epochs that are still to come, beyond what is fetched for the first time.
    origin_bytes: float
    # Bytes from the origins in a second, once everything has been fetched.
    origin_rate: float
    # Bytes that nodes fetch from each other in a second.
    peer_rate: float


@dataclass(frozen=True, slots=True)
class ScaleHint:
    """How the cluster does, and how it would with another number of nodes."""

    # Bytes that published jobs read, each block counted once.
    needed: int
    # Nodes of average capacity that would keep all of it; 0 where nothing is needed, or no capacity is known.
    nodes_needed: int
    now: Outcome
    one_more: Outcome
    # None for the last node.
    one_fewer: Outcome | None


def local_share(nodes: int) -> float:
    """The part of reads that are of blocks which their readers hold, as copies are coordinated, with ranks that share a
    shuffled dataset out among so many *nodes*: 1 / Q(nodes)."""
    total, term = 0.0, 1.0
    for drawn in range(1, max(1, nodes) + 1):
        total += term
        term *= 1 - drawn / max(1, nodes)
        if term < 1e-18:
            break
    return 1 / total


def scale_hint(capacities: Sequence[int], demands: Sequence[Demand]) -> ScaleHint:
    """capacities: bytes that the tiers of each node have room for."""
    nodes = len(capacities)
    each = sum(capacities) / nodes if nodes else 0.0
    needed = sum(demand.bytes for demand in demands)
    return ScaleHint(
        needed,
        math.ceil(needed * (1 + SLACK) / each) if each else 0,
        outcome(nodes, sum(capacities), demands),
        outcome(nodes + 1, round((nodes + 1) * each), demands),
        outcome(nodes - 1, round((nodes - 1) * each), demands) if nodes > 1 else None,
    )


def outcome(nodes: int, capacity: int, demands: Sequence[Demand]) -> Outcome:
    """What so many nodes with *capacity* bytes together make of the demands."""
    room, kept, origin_bytes, origin_rate, peer_rate = capacity, 0, 0.0, 0.0, 0.0
    # Where nobody knows how often something is read, it is kept last.
    for demand in sorted(demands, key=lambda one: one.seconds or math.inf):
        stays = min(room, demand.bytes)
        room -= stays
        kept += stays
        lacking = demand.bytes - stays
        if lacking:
            origin_bytes += lacking * demand.epochs
        if demand.seconds:
            origin_rate += lacking / demand.seconds
            peer_rate += stays * (1 - local_share(nodes)) / demand.seconds
    return Outcome(nodes, capacity, kept, origin_bytes, origin_rate, peer_rate)
