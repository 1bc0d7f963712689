"""Jobs of several pods: which pod is which rank, where those are that are bound, and where the others should go.

kube-scheduler asks for one pod after another. For the first one of a job, nodes for all its ranks are planned, which
together hold the data, and each pod then finds its own one. The plan is made again, around the pods that are bound,
when kube-scheduler has bound a pod elsewhere, or no longer offers the node that was planned.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cachefs.scheduling_messages import Ask
from cachefs_scheduler.advice import Advice
from cachefs_scheduler.kube.pod_job import PodJob

# Jobs that are remembered, and pods of each. What is more than that is answered as pods without a job are.
MOST_JOBS: Final = 10_000
MOST_MEMBERS: Final = 16_384
# Seconds after which a job that nobody asks for, and of which no pod was seen, is forgotten.
FORGOTTEN: Final = 900.0
# Seconds for which a plan holds: what nodes hold changes.
PLAN_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Gang:
    touched: float
    # By uid of a pod.
    seats: dict[str, int] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    # Pods that the API server has shown.
    seen: set[str] = field(default_factory=set)
    plan: tuple[str, ...] = ()
    planned: float = 0.0
    # How many pods have each seat, and the first one that may be free: a job may have 16,384 of them.
    _holders: Counter[int] = field(default_factory=Counter)
    _first: int = 0

    def seat(self, uid: str, rank: int | None) -> int:
        """Its rank: the one it has said, else the first that is free. It keeps it."""
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
        """Its seat is free, if it had one."""
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
    """Where a pod of a job should go."""

    # Its node; "": there is no plan.
    own: str
    # Nodes that are for other ranks, which are not bound yet.
    others: frozenset[str]


NOWHERE: Final = Place("", frozenset())


class Gangs:
    """Of all jobs that may have several pods. `now` is any clock that nobody sets, in seconds."""

    def __init__(self, most_jobs: int = MOST_JOBS) -> None:
        self._most_jobs = most_jobs
        # The one that was touched last is last.
        self._gangs: dict[str, _Gang] = {}

    def __len__(self) -> int:
        return len(self._gangs)

    def asked(self, pod: PodJob, uid: str, now: float) -> Ask:
        """Note that kube-scheduler asks for the pod. What to ask for it: with all ranks that its job has."""
        gang = self._touch(pod.ask.job, now) if pod.ranks != 1 else None
        if gang is None or len(gang.seats) >= MOST_MEMBERS:
            return pod.ask
        gang.seat(uid, pod.rank)
        return _with_ranks(pod, gang)

    def place(self, ask: Ask, uid: str, candidates: Sequence[str], advice: Advice, now: float) -> Place:
        """Where the pod, which was `asked` for, should go."""
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
        """The API server shows the pod. node: where it is bound, or ""."""
        gang = self._touch(pod.ask.job, now) if pod.ranks != 1 else None
        if gang is None or (uid not in gang.seats and len(gang.seats) >= MOST_MEMBERS):
            return
        gang.seen.add(uid)
        if node:
            gang.bound[uid] = node
        # One that has no number, and that kube-scheduler has not asked for, gets its seat when it does, or is bound.
        if node or pod.rank is not None:
            gang.seat(uid, pod.rank)

    def gone(self, job: str, uid: str) -> None:
        """The pod is no more. Its seat is free for the one that takes its place."""
        gang = self._gangs.get(job)
        if gang is None:
            return
        gang.seen.discard(uid)
        gang.bound.pop(uid, None)
        gang.leave(uid)
        if not gang.seats and not gang.seen:
            del self._gangs[job]

    def ranks(self, pod: PodJob) -> int:
        """How many ranks the pod's job has, as far as is known."""
        gang = self._gangs.get(pod.ask.job)
        return pod.ask.ranks if gang is None else _with_ranks(pod, gang).ranks

    def nodes(self, job: str) -> list[str]:
        """Where its pods are bound, by rank. Empty for a job of one pod."""
        gang = self._gangs.get(job)
        return [] if gang is None else [node for _, node in sorted(gang.taken().items())]

    def forget(self, now: float) -> None:
        """Forget jobs of which nothing was heard for long."""
        for job, gang in list(self._gangs.items()):
            if now - gang.touched < FORGOTTEN:
                return
            if not gang.seen:
                del self._gangs[job]

    def keep_only(self, uids: Collection[str]) -> None:
        """These are all pods that the API server has."""
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
        """Is the plan good for this pod still?"""
        if seat >= len(gang.plan) or now - gang.planned >= PLAN_SECONDS or gang.plan[seat] not in offered:
            return False
        return all(rank >= len(gang.plan) or gang.plan[rank] == node for rank, node in taken.items())


def _with_ranks(pod: PodJob, gang: _Gang) -> Ask:
    """As many ranks as the annotation says; else as many as pods have been seen, or the highest number says."""
    if pod.ranks:
        return pod.ask
    highest = max(gang.seats.values(), default=-1) + 1
    return msgspec.structs.replace(pod.ask, ranks=max(1, len(gang.seats.keys() | gang.seen), highest))
