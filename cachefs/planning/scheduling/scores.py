"""Scores nodes for a job from 0 to 1: 1 where the job would end first, 0.5 where it would take twice as long. Nodes
that hardly differ have scores that hardly differ, and a scheduler's other criteria decide between them."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cachefs.planning.scheduling.cluster import Cluster
from cachefs.planning.scheduling.estimates import Estimates, estimates
from cachefs.planning.scheduling.facts import JobAsk
from cachefs.planning.scheduling.spread import Numbers

# Epochs assumed for a job that has not declared them.
ASSUMED_EPOCHS: Final = 10
# Cost to others of a second in which a link or a source is busy with the job, in seconds. Of two nodes where the job
# never waits, the one with more of its data is therefore better.
_OTHERS: Final = 0.1
# Seconds that count as none, so that a millisecond does not make one node twice as good as another.
_NOTHING: Final = 0.1


def scores(ask: JobAsk, candidates: Sequence[str], cluster: Cluster) -> Numbers:
    """Return the score of each candidate: 0 (avoid) to 1 (best), shape (candidates,), float64. Takes 1 to 3 ms for
    5,000. Nodes that drain, do not answer, or are unknown have 0."""
    up = cluster.up(cluster.rows(candidates))
    seconds = cost(estimates(ask, candidates, cluster, soon=True), ask.epochs) + _NOTHING
    # Excluded nodes do not count for the minimum: compared with a draining node that has everything, all others would
    # get scores near 0.
    found: Numbers = np.where(up, seconds.min(initial=np.inf, where=up) / seconds, 0.0)
    return found


def cost(found: Estimates, epochs: int = 0) -> Numbers:
    """Return the seconds that a job takes on each candidate, including its cost to others: shape (candidates,)."""
    load = found.first_load + ((epochs or ASSUMED_EPOCHS) - 1) * found.later_load
    return completion(found, epochs) + _OTHERS * load


def completion(found: Estimates, epochs: int = 0) -> Numbers:
    """Return the seconds that the epochs take on each candidate: shape (candidates,). 0 epochs: unknown."""
    epochs = epochs or ASSUMED_EPOCHS
    return epochs * found.epoch + found.first + (epochs - 1) * found.later
