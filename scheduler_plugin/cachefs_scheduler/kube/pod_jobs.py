"""Decides for jobs with visible pods: gates to open, calls to `AdvisorInterface`, events to write.

Does no I/O. All replicas follow pods, but only the leader calls `collect_actions`, so any replica can take over. All
decisions derive from the present pods, so a new or restarted leader repeats them.
"""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cachefs.scheduling_messages import PlacementPolicy, PlacementRequest
from cachefs_scheduler.advisor_interface import AdvisorInterface
from cachefs_scheduler.kube.gangs import PodGangs
from cachefs_scheduler.kube.kube_messages import ObjectMetadata, Pod, PodEvent
from cachefs_scheduler.kube.pod_job import GATE, KUBE, PodJob, is_gated, job_name, parse_pod_job

log = logging.getLogger(__name__)

# Seconds after which a job without pods has ended; a failed pod is replaced sooner.
ENDED_SECONDS: Final = 30.0
# Seconds between repeated calls to Advice for an unchanged job.
REPEAT_SECONDS: Final = 120.0
# Seconds for which a new leader admits no job whose dataset is unknown.
SETTLE_SECONDS: Final = 30.0
# Seconds after which a gate that is still closed is opened again.
_REOPEN_SECONDS: Final = 15.0
# Seconds after which a failed attempt to open a gate is repeated.
_RETRY_SECONDS: Final = 2.0
# Seconds between scans of all jobs.
_SCAN_SECONDS: Final = 2.0
# Jobs per pass, which takes about 20 ms: kube-scheduler must not wait for a pass over 10,000 jobs.
MAX_JOBS_PER_PASS: Final = 256

WAITING: Final = "CachefsWaiting"
ADMITTED: Final = "CachefsAdmitted"
ANNOTATION: Final = "CachefsAnnotation"


@dataclass(frozen=True, slots=True)
class OpenGate:
    """A gate to open."""

    pod: ObjectMetadata
    # Index among the pod's gates.
    index: int


@dataclass(slots=True)
class PendingActions:
    """Pending actions."""

    gates: list[OpenGate] = field(default_factory=list)
    events: list[PodEvent] = field(default_factory=list)
    # Whether more actions are pending.
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class _JobPod:
    """A running or waiting pod."""

    metadata: ObjectMetadata
    job: PodJob | None
    node: str
    # Index of the cachefs gate; -1: none.
    gate: int
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _PodJobState:
    members: dict[str, _JobPod] = field(default_factory=dict)
    # Nodes and time of the last call to Advice.
    nodes: list[str] = field(default_factory=list)
    reported_at: float | None = None
    # Since when the job has no pods.
    empty_since: float | None = None
    # When each gate was to be opened, by pod uid.
    gate_opened_at: dict[str, float] = field(default_factory=dict)
    admitted: bool = False


