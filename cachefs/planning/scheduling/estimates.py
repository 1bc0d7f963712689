"""Estimates how long a rank would wait for its data on each of many nodes: in its first epoch, and in each later one.

An epoch takes as long as its slowest part, since bytes come from all sources at once, ahead of the readers: computing
(`rate`), reading the node's SSD, its network link, the rate of its sources, links between zones, and the origin. A rank
waits for as long as that exceeds the time of computing alone.

- **First epoch**: data on the node are read there; the rest comes from its zone, its region, others, or the origin.
- **Later epochs**: the part of the snapshot stays that fits into the room of the job's nodes and of the other nodes of
  the cluster. With N nodes, 1 / Q(N) of the reads are local by coordinated copies
  (`cachefs.planning.cluster.scale.local_share`), or as much as fits on one node, if that is more.
- **Other readers**: of each rate counts what running jobs leave of it, and at least an equal share.

SiloD (Zhao et al., "SiloD: A Co-design of Caching and Scheduling for Deep Learning Clusters", EuroSys 2023) estimates a
job's speed as min(f*, b / (1 - C / F)), with f* the speed at which it computes, b the rate of uncached data, and C of F
bytes cached. That is the case of one rank, one node and one source in the later epochs: `silod_rate`.

`score_nodes` scores nodes for a job from 0 to 1: 1 where the job would end first, 0.5 where it would take twice as
long. Nodes that hardly differ have scores that hardly differ, and a scheduler's other criteria decide between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.cluster.scale import local_share
from cachefs.planning.scheduling.cluster_facts import ClusterFacts
from cachefs.planning.scheduling.facts import Estimate, JobRequest
from cachefs.planning.scheduling.spread import ExpectedSpread, NodeValues, Rows, Spread

# Bytes by source; see Estimate. Each of shape (candidates,).
Sources = tuple[NodeValues, NodeValues, NodeValues, NodeValues, NodeValues]
# Epochs assumed for a job that has not declared them.
ASSUMED_EPOCHS: Final = 10
# Cost to others of a second in which a link or a source is busy with the job, in seconds. Of two nodes where the job
# never waits, the one with more of its data is therefore better.
_LOAD_WEIGHT: Final = 0.1
# Seconds that count as none, so that a millisecond does not make one node twice as good as another.
_NEGLIGIBLE_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """`Estimate` for many nodes: arrays of shape (candidates,)."""

    first: NodeValues
    later: NodeValues
    # Bytes of the first epoch: local, zone, region, elsewhere, origin.
    sources: Sources
    trust: NodeValues
    # Seconds to fetch all bytes of a rank from the sources of its non-local bytes.
    remote: NodeValues
    # Seconds for which links and sources are busy with the rank's first epoch, and with each later one.
    first_load: NodeValues
    later_load: NodeValues
    # Seconds of an epoch without any waiting; 0 where the job's rate is not known.
    epoch: float

    def estimate_of(self, index: int) -> Estimate:
        """Return the estimate of one candidate."""
        local, zone, region, elsewhere, origin = (round(float(part[index])) for part in self.sources)
        first, later, trust = (float(values[index]) for values in (self.first, self.later, self.trust))
        return Estimate(first, later, local, zone, region, elsewhere, origin, trust)


def estimate(job: JobRequest, rank: int, node: str, cluster: ClusterFacts) -> Estimate:
    """Estimate one rank of the job on one node, with the other ranks on similar nodes."""
    return estimates(job, [node], cluster, rank).estimate_of(0)


def estimates(
    job: JobRequest, candidates: Sequence[str], cluster: ClusterFacts, rank: int = 0, *, includes_expected: bool = False
) -> Estimates:
    """Estimate one rank of the job on each of the candidates. Takes 1 ms for 5,000.

    includes_expected: whether data that running jobs are still fetching count as present.

    An unknown snapshot counts as one of no bytes: there is nothing to wait for, and all nodes are equal.
    """
    spread = cluster.expected_spread(job.snapshot) if includes_expected else cluster.spread(job.snapshot)
    view = _EstimateInput.of(job, cluster.rows(candidates), cluster, spread)
    now = _first_epoch(view, None if job.distribution is None else job.distribution[rank % job.ranks])
    network = np.maximum(_network_seconds(view, now), _holder_seconds(view, now))
    first = np.maximum(network, _ssd_seconds(view, now[0] * spread.on_ssd(view.rows)))
    then, on_ssd = _later_epochs(view)
    later_network = _network_seconds(view, then)
    later = np.maximum(later_network, _ssd_seconds(view, on_ssd))
    part = np.maximum(view.bytes - now[0], 1.0) / max(view.bytes, 1.0)
    return Estimates(
        np.maximum(first - view.epoch, 0.0),
        np.maximum(later - view.epoch, 0.0),
        now,
        cluster.trust(view.rows),
        network / part,
        network,
        later_network,
        view.epoch,
    )


def silod_rate(rate: float, remote: float, cached: float) -> float:
    """Return SiloD's estimate of a job's speed in bytes/s. rate (f*): speed without waits; remote (b): rate of uncached
    data; cached: C / F, 0 to 1."""
    return rate if cached >= 1 else min(rate, remote / (1 - cached))


@dataclass(frozen=True, slots=True, eq=False)
class _EstimateInput:
    """A job and its candidates."""

    job: JobRequest
    rows: Rows
    cluster: ClusterFacts
    # Where the snapshot is, or will soon be.
    spread: Spread | ExpectedSpread
    # Bytes of the snapshot; bytes that a rank reads per epoch; seconds of that without waiting.
    size: int
    bytes: float
    epoch: float
    # Zone number of each candidate, and region number.
    zones: Rows
    regions: Rows

    @classmethod
    def of(
        cls, job: JobRequest, rows: Rows, cluster: ClusterFacts, spread: Spread | ExpectedSpread
    ) -> "_EstimateInput":
        snapshot = cluster.snapshot_facts(job.snapshot)
        size = snapshot.bytes if snapshot else 0
        zones = cluster.zones_of(rows)
        each = size / job.ranks
        return cls(
            job,
            rows,
            cluster,
            spread,
            size,
            each,
            each / job.rate if job.rate else 0.0,
            zones,
            cluster.region_of[zones],
        )

    def rate_left(self, rate: str, taken: str) -> NodeValues:
        """Return what running jobs leave of a rate of each candidate, in bytes/s."""
        return _rate_left(self.cluster, self.rows, rate, taken)

    def by_zone(self, of_zone: Mapping[int, float]) -> NodeValues:
        """Return for each candidate the number of its zone; 0 for zones without one."""
        table = np.zeros(len(self.cluster.region_of))
        table[list(of_zone)] = list(of_zone.values())
        return table[self.zones]


def _rate_left(cluster: ClusterFacts, rows: Rows, rate: str, taken: str) -> NodeValues:
    rates = cluster.rates_of(rate, rows)
    jobs = cluster.values_of("jobs", rows)
    left: NodeValues = np.maximum(rates - cluster.values_of(taken, rows), rates / (jobs + 1))
    return left


def _first_epoch(view: _EstimateInput, weights: npt.NDArray[np.float32] | None) -> Sources:
    """Return the bytes by their present source."""
    spread, cluster = view.spread, view.cluster
    local = spread.held_share(view.rows, weights) * cluster.trust(view.rows)
    regions: dict[int, list[int]] = {}
    for zone in spread.zones():
        regions.setdefault(int(cluster.region_of[zone]), []).append(zone)
    shares = np.full(256, 1 / 256) if weights is None else weights.astype(np.float64)

    def covered(zones: Sequence[int]) -> float:
        return float(spread.coverage(zones) @ shares)

    in_zone = np.maximum(view.by_zone({zone: covered([zone]) for zone in spread.zones()}), local)
    of_region = np.zeros(int(cluster.region_of.max()) + 1)
    for region, zones in regions.items():
        of_region[region] = covered(zones)
    in_region = np.maximum(of_region[view.regions], in_zone)
    anywhere = np.maximum(covered(list(spread.zones())), in_region)
    return (
        view.bytes * local,
        view.bytes * (in_zone - local),
        view.bytes * (in_region - in_zone),
        view.bytes * (anywhere - in_region),
        view.bytes * (1.0 - anywhere),
    )


def _later_epochs(view: _EstimateInput) -> tuple[Sources, NodeValues]:
    """Return the bytes by source once everything has been read, and how many of the local ones are on SSD."""
    cluster, ranks, size = view.cluster, view.job.ranks, max(view.size, 1)
    spread = cluster.spread(view.job.snapshot)
    # Data that other jobs read here anyway need no additional room.
    cached = spread.held_share(view.rows) * size
    read_already = np.isin(view.rows, cluster.readers(view.job.snapshot)) & cluster.are_up(view.rows)
    keeps = cluster.room(view.rows) + np.where(read_already, cached * cluster.trust(view.rows), 0.0)
    of_one = np.minimum(keeps / size, 1.0)
    of_job = np.minimum(ranks * of_one, 1.0)
    local = np.maximum(local_share(ranks) * of_job, of_one)
    everyone = cluster.all_rows()
    rooms = cluster.room(everyone)
    total = float(rooms.sum())
    anywhere = np.maximum(min(1.0, total / size), of_job)
    # Data that do not fit on the job's nodes are where other nodes have room.
    zone_rooms = np.bincount(cluster.zones_of(everyone), rooms, len(cluster.region_of))
    region_rooms = np.bincount(cluster.region_of, zone_rooms, len(cluster.region_of))
    outside = (anywhere - of_job) / max(total, 1.0)
    zone_room, region_room = zone_rooms[view.zones], region_rooms[view.regions]
    sources = (
        view.bytes * local,
        view.bytes * (of_job - local + outside * zone_room),
        view.bytes * outside * (region_room - zone_room),
        view.bytes * outside * (total - region_room),
        view.bytes * (1.0 - anywhere),
    )
    in_memory = np.minimum(cluster.values_of("memory", view.rows), keeps)
    on_ssd = np.divide(keeps - in_memory, keeps, out=np.zeros(len(keeps)), where=keeps > 0)
    return sources, sources[0] * on_ssd


def _ssd_seconds(view: _EstimateInput, bytes_there: NodeValues) -> NodeValues:
    """Return the seconds to read these bytes from the node's SSD."""
    return bytes_there / view.rate_left("tier_rate", "demand")


