"""What counts as a cached copy of a snapshot, and how many jobs may read one at once.

A **cached copy** is a set of nodes that together have at least ENOUGH of the snapshot: a node that has so much alone;
or else what is left of a zone; or else what is left of all zones. Each node belongs to one copy at most. A job reads
one copy: the one on whose nodes most of it runs, or else the one with the fewest jobs.

So many jobs may read a copy at once as its limit says. There is always one copy at least: where nobody has the data
yet, the first jobs make it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachefs.planning.scheduling.cluster import Cluster
from cachefs.planning.scheduling.spread import Rows

# Of a snapshot: a job that finds so much does not notice what is lacking.
ENOUGH: Final = 0.9
# Parts of nodes and of their shards are rounded differently.
_CLOSE: Final = 0.01


@dataclass(frozen=True, slots=True)
class CachedCopy:
    """Nodes that together have a snapshot."""

    # By name, those with most of it first.
    nodes: tuple[str, ...]
    # "" where they are in several.
    zone: str
    # The part of it that they have: 0 to 1.
    held: float
    # How many jobs read it.
    jobs: int


@dataclass(frozen=True, slots=True)
class Slots:
    """Of one snapshot: who may start, and where."""

    # Jobs that may run at once, and that do.
    limit: int
    running: int
    copies: tuple[CachedCopy, ...]
    # The nodes of copies that have a slot, those with fewest jobs first; empty where nobody has the data, and any node
    # may take it.
    nodes: tuple[str, ...]

    @property
    def free(self) -> int:
        return max(0, self.limit - self.running)


def cached_copies(
    snapshot: str, cluster: Cluster, running: Iterable[Collection[str]] = (), enough: float = ENOUGH
) -> tuple[CachedCopy, ...]:
    """The copies of a snapshot, those with most of it first. What silent nodes have counts as for estimates.

    running: of each job that reads the snapshot, or is about to, its nodes.
    """
    holders = sorted(cluster.holders(snapshot))
    if not holders:
        return ()
    spread, rows = cluster.spread(snapshot), cluster.rows(holders)
    held = spread.held(rows) * cluster.trust(rows)
    order = np.argsort(-held, kind="stable")
    rows, held = rows[order], held[order]
    names = [holders[place] for place in order.tolist()]

    alone = held >= enough
    groups = [[place] for place in np.flatnonzero(alone).tolist()]
    rest = np.flatnonzero(~alone & (held > 0))
    zones = cluster.zone(rows)
    together: dict[int, float] = {}  # of groups of several nodes, by the first of them
    for zone in dict.fromkeys(zones[rest].tolist()):
        of_zone = rest[zones[rest] == zone]
        # Shards are looked at only where the parts come to enough: with 5,000 nodes they take 100 ms.
        if held[of_zone].sum() >= enough - _CLOSE and (part := _together(snapshot, rows[of_zone], cluster)) >= enough:
            groups.append(of_zone.tolist())
            together[int(of_zone[0])] = part
            rest = rest[zones[rest] != zone]
    if held[rest].sum() >= enough - _CLOSE and (part := _together(snapshot, rows[rest], cluster)) >= enough:
        groups.append(rest.tolist())
        together[int(rest[0])] = part
    jobs = _readers([{names[place] for place in group} for group in groups], running)
    return tuple(
        CachedCopy(
            tuple(names[place] for place in group),
            _zone_of(names[group[0]], cluster) if len(set(zones[group].tolist())) == 1 else "",
            min(1.0, together.get(group[0], float(held[group[0]]))),
            reading,
        )
        for group, reading in zip(groups, jobs, strict=True)
    )


def slots(copies: Sequence[CachedCopy], limit: int, running: int, making: int = 0) -> Slots:
    """Who may start, where each copy takes so many jobs at once (0: as many as want to).

    running: jobs that read the snapshot anywhere, those too that may start and have not yet; making: copies that are
    being made, and count already.
    """
    if not limit:
        return Slots(running + 1_000_000, running, tuple(copies), tuple(node for copy in copies for node in copy.nodes))
    free = sorted((copy for copy in copies if copy.jobs < limit), key=lambda copy: copy.jobs)
    total = limit * max(1, len(copies) + making)
    return Slots(total, running, tuple(copies), tuple(node for copy in free for node in copy.nodes))


def _together(snapshot: str, rows: Rows, cluster: Cluster) -> float:
    """The part of a snapshot that these nodes have together: 0 to 1."""
    parts = cluster.spread(snapshot).matrix_of(rows) * cluster.trust(rows)[:, None]
    return float(np.minimum(parts.sum(axis=0), 1.0).mean())


def _readers(groups: Sequence[set[str]], running: Iterable[Collection[str]]) -> list[int]:
    """How many of the running jobs read each copy."""
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


def _zone_of(name: str, cluster: Cluster) -> str:
    facts = cluster.said(name)
    return facts.zone if facts else ""
