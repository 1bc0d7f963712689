"""The scheduler extender: tells kube-scheduler which nodes a pod must not get (/filter) and scores the others
(/prioritize).

After an internal error the answer filters nothing and prefers nothing, so kube-scheduler does as it would without an
extender. Each answer to /prioritize names all nodes, since kube-scheduler scores an absent node 0.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cachefs.scheduling_messages import PlacementPolicy
from cachefs_scheduler.advisor_interface import AdvisorInterface
from cachefs_scheduler.kube.gangs import PlannedNode, PodGangs
from cachefs_scheduler.kube.kube_messages import HostPriority, Pod
from cachefs_scheduler.kube.pod_job import PodJob, parse_pod_job

log = logging.getLogger(__name__)

# MaxExtenderPriority. kube-scheduler multiplies scores by 10 and the extender's weight, and does not clamp larger ones.
MAX_SCORE: Final = 10
# Only the node planned for a rank scores MAX_SCORE for it, and nodes planned for other ranks of the job count half.
_NEXT_SCORE: Final = MAX_SCORE - 1
_FOR_ANOTHER: Final = 0.5
# Scores are rounded down, so a node that is worse by more than this fraction of a point scores a point less.
_SCORE_TOLERANCE: Final = 0.05
_MAX_TEXT: Final = 200
# Seconds after which an answer counts as slow.
SLOW_SECONDS: Final = 0.05
# Seconds between log messages about internal errors.
_LOG_SECONDS: Final = 60.0


@dataclass(slots=True)
class ExtenderCounts:
    """Counters of the extender, for /metrics."""

    filtered: int = 0
    prioritized: int = 0
    # Pods without the annotation: they get all nodes and no scores.
    unannotated: int = 0
    # Answers that filter and prefer nothing after an internal error.
    errors: int = 0
    refused_nodes: int = 0
    # By verb: seconds of all answers together, each from the first byte of the request.
    seconds: dict[str, float] = field(default_factory=lambda: {"filter": 0.0, "prioritize": 0.0})
    # By verb: answers that took longer than SLOW_SECONDS.
    slow: dict[str, int] = field(default_factory=lambda: {"filter": 0, "prioritize": 0})


class Extender:
    """Answers kube-scheduler. Used on the event loop. Methods raise nothing."""

    def __init__(self, advisor: AdvisorInterface, gangs: PodGangs, clock: Callable[[], float] = time.monotonic) -> None:
        self._advisor = advisor
        self._gangs = gangs
        self._clock = clock
        self._logged_at = -_LOG_SECONDS
        self.counts = ExtenderCounts()

    def refused_nodes(self, pod: Pod | None, nodes: Sequence[str]) -> dict[str, str]:
        """Return the *nodes* that the pod must not get, with reasons. Not empty only with the policy `require`."""
        self.counts.filtered += 1
        try:
            job = self._job(pod)
            if job is None or job.request.policy != PlacementPolicy.REQUIRE:
                return {}
            refused = self._advisor.rank(job.request, nodes).refused
            offered = set(nodes)
            found = {node: f"cachefs: {why}"[:_MAX_TEXT] for node, why in refused.items() if node in offered}
            self.counts.refused_nodes += len(found)
            return found
        except Exception as error:
            self._log_error("filter", error)
            return {}

    def node_priorities(self, pod: Pod | None, nodes: Sequence[str]) -> list[HostPriority]:
        """Return a score from 0 to 10 for each of *nodes*, in their order."""
        self.counts.prioritized += 1
        try:
            return self._score_nodes(pod, nodes)
        except Exception as error:
            self._log_error("prioritize", error)
            return [HostPriority(node, 0) for node in nodes]

    def record_duration(self, verb: str, seconds: float) -> None:
        """Record how long an answer has taken."""
        self.counts.seconds[verb] += seconds
        self.counts.slow[verb] += seconds > SLOW_SECONDS

    def _score_nodes(self, pod: Pod | None, nodes: Sequence[str]) -> list[HostPriority]:
        job = self._job(pod)
        if job is None or pod is None:
            return [HostPriority(node, 0) for node in nodes]
        now = self._clock()
        request = self._gangs.note_request(job, pod.metadata.uid, now)
        scores = self._advisor.rank(request, nodes).scores
        if not scores:
            return [HostPriority(node, 0) for node in nodes]
        planned = self._gangs.plan_node(request, pod.metadata.uid, nodes, self._advisor, now)
        points = _points([scores.get(node, 0.0) for node in nodes], nodes, planned)
        return [HostPriority(node, point) for node, point in zip(nodes, points, strict=True)]

    def _job(self, pod: Pod | None) -> PodJob | None:
        job = parse_pod_job(pod)[0] if pod is not None else None
        if job is None:
            self.counts.unannotated += 1
        return job

    def _log_error(self, verb: str, error: Exception) -> None:
        self.counts.errors += 1
        now = self._clock()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            log.error("%s: internal error, the answer filters and prefers nothing", verb, exc_info=error)


def _points(parts: list[float], nodes: Sequence[str], planned: PlannedNode) -> list[int]:
    """Return 0 to MAX_SCORE for each node; NaN counts as 0. Uses arrays, since a loop over 5,000 nodes takes 2 ms."""
    values = np.clip(np.nan_to_num(np.array(parts)), 0.0, 1.0)
    if planned.node:
        values[[number for number, node in enumerate(nodes) if node in planned.other_nodes]] *= _FOR_ANOTHER
    points: list[int] = (
        np.floor(values * (_NEXT_SCORE if planned.node else MAX_SCORE) + _SCORE_TOLERANCE).astype(np.int64).tolist()
    )
    if planned.node:
        points[nodes.index(planned.node)] = MAX_SCORE
    return points