def _network_seconds(view: _EstimateInput, sources: Sources) -> NodeValues:
    """Return the seconds that the slowest link takes in an epoch."""
    cluster, links, ranks = view.cluster, view.cluster.links, view.job.ranks
    local, _, region, elsewhere, origin = sources
    parts = [
        (view.bytes - local) / view.rate_left("peer_rate", "received"),
        origin / view.rate_left("origin_rate", "fetched"),
    ]
    if links.origin:
        share = links.origin * ranks / (cluster.fetching_nodes() + ranks)
        parts.append(ranks * origin / max(links.origin - cluster.total("fetched"), share))
    # The nodes of a job are assumed to be in one zone.
    if links.zone:
        parts.append(ranks * (region + elsewhere) / links.zone)
    if links.region:
        parts.append(ranks * elsewhere / links.region)
    slowest: NodeValues = np.maximum.reduce(parts)
    return slowest


def _holder_seconds(view: _EstimateInput, sources: Sources) -> NodeValues:
    """Return the seconds that the holders of the snapshot take to serve the job's first epoch: those of each
    candidate's zone, and all. The slowest counts, since a shuffled order needs all holders equally."""
    cluster, spread = view.cluster, view.spread
    rows = spread.rows()
    cached = spread.held_share(rows) * cluster.trust(rows)
    rows, cached = rows[cached > 0], cached[cached > 0]
    if not len(rows):
        return np.zeros(len(view.rows))
    each = cached / _rate_left(cluster, rows, "peer_rate", "given")
    zones = cluster.zones_of(rows)
    slowest, total = np.zeros(len(cluster.region_of)), np.bincount(zones, cached, len(cluster.region_of))
    np.maximum.at(slowest, zones, each)
    of_zone = np.divide(slowest, total, out=np.zeros(len(total)), where=total > 0)
    _, zone, region, elsewhere, _ = sources
    far = (region + elsewhere) * float(each.max() / cached.sum())
    return view.job.ranks * np.maximum(zone * of_zone[view.zones], far)


