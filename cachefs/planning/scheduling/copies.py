"""Finds the cached copies of a snapshot, and how many jobs may read each at once.

A **cached copy** is a set of nodes that together have at least ENOUGH_HELD of the snapshot: a single node with that
much; or else the remaining nodes of a zone; or else the remaining nodes of all zones. Each node belongs to one copy at
most. A job reads one copy: the one on whose nodes most of it runs, or else the one with the fewest jobs.

The limit is the number of jobs that may read a copy at once. There is always at least one copy: where no node has the
data yet, the first jobs make it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachefs.planning.scheduling.cluster_facts import ClusterFacts
from cachefs.planning.scheduling.spread import Rows

# Part of a snapshot: a job that finds this much does not notice what is missing.
ENOUGH_HELD: Final = 0.9
# Tolerance, as parts of nodes and of their shards are rounded differently.
_TOLERANCE: Final = 0.01


@dataclass(frozen=True, slots=True)
class CachedCopy:
    """Nodes that together have a snapshot."""

    # Names, largest parts first.
    nodes: tuple[str, ...]
    # "" where the nodes are in several zones.
    zone: str
    # Part of the snapshot that they have: 0 to 1.
    held: float
    # Number of jobs that read the copy.
    jobs: int


@dataclass(frozen=True, slots=True)
class JobSlots:
    """The job slots of one snapshot."""

    # Jobs that may run at once, and that run.
    limit: int
    running: int
    copies: tuple[CachedCopy, ...]
    # Nodes of copies with a free slot, those with fewest jobs first; empty where no node has the data, and any node may
    # run the job.
    nodes: tuple[str, ...]

    @property
    def free(self) -> int:
        return max(0, self.limit - self.running)


def cached_copies(
    snapshot: str, cluster: ClusterFacts, running: Iterable[Collection[str]] = (), enough: float = ENOUGH_HELD
) -> tuple[CachedCopy, ...]:
    """Return the copies of a snapshot, the most complete first. Silent nodes count as in estimates.

    running: the nodes of each job that reads the snapshot, or is about to.
    """
    holders = sorted(cluster.holders(snapshot))
    if not holders:
        return ()
    spread, rows = cluster.spread(snapshot), cluster.rows(holders)
    held = spread.held_share(rows) * cluster.trust(rows)
    order = np.argsort(-held, kind="stable")
    rows, held = rows[order], held[order]
    names = [holders[place] for place in order.tolist()]

    alone = held >= enough
    groups = [[place] for place in np.flatnonzero(alone).tolist()]
    rest = np.flatnonzero(~alone & (held > 0))
    zones = cluster.zones_of(rows)
    together: dict[int, float] = {}  # parts of groups of several nodes, by the group's first node
    for zone in dict.fromkeys(zones[rest].tolist()):
        of_zone = rest[zones[rest] == zone]
        # Shards are examined only where the parts sum up to enough: with 5,000 nodes they take 100 ms.
        if (
            held[of_zone].sum() >= enough - _TOLERANCE
            and (part := _combined_share(snapshot, rows[of_zone], cluster)) >= enough
        ):
            groups.append(of_zone.tolist())
            together[int(of_zone[0])] = part
            rest = rest[zones[rest] != zone]
    if held[rest].sum() >= enough - _TOLERANCE and (part := _combined_share(snapshot, rows[rest], cluster)) >= enough:
        groups.append(rest.tolist())
        together[int(rest[0])] = part
    jobs = _jobs_by_copy([{names[place] for place in group} for group in groups], running)
    return tuple(
        CachedCopy(
            tuple(names[place] for place in group),
            _zone_of(names[group[0]], cluster) if len(set(zones[group].tolist())) == 1 else "",
            min(1.0, together.get(group[0], float(held[group[0]]))),
            reading,
        )
        for group, reading in zip(groups, jobs, strict=True)
    )


def job_slots(copies: Sequence[CachedCopy], limit: int, running: int, making: int = 0) -> JobSlots:
    """Return the job slots. limit: jobs that may read each copy at once (0: no limit).

    running: jobs that read the snapshot anywhere, including those that may start and have not yet; making: copies that
    are being made, which count already.
    """
    if not limit:
        return JobSlots(
            running + 1_000_000, running, tuple(copies), tuple(node for copy in copies for node in copy.nodes)
        )
    free = sorted((copy for copy in copies if copy.jobs < limit), key=lambda copy: copy.jobs)
    total = limit * max(1, len(copies) + making)
    return JobSlots(total, running, tuple(copies), tuple(node for copy in free for node in copy.nodes))


def _combined_share(snapshot: str, rows: Rows, cluster: ClusterFacts) -> float:
    """Return the part of a snapshot that these nodes have together: 0 to 1."""
    parts = cluster.spread(snapshot).matrix_of(rows) * cluster.trust(rows)[:, None]
    return float(np.minimum(parts.sum(axis=0), 1.0).mean())


def _jobs_by_copy(groups: Sequence[set[str]], running: Iterable[Collection[str]]) -> list[int]:
    """Return how many of the running jobs read each copy."""
    of_node = {name: number for number, group in enumerate(groups) for name in group}
    jobs, elsewhere = [0] * len(groups), 0
    for nodes in running:
        on = Counter(of_node[name] for name in nodes if name in of_node)
        if on:
            jobs[on.most_common(1)[0][0]] += 1
        else:
            elsewhere += 1
    for _ in range(elsewhere if jobs else 0):
        jobs[jobs.index(min(jobs))] += 1
    return jobs


def _zone_of(name: str, cluster: ClusterFacts) -> str:
    facts = cluster.reported_facts(name)
    return facts.zone if facts else ""
