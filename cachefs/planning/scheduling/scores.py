"""Scores nodes for a job from 0 to 1: 1 where the job would end first, 0.5 where it would take twice as long. Nodes
that hardly differ have scores that hardly differ, and a scheduler's other criteria decide between them."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cachefs.planning.scheduling.cluster_facts import ClusterFacts
from cachefs.planning.scheduling.estimates import Estimates, estimates
from cachefs.planning.scheduling.facts import JobRequest
from cachefs.planning.scheduling.spread import NodeValues

# Epochs assumed for a job that has not declared them.
ASSUMED_EPOCHS: Final = 10
# Cost to others of a second in which a link or a source is busy with the job, in seconds. Of two nodes where the job
# never waits, the one with more of its data is therefore better.
_LOAD_WEIGHT: Final = 0.1
# Seconds that count as none, so that a millisecond does not make one node twice as good as another.
_NEGLIGIBLE_SECONDS: Final = 0.1


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