def score_nodes(job: JobRequest, candidates: Sequence[str], cluster: ClusterFacts) -> NodeValues:
    """Return the score of each candidate: 0 (avoid) to 1 (best), shape (candidates,), float64. Takes 1 to 3 ms for
    5,000. Nodes that drain, do not answer, or are unknown have 0."""
    up = cluster.are_up(cluster.rows(candidates))
    seconds = total_cost(estimates(job, candidates, cluster, includes_expected=True), job.epochs) + _NEGLIGIBLE_SECONDS
    # Excluded nodes do not count for the minimum: compared with a draining node that has everything, all others would
    # get scores near 0.
    found: NodeValues = np.where(up, seconds.min(initial=np.inf, where=up) / seconds, 0.0)
    return found


def total_cost(found: Estimates, epochs: int = 0) -> NodeValues:
    """Return the seconds that a job takes on each candidate, including its cost to others: shape (candidates,)."""
    load = found.first_load + ((epochs or ASSUMED_EPOCHS) - 1) * found.later_load
    return completion_seconds(found, epochs) + _LOAD_WEIGHT * load


def completion_seconds(found: Estimates, epochs: int = 0) -> NodeValues:
    """Return the seconds that the epochs take on each candidate: shape (candidates,). 0 epochs: unknown."""
    epochs = epochs or ASSUMED_EPOCHS
    return epochs * found.epoch + found.first + (epochs - 1) * found.later
