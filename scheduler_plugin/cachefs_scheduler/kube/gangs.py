"""Jobs of several pods: which pod has which rank, where bound pods are, and where the others should go.

kube-scheduler asks for one pod at a time. At the first pod of a job, nodes for all its ranks are planned that together
hold the data, and each further pod gets its planned node. The plan is remade around the bound pods when kube-scheduler
has bound a pod elsewhere, or no longer offers the planned node.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cachefs.scheduling_messages import PlacementRequest
from cachefs_scheduler.advisor_interface import AdvisorInterface
from cachefs_scheduler.kube.pod_job import PodJob

# Jobs that are remembered, and pods of each. Pods beyond these limits are treated as pods without a job.
MAX_JOBS: Final = 10_000
MAX_MEMBERS: Final = 16_384
# Seconds without a request or a visible pod after which a job is forgotten.
FORGET_SECONDS: Final = 900.0
# Seconds for which a plan is valid, since the contents of nodes change.
PLAN_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Gang:
    used_at: float
    # By pod uid.
    rank_by_pod: dict[str, int] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    # Pods that the API server lists.
    seen: set[str] = field(default_factory=set)
    plan: tuple[str, ...] = ()
    planned_at: float = 0.0
    # Number of pods in each seat, and the first seat that may be free: avoids a scan of up to 16,384 seats.
    _pods_by_rank: Counter[int] = field(default_factory=Counter)
    _first_free_rank: int = 0

    def assign_rank(self, uid: str, rank: int | None) -> int:
        """Return the pod's rank: the given one, or else the first free one, which the pod then keeps."""
        if rank is None and uid not in self.rank_by_pod:
            while self._first_free_rank in self._pods_by_rank:
                self._first_free_rank += 1
            rank = self._first_free_rank
        if rank is not None and self.rank_by_pod.get(uid) != rank:
            self.free_rank(uid)
            self.rank_by_pod[uid] = rank
            self._pods_by_rank[rank] += 1
        return self.rank_by_pod[uid]

    def free_rank(self, uid: str) -> None:
        """Free the pod's seat, if it has one."""
        rank = self.rank_by_pod.pop(uid, None)
        if rank is None:
            return
        self._pods_by_rank[rank] -= 1
        if not self._pods_by_rank[rank]:
            del self._pods_by_rank[rank]
            self._first_free_rank = min(self._first_free_rank, rank)

    def nodes_by_rank(self) -> dict[int, str]:
        return {self.rank_by_pod[uid]: node for uid, node in self.bound.items()}


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """The planned node of a pod."""

    # The pod's node; "": there is no plan.
    node: str
    # Nodes planned for other ranks that are not bound yet.
    other_nodes: frozenset[str]


NO_PLANNED_NODE: Final = PlannedNode("", frozenset())


