"""Decides for jobs with visible pods: gates to open, calls to `Advice`, events to write.

Does no I/O. All replicas follow pods, but only the leader calls `due`, so any replica can take over. All decisions
derive from the present pods, so a new or restarted leader repeats them.
"""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cachefs.scheduling_messages import Ask, Policy
from cachefs_scheduler.advice import Advice
from cachefs_scheduler.kube.gangs import Gangs
from cachefs_scheduler.kube.notes import Note
from cachefs_scheduler.kube.pod_job import GATE, KUBE, PodJob, is_gated, job_name, job_of
from cachefs_scheduler.kube.wire import Metadata, Pod

log = logging.getLogger(__name__)

# Seconds after which a job without pods has ended; a failed pod is replaced sooner.
ENDED_AFTER: Final = 30.0
# Seconds between repeated calls to Advice for an unchanged job.
AGAIN: Final = 120.0
# Seconds for which a new leader admits no job whose dataset is unknown.
SETTLED: Final = 30.0
# Seconds after which a gate that is still closed is opened again.
_TRIED: Final = 15.0
# Seconds after which a failed attempt to open a gate is repeated.
_PAUSE: Final = 2.0
# Seconds between scans of all jobs.
_LOOK: Final = 2.0
# Jobs per pass, which takes about 20 ms: kube-scheduler must not wait for a pass over 10,000 jobs.
MOST_AT_ONCE: Final = 256

WAITING: Final = "CachefsWaiting"
ADMITTED: Final = "CachefsAdmitted"
ANNOTATION: Final = "CachefsAnnotation"


@dataclass(frozen=True, slots=True)
class OpenGate:
    """A gate to open."""

    pod: Metadata
    # Index among the pod's gates.
    index: int


@dataclass(slots=True)
class Due:
    """Pending actions."""

    gates: list[OpenGate] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    # Whether more actions are pending.
    more: bool = False


@dataclass(frozen=True, slots=True)
class _Member:
    """A running or waiting pod."""

    metadata: Metadata
    job: PodJob | None
    node: str
    # Index of the cachefs gate; -1: none.
    gate: int
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Job:
    members: dict[str, _Member] = field(default_factory=dict)
    # Nodes and time of the last call to Advice.
    nodes: list[str] = field(default_factory=list)
    told: float | None = None
    # Since when the job has no pods.
    empty: float | None = None
    # When each gate was to be opened, by pod uid.
    opened: dict[str, float] = field(default_factory=dict)
    admitted: bool = False


