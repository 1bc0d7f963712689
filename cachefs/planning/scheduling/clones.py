"""Plans another copy of a snapshot whose copies are all busy: on which nodes, and how long it takes to make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachefs.planning.scheduling.cluster_facts import ClusterFacts
from cachefs.planning.scheduling.estimates import estimates
from cachefs.planning.scheduling.facts import JobRequest
from cachefs.planning.scheduling.spread import NodeValues

# Most nodes of one copy. A snapshot that needs more is not cloned.
MAX_NODES_OF_COPY: Final = 64


@dataclass(frozen=True, slots=True)
class Clone:
    """A copy that could be made."""

    # One node, or nodes of one zone that together have room.
    nodes: tuple[str, ...]
    # Bytes that each will have, including those that it has already.
    bytes: tuple[int, ...]
    # Bytes to transfer, and the seconds that takes.
    missing_bytes: int
    seconds: float


def plan_clone(job: JobRequest, candidates: Sequence[str], cluster: ClusterFacts) -> Clone | None:
    """Return the copy that can be made soonest; None where no zone has room.

    candidates: nodes that may hold the copy and could run the job, without the nodes of existing copies. One node is
    preferred over several, since all reads are then local; among nodes with room, the one that has the copy first, such
    as one that has a part already, or a fast link to the holders.
    """
    spread = cluster.spread(job.snapshot)
    names = list(dict.fromkeys(candidates))
    rows = cluster.rows(names)
    held = spread.held_share(rows) * spread.size * cluster.trust(rows)
    room = np.where(cluster.are_up(rows), np.maximum(cluster.room(rows), held), 0.0)
    lacking = np.maximum(spread.size - held, 0.0)
    alone = JobRequest(job.id, job.snapshot)
    # Seconds to fetch everything missing, for each node alone.
    seconds = estimates(alone, names, cluster).first_load if names else np.zeros(0)
    fitting = np.flatnonzero(room >= spread.size)
    if len(fitting):
        best = int(fitting[np.argmin(seconds[fitting])])
        return Clone((names[best],), (spread.size,), round(float(lacking[best])), float(seconds[best]))
    best_group = None
    zones = cluster.zones_of(rows)
    for zone in dict.fromkeys(zones.tolist()):
        group = np.flatnonzero((zones == zone) & (room > 0))
        group = group[np.argsort(-room[group], kind="stable")][:MAX_NODES_OF_COPY]
        enough = int(np.searchsorted(np.cumsum(room[group]), spread.size)) + 1
        if enough <= len(group):
            made = _clone_over_nodes(names, group[:enough].tolist(), room, held, seconds, spread.size)
            if best_group is None or made.seconds < best_group.seconds:
                best_group = made
    return best_group


def _clone_over_nodes(
    names: Sequence[str], group: list[int], room: NodeValues, held: NodeValues, seconds: NodeValues, size: int
) -> Clone:
    """Return a copy over several nodes, each with a part in proportion to its room."""
    parts = room[group] * size / room[group].sum()
    lacking = np.maximum(parts - held[group], 0.0)
    # All nodes fetch their parts at the same time.
    each = seconds[group] * lacking / np.maximum(size - held[group], 1.0)
    return Clone(
        tuple(names[place] for place in group),
        tuple(np.floor(parts).astype(np.int64).tolist()),
        round(float(lacking.sum())),
        float(each.max()),
    )