class PodGangs:
    """Plans for all jobs that may have several pods. `now`: monotonic seconds."""

    def __init__(self, most_jobs: int = MAX_JOBS) -> None:
        self._most_jobs = most_jobs
        # In order of last use, the most recent one last.
        self._gangs: dict[str, _Gang] = {}

    def __len__(self) -> int:
        return len(self._gangs)

    def note_request(self, pod: PodJob, uid: str, now: float) -> PlacementRequest:
        """Record that kube-scheduler asks for the pod. Returns its Ask with the number of ranks of the whole job."""
        gang = self._use_gang(pod.request.job, now) if pod.ranks != 1 else None
        if gang is None or len(gang.rank_by_pod) >= MAX_MEMBERS:
            return pod.request
        gang.assign_rank(uid, pod.rank)
        return _with_ranks(pod, gang)

    def plan_node(
        self, request: PlacementRequest, uid: str, candidates: Sequence[str], advisor: AdvisorInterface, now: float
    ) -> PlannedNode:
        """Return where a pod that `note_request` has recorded should go."""
        gang = self._gangs.get(request.job)
        if gang is None or request.ranks < 2 or uid not in gang.rank_by_pod:
            return NO_PLANNED_NODE
        seat, taken, offered = gang.rank_by_pod[uid], gang.nodes_by_rank(), set(candidates)
        if not self._is_plan_valid(gang, seat, taken, offered, now):
            around = {rank: node for rank, node in taken.items() if rank < request.ranks and rank != seat}
            gang.plan = tuple(advisor.assign(request, candidates, around).nodes)
            gang.planned_at = now
        own = gang.plan[seat] if seat < len(gang.plan) else ""
        if own not in offered:
            return NO_PLANNED_NODE
        waiting = (node for rank, node in enumerate(gang.plan) if rank != seat and rank not in taken)
        return PlannedNode(own, frozenset(waiting) - {own})

    def note_pod(self, pod: PodJob, uid: str, node: str, now: float) -> None:
        """Record a pod that the API server lists. node: where it is bound, or ""."""
        gang = self._use_gang(pod.request.job, now) if pod.ranks != 1 else None
        if gang is None or (uid not in gang.rank_by_pod and len(gang.rank_by_pod) >= MAX_MEMBERS):
            return
        gang.seen.add(uid)
        if node:
            gang.bound[uid] = node
        # A pod without a number gets its seat when kube-scheduler asks for it, or when it is bound.
        if node or pod.rank is not None:
            gang.assign_rank(uid, pod.rank)

    def remove_pod(self, job: str, uid: str) -> None:
        """Remove a pod. Its seat is free for its successor."""
        gang = self._gangs.get(job)
        if gang is None:
            return
        gang.seen.discard(uid)
        gang.bound.pop(uid, None)
        gang.free_rank(uid)
        if not gang.rank_by_pod and not gang.seen:
            del self._gangs[job]

    def known_ranks(self, pod: PodJob) -> int:
        """Return the known number of ranks of the pod's job."""
        gang = self._gangs.get(pod.request.job)
        return pod.request.ranks if gang is None else _with_ranks(pod, gang).ranks

    def bound_nodes(self, job: str) -> list[str]:
        """Return the nodes where the job's pods are bound, by rank; empty for a job of one pod."""
        gang = self._gangs.get(job)
        return [] if gang is None else [node for _, node in sorted(gang.nodes_by_rank().items())]

    def forget_unused(self, now: float) -> None:
        """Forget jobs without news for FORGET_SECONDS."""
        for job, gang in list(self._gangs.items()):
            if now - gang.used_at < FORGET_SECONDS:
                return
            if not gang.seen:
                del self._gangs[job]

    def keep_pods(self, uids: Collection[str]) -> None:
        """Remove all pods except these, which are all that the API server has."""
        kept = set(uids)
        for job, gang in list(self._gangs.items()):
            for uid in gang.seen - kept:
                self.remove_pod(job, uid)

    def _use_gang(self, job: str, now: float) -> _Gang | None:
        gang = self._gangs.pop(job, None)
        if gang is None:
            if len(self._gangs) >= self._most_jobs:
                self.forget_unused(now)
            if len(self._gangs) >= self._most_jobs:
                return None
            gang = _Gang(now)
        gang.used_at = now
        self._gangs[job] = gang
        return gang

    def _is_plan_valid(self, gang: _Gang, seat: int, taken: Mapping[int, str], offered: set[str], now: float) -> bool:
        """Return whether the plan is still valid for this pod."""
        if seat >= len(gang.plan) or now - gang.planned_at >= PLAN_SECONDS or gang.plan[seat] not in offered:
            return False
        return all(rank >= len(gang.plan) or gang.plan[rank] == node for rank, node in taken.items())


def _with_ranks(pod: PodJob, gang: _Gang) -> PlacementRequest:
    """Return the Ask with the annotated number of ranks, or else with the number of pods seen or the highest rank."""
    if pod.ranks:
        return pod.request
    highest = max(gang.rank_by_pod.values(), default=-1) + 1
    return msgspec.structs.replace(pod.request, ranks=max(1, len(gang.rank_by_pod.keys() | gang.seen), highest))
