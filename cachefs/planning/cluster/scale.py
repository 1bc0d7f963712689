"""Estimates how many nodes the published jobs need, and the effect of one node more or fewer.

Origin bytes: F bytes read in E epochs by nodes that together keep C of them cost at least F + (E - 1) (F - C) bytes,
and the policies reach that bound. The part of F that a cluster cannot keep is fetched once in each further epoch. Where
several jobs read, the data read most often are kept first.

Local reads: with one copy of each block, a read is local when its node has read the block since the last local read,
since of all holders since then that node reads the block soonest, and has the copy. The number of reads from one local
read to the next is therefore that of draws among N nodes until one is drawn a second time, less one: Ramanujan's Q(N) =
1 + (1 - 1/N) + (1 - 1/N)(1 - 2/N) + ... on average, about sqrt(pi N / 2) - 1/3 (Knuth, "The Art of Computer
Programming", volume 1, section 1.2.11.3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cachefs.planning.cluster.copies import SLACK


@dataclass(frozen=True, slots=True)
class SnapshotDemand:
    """The reads of one snapshot by all its consumers."""

    # Bytes read per epoch, each block counted once.
    bytes: int
    # Epochs still to come, of the job with the most; inf where unknown.
    epochs: float
    # Seconds per epoch; 0 where unknown.
    seconds: float


@dataclass(frozen=True, slots=True)
class ScaleForecast:
    """The expected traffic of a cluster with *nodes* nodes."""

    nodes: int
    # Room of all their tiers, in bytes.
    capacity: int
    # Bytes of the read data that stay in the cluster from one epoch to the next.
    kept: int
    # Bytes from the origins in all further epochs, without the first fetches.
    origin_bytes: float
    # Bytes per second from the origins, once everything has been fetched.
    origin_rate: float
    # Bytes per second that nodes fetch from each other.
    peer_rate: float


@dataclass(frozen=True, slots=True)
class ScaleHint:
    """The expected traffic of the cluster, now and with one node more or fewer."""

    # Bytes that published jobs read, each block counted once.
    needed: int
    # Nodes of average capacity that would keep all of it; 0 where nothing is needed, or no capacity is known.
    nodes_needed: int
    now: ScaleForecast
    one_more: ScaleForecast
    # None for a single node.
    one_fewer: ScaleForecast | None


def local_share(nodes: int) -> float:
    """Return the part of reads whose blocks their readers hold: 1 / Q(nodes). Assumes coordinated copies, and ranks
    that share out a shuffled dataset among *nodes* nodes."""
    total, term = 0.0, 1.0
    for drawn in range(1, max(1, nodes) + 1):
        total += term
        term *= 1 - drawn / max(1, nodes)
        if term < 1e-18:
            break
    return 1 / total


def scale_hint(capacities: Sequence[int], demands: Sequence[SnapshotDemand]) -> ScaleHint:
    """Estimate the effect of scaling. capacities: room of the tiers of each node, in bytes."""
    nodes = len(capacities)
    each = sum(capacities) / nodes if nodes else 0.0
    needed = sum(demand.bytes for demand in demands)
    return ScaleHint(
        needed,
        math.ceil(needed * (1 + SLACK) / each) if each else 0,
        forecast_scale(nodes, sum(capacities), demands),
        forecast_scale(nodes + 1, round((nodes + 1) * each), demands),
        forecast_scale(nodes - 1, round((nodes - 1) * each), demands) if nodes > 1 else None,
    )


def forecast_scale(nodes: int, capacity: int, demands: Sequence[SnapshotDemand]) -> ScaleForecast:
    """Return the expected traffic of *nodes* nodes with *capacity* bytes together."""
    room, kept, origin_bytes, origin_rate, peer_rate = capacity, 0, 0.0, 0.0, 0.0
    # Data with an unknown read frequency are kept last.
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
    return ScaleForecast(nodes, capacity, kept, origin_bytes, origin_rate, peer_rate)
