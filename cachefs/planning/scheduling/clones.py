"""Another copy of a snapshot whose copies are all busy: where to, and how long it takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachefs.planning.scheduling.cluster import Cluster
from cachefs.planning.scheduling.estimates import estimates
from cachefs.planning.scheduling.facts import JobAsk
from cachefs.planning.scheduling.spread import Numbers

# Nodes that one copy is spread over at most. A snapshot that so many have no room for is not cloned.
MOST_NODES: Final = 64


@dataclass(frozen=True, slots=True)
class Clone:
    """A copy that could be made."""

    # Where: one node, or the nodes of one zone that have room for it together.
    nodes: tuple[str, ...]
    # Bytes that each of them is to have in the end; those that it has are among them.
    bytes: tuple[int, ...]
    # Bytes that must be brought, and the seconds that takes.
    lacking: int
    seconds: float


def clone_target(ask: JobAsk, candidates: Sequence[str], cluster: Cluster) -> Clone | None:
    """Where another copy would be made soonest; None where no zone has room for it.

    candidates: nodes that may have it, and could run the job: not those of copies that are there. One node is better
    than several, since all is read locally then; of nodes that have the room, the one on which it is there first, which
    is one that has a part already, or a fast link to those who have.
    """
    spread = cluster.spread(ask.snapshot)
    names = list(dict.fromkeys(candidates))
    rows = cluster.rows(names)
    held = spread.held(rows) * spread.size * cluster.trust(rows)
    room = np.where(cluster.up(rows), np.maximum(cluster.room(rows), held), 0.0)
    lacking = np.maximum(spread.size - held, 0.0)
    alone = JobAsk(ask.id, ask.snapshot)
    # Seconds for all that is not there, if one node gets it alone.
    seconds = estimates(alone, names, cluster).first_load if names else np.zeros(0)
    fitting = np.flatnonzero(room >= spread.size)
    if len(fitting):
        best = int(fitting[np.argmin(seconds[fitting])])
        return Clone((names[best],), (spread.size,), round(float(lacking[best])), float(seconds[best]))
    best_group = None
    zones = cluster.zone(rows)
    for zone in dict.fromkeys(zones.tolist()):
        group = np.flatnonzero((zones == zone) & (room > 0))
        group = group[np.argsort(-room[group], kind="stable")][:MOST_NODES]
        enough = int(np.searchsorted(np.cumsum(room[group]), spread.size)) + 1
        if enough <= len(group):
            made = _over(names, group[:enough].tolist(), room, held, seconds, spread.size)
            if best_group is None or made.seconds < best_group.seconds:
                best_group = made
    return best_group


def _over(names: Sequence[str], group: list[int], room: Numbers, held: Numbers, seconds: Numbers, size: int) -> Clone:
    """A copy over several nodes: each has a part in proportion to its room."""
    parts = room[group] * size / room[group].sum()
    lacking = np.maximum(parts - held[group], 0.0)
    # Each gets its part while the others get theirs.
    each = seconds[group] * lacking / np.maximum(size - held[group], 1.0)
    return Clone(
        tuple(names[place] for place in group),
        tuple(np.floor(parts).astype(np.int64).tolist()),
        round(float(lacking.sum())),
        float(each.max()),
    )