class PodJobs:
    """State of all jobs with pods. Used on the event loop. `now`: monotonic seconds."""

    def __init__(self, advisor: AdvisorInterface, gangs: PodGangs) -> None:
        self._advisor = advisor
        self._gangs = gangs
        self._jobs: dict[str, _PodJobState] = {}
        # Job name by pod uid.
        self._names: dict[str, str] = {}
        self._dirty: set[str] = set()
        # Jobs that were dirty at the last pass and are still to be processed, in order.
        self._queue: deque[str] = deque()
        # Jobs to process again in the next pass.
        self._next_pass: set[str] = set()
        self._scanned_at = -_SCAN_SECONDS
        self._leading_since = -SETTLE_SECONDS
        # Whether to process all waiting jobs. A flag, since a thousand jobs may start or end at once.
        self._all_waiting = False

    def __len__(self) -> int:
        """Return the number of followed pods."""
        return len(self._names)

    # --- events of pods ----------------------------------------------------------------------------------------------

    def replace_pods(self, pods: Iterable[Pod], now: float) -> None:
        """Replace all known pods by these."""
        kept = set()
        for pod in pods:
            kept.add(pod.metadata.uid)
            self.update_pod(pod, now)
        for uid in set(self._names) - kept:
            self.remove_pod(uid, now)
        self._gangs.keep_pods(kept)

    def update_pod(self, pod: Pod, now: float) -> None:
        uid = pod.metadata.uid
        if pod.status.phase in ("Succeeded", "Failed"):
            self.remove_pod(uid, now)
            return
        job, warnings = parse_pod_job(pod)
        name = job.request.job if job is not None else job_name(pod.metadata)
        if self._names.get(uid, name) != name:
            self.remove_pod(uid, now)
        self._names[uid] = name
        known = self._jobs.setdefault(name, _PodJobState())
        gates = pod.spec.gates or []
        index = next((number for number, gate in enumerate(gates) if gate.name == GATE), -1) if is_gated(pod) else -1
        known.members[uid] = _JobPod(_identifying_fields(pod.metadata), job, pod.spec.node, index, warnings)
        known.empty_since = None
        if index < 0:
            known.gate_opened_at.pop(uid, None)
        if job is not None:
            self._gangs.note_pod(job, uid, pod.spec.node, now)
        self._dirty.add(name)

    def remove_pod(self, uid: str, now: float) -> None:
        name = self._names.pop(uid, "")
        job = self._jobs.get(name)
        if job is None:
            return
        job.members.pop(uid, None)
        job.gate_opened_at.pop(uid, None)
        self._gangs.remove_pod(name, uid)
        if not job.members:
            job.empty_since = now
        self._dirty.add(name)

    def admissions_changed(self) -> None:
        """Record that waiting jobs may start now."""
        self._all_waiting = True

    def note_failed_gate(self, uid: str, now: float) -> None:
        """Record that a gate could not be opened, so that it is tried again soon."""
        job = self._jobs.get(self._names.get(uid, ""))
        if job is not None and uid in job.gate_opened_at:
            job.gate_opened_at[uid] = now - _REOPEN_SECONDS + _RETRY_SECONDS

    def begin_leading(self, now: float) -> None:
        """Begin to lead. All calls to Advice are repeated, since the previous leader informed only its own Advice."""
        self._leading_since = now
        # Jobs that Advice knows and that have no pods have ended, unless pods appear soon.
        for name in self._advisor.known_jobs(KUBE):
            self._jobs.setdefault(name, _PodJobState(empty_since=now))
        for job in self._jobs.values():
            job.nodes, job.reported_at, job.admitted = [], None, False
            job.gate_opened_at.clear()
        self._dirty.update(self._jobs)
        self._queue.clear()

    # --- due actions -------------------------------------------------------------------------------------------------

    def collect_actions(self, now: float) -> PendingActions:
        """Inform Advice, and return the other pending actions."""
        found = PendingActions()
        self._mark_expired(now)
        if self._all_waiting:
            self._all_waiting = False
            self._dirty.update(name for name, job in self._jobs.items() if not job.nodes)
        if not self._queue:
            dirty, self._dirty = [name for name in self._dirty if name in self._jobs], set()
            self._queue.extend(sorted(dirty, key=lambda name: _processing_order(self._jobs[name])))
        names = [self._queue.popleft() for _ in range(min(MAX_JOBS_PER_PASS, len(self._queue)))]
        found.has_more = bool(self._queue or self._dirty)
        for name in names:
            if name not in self._jobs:
                continue
            try:
                self._process_job(name, self._jobs[name], found, now)
            except Exception as error:
                # An error must hold neither other jobs nor this one.
                log.error("job %s: internal error, its gates are opened", name, exc_info=error)
                if name in self._jobs:
                    self._open_gates(self._jobs[name], found, now)
                    self._next_pass.add(name)
        return found

    def drop_ended(self, now: float) -> None:
        """End jobs without pods while another replica leads; otherwise jobs that this Advice knows would keep slots."""
        for name, job in list(self._jobs.items()):
            if job.empty_since is not None and now - job.empty_since >= ENDED_SECONDS:
                del self._jobs[name]
                self._advisor.note_ended(name)

    def _mark_expired(self, now: float) -> None:
        """Mark jobs whose timers have expired."""
        if now - self._scanned_at < _SCAN_SECONDS:
            return
        self._scanned_at = now
        self._dirty |= self._next_pass
        self._next_pass.clear()
        for name, job in self._jobs.items():
            is_old = job.reported_at is not None and now - job.reported_at >= REPEAT_SECONDS
            has_ended = job.empty_since is not None and now - job.empty_since >= ENDED_SECONDS
            if is_old or has_ended or any(now - at >= _REOPEN_SECONDS for at in job.gate_opened_at.values()):
                self._dirty.add(name)

    def _process_job(self, name: str, job: _PodJobState, found: PendingActions, now: float) -> None:
        if job.empty_since is not None:
            if now - job.empty_since >= ENDED_SECONDS:
                del self._jobs[name]
                self._advisor.note_ended(name)
            return
        for member in job.members.values():
            if member.warnings:
                found.events.append(PodEvent(member.metadata, ANNOTATION, "; ".join(member.warnings), "Warning"))
        request = self._placement_request(job)
        if request is None or not self._must_wait(name, job, request, found, now):
            self._open_gates(job, found, now)

    def _placement_request(self, job: _PodJobState) -> PlacementRequest | None:
        """Return the request of the job's first pod with the known number of ranks; None if no pod names a dataset."""
        pod_jobs = [member.job for member in job.members.values() if member.job is not None]
        if not pod_jobs:
            return None
        # All pods without an annotated number of ranks give the same count: counting for each takes a second for 5,000
        # pods.
        unsaid = next((each for each in pod_jobs if not each.ranks), None)
        ranks = max(
            *(each.request.ranks for each in pod_jobs), self._gangs.known_ranks(unsaid) if unsaid is not None else 1
        )
        return msgspec.structs.replace(pod_jobs[0].request, ranks=ranks)

    def _must_wait(
        self, name: str, job: _PodJobState, request: PlacementRequest, found: PendingActions, now: float
    ) -> bool:
        """Inform Advice of the job. Returns whether its gates must stay closed."""
        nodes = self._gangs.bound_nodes(name) or [member.node for member in job.members.values() if member.node]
        if nodes:
            self._report_nodes(name, job, request, nodes, now)
            return False
        if job.nodes:  # all bound pods are gone, and their successors wait for a node
            self._report_nodes(name, job, request, job.nodes, now)
            return False
        if request.policy not in (PlacementPolicy.SUSPEND, PlacementPolicy.CLONE):
            return False
        if (
            request.policy == PlacementPolicy.SUSPEND
            and now - self._leading_since < SETTLE_SECONDS
            and self._advisor.rank(request, []).why
        ):
            # The daemons have not reported yet; with nothing known, every job would be admitted.
            self._next_pass.add(name)
            return True
        admission = self._advisor.admit(request)
        job.reported_at = now
        if request.policy != PlacementPolicy.SUSPEND:
            return False
        gated = [member for member in job.members.values() if member.gate >= 0]
        if not admission.go:
            position = f" (place {admission.place} in the queue)" if admission.place else ""
            found.events += [
                PodEvent(each.metadata, WAITING, f"waits for a copy of {request.dataset}: {admission.why}{position}")
                for each in gated
            ]
            return True
        if not job.admitted:
            job.admitted = True
            found.events += [PodEvent(each.metadata, ADMITTED, admission.why or "a copy has a slot") for each in gated]
        return False

    def _report_nodes(
        self, name: str, job: _PodJobState, request: PlacementRequest, nodes: list[str], now: float
    ) -> None:
        if not job.nodes or job.reported_at is None or now - job.reported_at >= REPEAT_SECONDS:
            self._advisor.note_placed(name, nodes, request)
        elif nodes != job.nodes:
            self._advisor.note_resized(name, nodes)
        else:
            return
        job.nodes, job.reported_at = nodes, now

    def _open_gates(self, job: _PodJobState, found: PendingActions, now: float) -> None:
        for uid, member in job.members.items():
            if member.gate >= 0 and now - job.gate_opened_at.get(uid, -_REOPEN_SECONDS) >= _REOPEN_SECONDS:
                job.gate_opened_at[uid] = now
                found.gates.append(OpenGate(member.metadata, member.gate))


def _identifying_fields(metadata: ObjectMetadata) -> ObjectMetadata:
    """Return only the fields that name the pod; there may be 100,000 pods."""
    return ObjectMetadata(
        metadata.name, metadata.namespace, metadata.uid, metadata.resource_version, created=metadata.created
    )


def _processing_order(job: _PodJobState) -> tuple[int, str]:
    """Return the order of jobs: placed jobs first, then admitted ones, then by age."""
    members = job.members.values()
    is_placed, is_let_in = any(member.node for member in members), any(member.gate < 0 for member in members)
    return 0 if is_placed else 1 if is_let_in else 2, min(
        (member.metadata.created or "" for member in members), default=""
    )