class Jobs:
    """State of all jobs with pods. Used on the event loop. `now`: monotonic seconds."""

    def __init__(self, advice: Advice, gangs: Gangs) -> None:
        self._advice = advice
        self._gangs = gangs
        self._jobs: dict[str, _Job] = {}
        # Job name by pod uid.
        self._names: dict[str, str] = {}
        self._dirty: set[str] = set()
        # Jobs that were dirty at the last pass and are still to be processed, in order.
        self._queue: deque[str] = deque()
        # Jobs to process again in the next pass.
        self._later: set[str] = set()
        self._looked = -_LOOK
        self._began = -SETTLED
        # Whether to process all waiting jobs. A flag, since a thousand jobs may start or end at once.
        self._all_waiting = False

    def __len__(self) -> int:
        """Return the number of followed pods."""
        return len(self._names)

    # --- events of pods ----------------------------------------------------------------------------------------------

    def listed(self, pods: Iterable[Pod], now: float) -> None:
        """Replace all known pods by these."""
        kept = set()
        for pod in pods:
            kept.add(pod.metadata.uid)
            self.changed(pod, now)
        for uid in set(self._names) - kept:
            self.removed(uid, now)
        self._gangs.keep_only(kept)

    def changed(self, pod: Pod, now: float) -> None:
        uid = pod.metadata.uid
        if pod.status.phase in ("Succeeded", "Failed"):
            self.removed(uid, now)
            return
        job, warnings = job_of(pod)
        name = job.ask.job if job is not None else job_name(pod.metadata)
        if self._names.get(uid, name) != name:
            self.removed(uid, now)
        self._names[uid] = name
        known = self._jobs.setdefault(name, _Job())
        gates = pod.spec.gates or []
        index = next((number for number, gate in enumerate(gates) if gate.name == GATE), -1) if is_gated(pod) else -1
        known.members[uid] = _Member(_named(pod.metadata), job, pod.spec.node, index, warnings)
        known.empty = None
        if index < 0:
            known.opened.pop(uid, None)
        if job is not None:
            self._gangs.seen(job, uid, pod.spec.node, now)
        self._dirty.add(name)

    def removed(self, uid: str, now: float) -> None:
        name = self._names.pop(uid, "")
        job = self._jobs.get(name)
        if job is None:
            return
        job.members.pop(uid, None)
        job.opened.pop(uid, None)
        self._gangs.gone(name, uid)
        if not job.members:
            job.empty = now
        self._dirty.add(name)

    def admissions_changed(self) -> None:
        """Record that waiting jobs may start now."""
        self._all_waiting = True

    def not_opened(self, uid: str, now: float) -> None:
        """Record that a gate could not be opened, so that it is tried again soon."""
        job = self._jobs.get(self._names.get(uid, ""))
        if job is not None and uid in job.opened:
            job.opened[uid] = now - _TRIED + _PAUSE

    def begin(self, now: float) -> None:
        """Begin to lead. All calls to Advice are repeated, since the previous leader informed only its own Advice."""
        self._began = now
        # Jobs that Advice knows and that have no pods have ended, unless pods appear soon.
        for name in self._advice.known(KUBE):
            self._jobs.setdefault(name, _Job(empty=now))
        for job in self._jobs.values():
            job.nodes, job.told, job.admitted = [], None, False
            job.opened.clear()
        self._dirty.update(self._jobs)
        self._queue.clear()

    # --- due actions -------------------------------------------------------------------------------------------------

    def due(self, now: float) -> Due:
        """Inform Advice, and return the other pending actions."""
        found = Due()
        self._look(now)
        if self._all_waiting:
            self._all_waiting = False
            self._dirty.update(name for name, job in self._jobs.items() if not job.nodes)
        if not self._queue:
            dirty, self._dirty = [name for name in self._dirty if name in self._jobs], set()
            self._queue.extend(sorted(dirty, key=lambda name: _turn(self._jobs[name])))
        names = [self._queue.popleft() for _ in range(min(MOST_AT_ONCE, len(self._queue)))]
        found.more = bool(self._queue or self._dirty)
        for name in names:
            if name not in self._jobs:
                continue
            try:
                self._settle(name, self._jobs[name], found, now)
            except Exception as error:
                # An error must hold neither other jobs nor this one.
                log.error("job %s: internal error, its gates are opened", name, exc_info=error)
                if name in self._jobs:
                    self._open(self._jobs[name], found, now)
                    self._later.add(name)
        return found

    def drop_ended(self, now: float) -> None:
        """End jobs without pods while another replica leads; otherwise jobs that this Advice knows would keep slots."""
        for name, job in list(self._jobs.items()):
            if job.empty is not None and now - job.empty >= ENDED_AFTER:
                del self._jobs[name]
                self._advice.ended(name)

    def _look(self, now: float) -> None:
        """Mark jobs whose timers have expired."""
        if now - self._looked < _LOOK:
            return
        self._looked = now
        self._dirty |= self._later
        self._later.clear()
        for name, job in self._jobs.items():
            is_old = job.told is not None and now - job.told >= AGAIN
            has_ended = job.empty is not None and now - job.empty >= ENDED_AFTER
            if is_old or has_ended or any(now - at >= _TRIED for at in job.opened.values()):
                self._dirty.add(name)

    def _settle(self, name: str, job: _Job, found: Due, now: float) -> None:
        if job.empty is not None:
            if now - job.empty >= ENDED_AFTER:
                del self._jobs[name]
                self._advice.ended(name)
            return
        for member in job.members.values():
            if member.warnings:
                found.notes.append(Note(member.metadata, ANNOTATION, "; ".join(member.warnings), "Warning"))
        ask = self._ask(job)
        if ask is None or not self._must_wait(name, job, ask, found, now):
            self._open(job, found, now)

    def _ask(self, job: _Job) -> Ask | None:
        """Return the request of the job's first pod with the known number of ranks; None if no pod names a dataset."""
        asking = [member.job for member in job.members.values() if member.job is not None]
        if not asking:
            return None
        # All pods without an annotated number of ranks give the same count: counting for each takes a second for 5,000
        # pods.
        unsaid = next((each for each in asking if not each.ranks), None)
        ranks = max(*(each.ask.ranks for each in asking), self._gangs.ranks(unsaid) if unsaid is not None else 1)
        return msgspec.structs.replace(asking[0].ask, ranks=ranks)

    def _must_wait(self, name: str, job: _Job, ask: Ask, found: Due, now: float) -> bool:
        """Inform Advice of the job. Returns whether its gates must stay closed."""
        nodes = self._gangs.nodes(name) or [member.node for member in job.members.values() if member.node]
        if nodes:
            self._tell_nodes(name, job, ask, nodes, now)
            return False
        if job.nodes:  # all bound pods are gone, and their successors wait for a node
            self._tell_nodes(name, job, ask, job.nodes, now)
            return False
        if ask.policy not in (Policy.SUSPEND, Policy.CLONE):
            return False
        if ask.policy == Policy.SUSPEND and now - self._began < SETTLED and self._advice.rank(ask, []).why:
            # The daemons have not reported yet; with nothing known, every job would be admitted.
            self._later.add(name)
            return True
        admission = self._advice.admit(ask)
        job.told = now
        if ask.policy != Policy.SUSPEND:
            return False
        gated = [member for member in job.members.values() if member.gate >= 0]
        if not admission.go:
            place = f" (place {admission.place} in the queue)" if admission.place else ""
            found.notes += [
                Note(each.metadata, WAITING, f"waits for a copy of {ask.dataset}: {admission.why}{place}")
                for each in gated
            ]
            return True
        if not job.admitted:
            job.admitted = True
            found.notes += [Note(each.metadata, ADMITTED, admission.why or "a copy has a slot") for each in gated]
        return False

    def _tell_nodes(self, name: str, job: _Job, ask: Ask, nodes: list[str], now: float) -> None:
        if not job.nodes or job.told is None or now - job.told >= AGAIN:
            self._advice.placed(name, nodes, ask)
        elif nodes != job.nodes:
            self._advice.resized(name, nodes)
        else:
            return
        job.nodes, job.told = nodes, now

    def _open(self, job: _Job, found: Due, now: float) -> None:
        for uid, member in job.members.items():
            if member.gate >= 0 and now - job.opened.get(uid, -_TRIED) >= _TRIED:
                job.opened[uid] = now
                found.gates.append(OpenGate(member.metadata, member.gate))


def _named(metadata: Metadata) -> Metadata:
    """Return only the fields that name the pod; there may be 100,000 pods."""
    return Metadata(
        metadata.name, metadata.namespace, metadata.uid, metadata.resource_version, created=metadata.created
    )


def _turn(job: _Job) -> tuple[int, str]:
    """Return the order of jobs: placed jobs first, then admitted ones, then by age."""
    members = job.members.values()
    is_placed, is_let_in = any(member.node for member in members), any(member.gate < 0 for member in members)
    return 0 if is_placed else 1 if is_let_in else 2, min(
        (member.metadata.created or "" for member in members), default=""
    )
