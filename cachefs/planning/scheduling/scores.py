"""Which of many nodes are best for a job, as numbers from 0 to 1: 1 for the one where it would end first, 0.5 where it
would take twice as long. So nodes that hardly differ have scores that hardly differ, and a scheduler's other reasons
decide between them."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cachefs.planning.scheduling.cluster import Cluster
from cachefs.planning.scheduling.estimates import Estimates, estimates
from cachefs.planning.scheduling.facts import JobAsk
from cachefs.planning.scheduling.spread import Numbers

# Epochs of a job that has not said how many it reads.
ASSUMED_EPOCHS: Final = 10
# What a second in which a link or a source is busy with the job costs others, in seconds. So of two nodes where the job
# never waits, the one with more of its data is better.
_OTHERS: Final = 0.1
# Seconds that are the same as none: so that one node is not twice as good as another for a millisecond.
_NOTHING: Final = 0.1


def scores(ask: JobAsk, candidates: Sequence[str], cluster: Cluster) -> Numbers:
    """Of each candidate: 0 (do not) to 1 (best), shape (candidates,), float64. 1 to 3 ms for 5,000. What drains or does
    not answer has 0, as has a node that nobody has told of."""
    up = cluster.up(cluster.rows(candidates))
    seconds = cost(estimates(ask, candidates, cluster, soon=True), ask.epochs) + _NOTHING
    # What may not be taken is not what others are measured by: beside a node that drains and has everything, all would
    # have no points.
    found: Numbers = np.where(up, seconds.min(initial=np.inf, where=up) / seconds, 0.0)
    return found


def cost(found: Estimates, epochs: int = 0) -> Numbers:
    """Seconds that a job takes on each candidate, with what it costs others: shape (candidates,)."""
    load = found.first_load + ((epochs or ASSUMED_EPOCHS) - 1) * found.later_load
    return completion(found, epochs) + _OTHERS * load


def completion(found: Estimates, epochs: int = 0) -> Numbers:
    """Seconds that a job of so many epochs takes on each candidate: shape (candidates,). 0 epochs: nobody knows."""
    epochs = epochs or ASSUMED_EPOCHS
    return epochs * found.epoch + found.first + (epochs - 1) * found.later
