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

from cachefs.scheduling_messages import Ask
from cachefs_scheduler.advice import Advice
from cachefs_scheduler.kube.pod_job import PodJob

# Jobs that are remembered, and pods of each. Pods beyond these limits are treated as pods without a job.
MOST_JOBS: Final = 10_000
MOST_MEMBERS: Final = 16_384
# Seconds without a request or a visible pod after which a job is forgotten.
FORGOTTEN: Final = 900.0
# Seconds for which a plan is valid, since the contents of nodes change.
PLAN_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Gang:
    touched: float
    # By pod uid.
    seats: dict[str, int] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    # Pods that the API server lists.
    seen: set[str] = field(default_factory=set)
    plan: tuple[str, ...] = ()
    planned: float = 0.0
    # Number of pods in each seat, and the first seat that may be free: avoids a scan of up to 16,384 seats.
    _holders: Counter[int] = field(default_factory=Counter)
    _first: int = 0

    def seat(self, uid: str, rank: int | None) -> int:
        """Return the pod's rank: the given one, or else the first free one, which the pod then keeps."""
        if rank is None and uid not in self.seats:
            while self._first in self._holders:
                self._first += 1
            rank = self._first
        if rank is not None and self.seats.get(uid) != rank:
            self.leave(uid)
            self.seats[uid] = rank
            self._holders[rank] += 1
        return self.seats[uid]

    def leave(self, uid: str) -> None:
        """Free the pod's seat, if it has one."""
        rank = self.seats.pop(uid, None)
        if rank is None:
            return
        self._holders[rank] -= 1
        if not self._holders[rank]:
            del self._holders[rank]
            self._first = min(self._first, rank)

    def taken(self) -> dict[int, str]:
        return {self.seats[uid]: node for uid, node in self.bound.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """The planned node of a pod."""

    # The pod's node; "": there is no plan.
    own: str
    # Nodes planned for other ranks that are not bound yet.
    others: frozenset[str]


NOWHERE: Final = Place("", frozenset())


class Gangs:
    """Plans for all jobs that may have several pods. `now`: monotonic seconds."""

    def __init__(self, most_jobs: int = MOST_JOBS) -> None:
        self._most_jobs = most_jobs
        # In order of last use, the most recent one last.
        self._gangs: dict[str, _Gang] = {}

    def __len__(self) -> int:
        return len(self._gangs)

    def asked(self, pod: PodJob, uid: str, now: float) -> Ask:
        """Record that kube-scheduler asks for the pod. Returns its Ask with the number of ranks of the whole job."""
        gang = self._touch(pod.ask.job, now) if pod.ranks != 1 else None
        if gang is None or len(gang.seats) >= MOST_MEMBERS:
            return pod.ask
        gang.seat(uid, pod.rank)
        return _with_ranks(pod, gang)

    def place(self, ask: Ask, uid: str, candidates: Sequence[str], advice: Advice, now: float) -> Place:
        """Return where a pod that `asked` has recorded should go."""
        gang = self._gangs.get(ask.job)
        if gang is None or ask.ranks < 2 or uid not in gang.seats:
            return NOWHERE
        seat, taken, offered = gang.seats[uid], gang.taken(), set(candidates)
        if not self._holds(gang, seat, taken, offered, now):
            around = {rank: node for rank, node in taken.items() if rank < ask.ranks and rank != seat}
            gang.plan = tuple(advice.assign(ask, candidates, around).nodes)
            gang.planned = now
        own = gang.plan[seat] if seat < len(gang.plan) else ""
        if own not in offered:
            return NOWHERE
        waiting = (node for rank, node in enumerate(gang.plan) if rank != seat and rank not in taken)
        return Place(own, frozenset(waiting) - {own})

    def seen(self, pod: PodJob, uid: str, node: str, now: float) -> None:
        """Record a pod that the API server lists. node: where it is bound, or ""."""
        gang = self._touch(pod.ask.job, now) if pod.ranks != 1 else None
        if gang is None or (uid not in gang.seats and len(gang.seats) >= MOST_MEMBERS):
            return
        gang.seen.add(uid)
        if node:
            gang.bound[uid] = node
        # A pod without a number gets its seat when kube-scheduler asks for it, or when it is bound.
        if node or pod.rank is not None:
            gang.seat(uid, pod.rank)

    def gone(self, job: str, uid: str) -> None:
        """Remove a pod. Its seat is free for its successor."""
        gang = self._gangs.get(job)
        if gang is None:
            return
        gang.seen.discard(uid)
        gang.bound.pop(uid, None)
        gang.leave(uid)
        if not gang.seats and not gang.seen:
            del self._gangs[job]

    def ranks(self, pod: PodJob) -> int:
        """Return the known number of ranks of the pod's job."""
        gang = self._gangs.get(pod.ask.job)
        return pod.ask.ranks if gang is None else _with_ranks(pod, gang).ranks

    def nodes(self, job: str) -> list[str]:
        """Return the nodes where the job's pods are bound, by rank; empty for a job of one pod."""
        gang = self._gangs.get(job)
        return [] if gang is None else [node for _, node in sorted(gang.taken().items())]

    def forget(self, now: float) -> None:
        """Forget jobs without news for FORGOTTEN seconds."""
        for job, gang in list(self._gangs.items()):
            if now - gang.touched < FORGOTTEN:
                return
            if not gang.seen:
                del self._gangs[job]

    def keep_only(self, uids: Collection[str]) -> None:
        """Remove all pods except these, which are all that the API server has."""
        kept = set(uids)
        for job, gang in list(self._gangs.items()):
            for uid in gang.seen - kept:
                self.gone(job, uid)

    def _touch(self, job: str, now: float) -> _Gang | None:
        gang = self._gangs.pop(job, None)
        if gang is None:
            if len(self._gangs) >= self._most_jobs:
                self.forget(now)
            if len(self._gangs) >= self._most_jobs:
                return None
            gang = _Gang(now)
        gang.touched = now
        self._gangs[job] = gang
        return gang

    def _holds(self, gang: _Gang, seat: int, taken: Mapping[int, str], offered: set[str], now: float) -> bool:
        """Return whether the plan is still valid for this pod."""
        if seat >= len(gang.plan) or now - gang.planned >= PLAN_SECONDS or gang.plan[seat] not in offered:
            return False
        return all(rank >= len(gang.plan) or gang.plan[rank] == node for rank, node in taken.items())


def _with_ranks(pod: PodJob, gang: _Gang) -> Ask:
    """Return the Ask with the annotated number of ranks, or else with the number of pods seen or the highest rank."""
    if pod.ranks:
        return pod.ask
    highest = max(gang.seats.values(), default=-1) + 1
    return msgspec.structs.replace(pod.ask, ranks=max(1, len(gang.seats.keys() | gang.seen), highest))
