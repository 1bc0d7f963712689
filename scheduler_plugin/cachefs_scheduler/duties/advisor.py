"""The core of the service: implements `cachefs_scheduler.advisor_interface.AdvisorInterface`."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import numpy as np

from cachefs.errors import NotFound
from cachefs.planning.scheduling.assignment import assign_ranks
from cachefs.planning.scheduling.copies import plan_clone
from cachefs.planning.scheduling.estimates import estimates, score_nodes
from cachefs.planning.scheduling.explanation import explain_ranking
from cachefs.planning.scheduling.facts import MAX_RANKS, Estimate, JobRequest
from cachefs.scheduling_messages import (
    Assignment,
    JobAdmission,
    JobAdmissions,
    JobExplanation,
    NodeEstimate,
    PlacementPolicy,
    PlacementRequest,
    Ranking,
)
from cachefs_scheduler.advisor_interface import Unsubscribe
from cachefs_scheduler.duties.admission_queue import AdmissionQueue
from cachefs_scheduler.duties.data_placement import DataMoves, DataPlacement, PrefetchRequest
from cachefs_scheduler.duties.job_table import AdmissionState, JobTable, KnownJob
from cachefs_scheduler.duties.node_warmups import NodeWarmups
from cachefs_scheduler.duties.policies import Policies
from cachefs_scheduler.duties.snapshot_reads import SnapshotReads
from cachefs_scheduler.view.reported_cluster import MIN_RATE, ReportedCluster, dataset_name

log = logging.getLogger(__name__)

# Rows in the table of an explanation.
_MAX_ROWS: Final = 10
# Seconds within which an admitted job must start; afterwards its slot is free for another job too. Otherwise a job that
# fits no node would block all others.
START_SECONDS: Final = 1800.0
# Seconds after which a node counts as silent, and after which jobs that it may still run no longer count.
_SILENT_SECONDS: Final = 60.0
_LOST_SECONDS: Final = 86400.0
# The queue is evaluated at most this share of the time, unless one evaluation takes less than _SHORT_SECONDS.
_MAX_TIME_SHARE: Final = 0.2
_SHORT_SECONDS: Final = 0.01


class Advisor:
    """Implements `AdvisorInterface`. Used on the event loop."""

    def __init__(
        self, view: ReportedCluster, jobs: JobTable, policies: Policies, warmups: NodeWarmups, enough: float
    ) -> None:
        """enough: the share of a snapshot that counts as a copy."""
        self.jobs = jobs
        self.policies = policies
        self.version = 1  # of the admissions; grows with each change
        self._view = view
        self._warmups = warmups
        self.reads = SnapshotReads(view, jobs)
        self.placement = DataPlacement(view, warmups, policies, self.reads)
        self.moves = DataMoves(view, jobs, self.placement, policies)
        self.queue = AdmissionQueue(view, jobs, self._jobs_per_copy, self._copies_in_progress, enough)
        self._listeners: list[Callable[[], None]] = []
        self._unsaved = False
        self._next_evaluation = 0.0

    # --- placement ---------------------------------------------------------------------------------------------------

    def rank(self, request: PlacementRequest, candidates: Sequence[str] | None = None) -> Ranking:
        names = self._candidates(candidates)
        job = self._job_request(request)
        if job is None:
            return Ranking(why=self._why_unknown(request))
        found = score_nodes(job, names, self._view.cluster)
        ages = [self._view.report_age(name) for name in self._view.cluster.holders(job.snapshot)]
        ranking = dict(zip(names, np.clip(found, 0.0, 1.0).tolist(), strict=True))
        refused = self._refused_nodes(request, job, names) if request.policy == PlacementPolicy.REQUIRE else {}
        return Ranking(scores=ranking, refused=refused, age=max(ages, default=0.0))

    def assign(
        self, request: PlacementRequest, candidates: Sequence[str] | None = None, taken: Mapping[int, str] | None = None
    ) -> Assignment:
        job = self._job_request(request)
        if job is None:
            return Assignment(why=self._why_unknown(request))
        return Assignment(
            nodes=list(assign_ranks(job, self._candidates(candidates), self._view.cluster, placed_ranks=taken))
        )

    def estimate_waits(self, request: PlacementRequest, nodes: Sequence[str]) -> list[NodeEstimate]:
        job = self._job_request(request)
        if job is None or not nodes:
            return []
        found = estimates(job, nodes, self._view.cluster)
        scores = score_nodes(job, nodes, self._view.cluster).tolist()
        return [self._node_estimate(name, scores[index], found.estimate_of(index)) for index, name in enumerate(nodes)]

    def _candidates(self, candidates: Sequence[str] | None) -> list[str]:
        self._view.advance_clock()
        return list(dict.fromkeys(candidates)) if candidates is not None else sorted(self._view.cluster)

    def _job_request(self, request: PlacementRequest) -> JobRequest | None:
        snapshot = self._view.datasets.resolve(request.dataset)
        if snapshot is None:
            return None
        rate = request.rate if request.rate >= MIN_RATE else self._view.average_rank_rate(snapshot)
        return JobRequest(request.job, snapshot, min(request.ranks, MAX_RANKS), rate, request.epochs)

    def _why_unknown(self, request: PlacementRequest) -> str:
        name = dataset_name(request.dataset)
        if not self._view.datasets.dataset_names():
            return "no daemon with a dataset has reported yet; the scheduler decides without hints"
        if self._view.datasets.resolve(name) is None:
            return f"no node knows a dataset {name}; `cachectl dataset list` shows those of a node"
        return f"{request.dataset}: {name} has no such snapshot on any node now"

    def _refused_nodes(self, request: PlacementRequest, job: JobRequest, names: Sequence[str]) -> dict[str, str]:
        holders = self._view.cluster.holders(job.snapshot)
        rows = self._view.cluster.rows(names)
        # Nodes that are draining or have been silent for long do not make other nodes ineligible.
        usable = (self._view.cluster.are_up(rows) & (self._view.cluster.trust(rows) > 0)).tolist()
        having = {
            name for name, can in zip(names, usable, strict=True) if can and name in holders and holders[name].bytes
        }
        if not having:
            return {}
        why = f"the node holds no block of {request.dataset}, and {len(having)} other nodes hold some (policy require)"
        return {name: why for name in names if name not in having}

    def _node_estimate(self, name: str, score: float, found: Estimate) -> NodeEstimate:
        node = self._view.nodes.get(name)
        return NodeEstimate(
            node=name,
            score=float(score),
            first=found.first,
            later=found.later,
            local=found.local,
            zone=found.zone,
            elsewhere=found.region + found.elsewhere,
            origin=found.origin,
            age=self._view.report_age(name) if node is not None and node.reported_at is not None else -1.0,
            state=node.state if node is not None else "unknown",
        )

    # --- admission ---------------------------------------------------------------------------------------------------

    def admit(self, request: PlacementRequest) -> JobAdmission:
        now = self._view.advance_clock()
        known = self._remember_job(request, now)
        if known is None:
            return JobAdmission(job=request.job, go=True, why="the queue is full, so the job starts without waiting")
        if known.state in (AdmissionState.PLACED, AdmissionState.ADMITTED) or not known.snapshot:
            why = known.why if known.snapshot else self._why_unknown(request)
            return JobAdmission(job=request.job, go=True, why=why, targets=list(known.targets))
        if request.policy == PlacementPolicy.SUSPEND:
            if known.state == AdmissionState.ASKED:
                # Other waiting jobs are notified by the next evaluation of the queue: now, if there is time for it.
                known.state, known.why = (
                    AdmissionState.WAITING,
                    "the queue has not been evaluated since the job arrived",
                )
                self._unsaved = True
                self.version += 1
                if self._can_evaluate():
                    self.evaluate_queue()
        else:
            if request.policy == PlacementPolicy.CLONE:
                known.targets = self._begin_copy(known) or known.targets
            known.state, known.admitted_at, known.why = (
                AdmissionState.ADMITTED,
                now,
                f"policy {request.policy} lets it start at once",
            )
            self._notify_listeners()
        return _admission(known)

    def pending_admissions(self) -> JobAdmissions:
        waiting = [job for job in self.jobs if job.state in (AdmissionState.WAITING, AdmissionState.ADMITTED)]
        return JobAdmissions(version=self.version, jobs=[_admission(one) for one in waiting])

    def evaluate_queue(self) -> None:
        """Admit waiting jobs for which a slot has become free."""
        begun = time.thread_time()
        started = self.queue.admit_waiting(self._view.advance_clock())
        took = time.thread_time() - begun
        self._next_evaluation = time.monotonic() + (took / _MAX_TIME_SHARE if took > _SHORT_SECONDS else 0.0)
        for one in started:
            log.info("job %s may start: %s", one.request.job, one.why)
        if started:
            self._notify_listeners()

    def _can_evaluate(self) -> bool:
        """Return whether the queue may be evaluated now. When a thousand jobs arrive at once, the service evaluates all
        of them together shortly after."""
        return time.monotonic() >= self._next_evaluation

    def _remember_job(self, request: PlacementRequest, now: float) -> KnownJob | None:
        snapshot = self._view.datasets.resolve(request.dataset) or ""
        known = self.jobs.get(request.job)
        if known is None:
            known = KnownJob(request, snapshot, now, now)
            if not self.jobs.add_job(known):
                return None
            self._unsaved = True
        known.mentioned_at = now
        if known.state in (AdmissionState.ASKED, AdmissionState.WAITING):
            known.request, known.snapshot = request, snapshot or known.snapshot
        return known

    def _jobs_per_copy(self, job: KnownJob) -> int:
        return (
            job.request.max_jobs_per_copy
            or self.policies.effective_policy(dataset_name(job.request.dataset)).max_jobs_per_copy
        )

    def _copies_in_progress(self, snapshot: str) -> int:
        jobs = {warmup.job for warmup in self._warmups if warmup.snapshot == snapshot and warmup.purpose == "clone"}
        return len(jobs & {warmup.job for warmup in self._warmups if not warmup.is_over})

    def _begin_copy(self, known: KnownJob) -> tuple[str, ...]:
        """Begin another copy if all copies are busy, and return its nodes."""
        free = self.queue.copy_slots(known)
        if free.free:
            return free.nodes[:16]
        most = self.policies.effective_policy(dataset_name(known.request.dataset)).max_copies
        if len(free.copies) + self._copies_in_progress(known.snapshot) >= most:
            known.why = f"there are {most} copies already, which is all that may be (max_copies)"
            return ()
        nodes = self.nodes_for_another_copy(
            known.request.job, known.snapshot, {node for copy in free.copies for node in copy.nodes}
        )
        if nodes:
            self.placement.prefetch(
                PrefetchRequest(known.request.dataset, known.snapshot, nodes, "clone", known.request.job)
            )
            log.info(
                "another copy of %s is made on %s for %s", known.request.dataset, ", ".join(nodes), known.request.job
            )
        return nodes

    def nodes_for_another_copy(self, job: str, snapshot: str, taken: Collection[str]) -> tuple[str, ...]:
        """Return the nodes, outside of *taken*, where another copy can be made soonest; empty if no node has room."""
        making = {warmup.node for warmup in self._warmups if warmup.snapshot == snapshot and not warmup.is_over}
        candidates = [name for name in self._view.cluster if name not in taken and name not in making]
        target = plan_clone(JobRequest(job, snapshot), candidates, self._view.cluster)
        return target.nodes if target is not None else ()

    # --- events of jobs ----------------------------------------------------------------------------------------------

    def note_placed(self, job: str, nodes: Sequence[str], request: PlacementRequest | None = None) -> None:
        now = self._view.advance_clock()
        known = self.jobs.get(job)
        is_late = known is None
        if known is None and request is not None:
            known = self._remember_job(request, now)
        if known is None:
            return
        known.mentioned_at = now
        if not known.snapshot:
            known.snapshot = self._view.datasets.resolve(known.request.dataset) or ""
        chosen = tuple(dict.fromkeys(nodes))
        if known.state == AdmissionState.PLACED and chosen == known.nodes:
            return
        known.state, known.nodes, known.queue_position = AdmissionState.PLACED, chosen, 0
        known.placement = int(time.time())
        # After a restart or a change of leader, the service hears of jobs that already run.
        runs = is_late and not self._view.cluster.jobs_on(known.snapshot).keys().isdisjoint(chosen)
        if known.snapshot and not runs and self.policies.effective_policy(dataset_name(known.request.dataset)).preload:
            self.placement.prefetch(
                PrefetchRequest(known.request.dataset, known.snapshot, chosen, "preload", job, known.placement)
            )
        self._notify_listeners()

    def note_resized(self, job: str, nodes: Sequence[str]) -> None:
        known = self.jobs.get(job)
        if known is None:
            return
        before, after = known.nodes, tuple(dict.fromkeys(nodes))
        if before == after:
            known.mentioned_at = self._view.advance_clock()
            return
        if not before:
            self.note_placed(job, nodes)
            return
        known.mentioned_at, known.nodes, known.state = self._view.advance_clock(), after, AdmissionState.PLACED
        known.placement = int(time.time())
        log.info("job %s has moved: %s -> %s", job, ", ".join(before), ", ".join(after))
        self.moves.begin_move(known, [node for node in before if node not in after])
        self._notify_listeners()

    def note_ended(self, job: str) -> None:
        if self._remove_job(job):
            self._notify_listeners()
            # When a thousand jobs end at once, the service evaluates the queue shortly after (see `service`).
            if self._can_evaluate():
                self.evaluate_queue()

    def _remove_job(self, job: str) -> bool:
        if self.jobs.remove(job) is None:
            return False
        self._warmups.stop_warmups(job)
        self.moves.forget_job(job)
        return True

    def known_jobs(self, prefix: str) -> list[str]:
        return [job.request.job for job in self.jobs if job.request.job.startswith(prefix)]

    def forget_lapsed(self) -> None:
        """Forget jobs without news for too long, and free slots of admitted jobs that did not start. Call
        periodically."""
        now = self._view.advance_clock()
        for one in self.jobs:
            if one.state == AdmissionState.ADMITTED and not one.late and now - (one.admitted_at or now) > START_SECONDS:
                one.late = True
                log.info(
                    "job %s has not started for %.0f s: its slot is free for the next one",
                    one.request.job,
                    START_SECONDS,
                )
        forgotten = [
            one
            for one in self.jobs.lapsed_jobs(now)
            if one.state != AdmissionState.PLACED or not self._may_still_run(one)
        ]
        for one in forgotten:
            self._remove_job(one.request.job)
        if forgotten:
            names = ", ".join(one.request.job for one in forgotten[:_MAX_ROWS]) + (
                ", ..." if len(forgotten) > _MAX_ROWS else ""
            )
            log.warning("forgot %d jobs that no scheduler has mentioned for too long: %s", len(forgotten), names)
            self._notify_listeners()
            self.evaluate_queue()

    def _may_still_run(self, known: KnownJob) -> bool:
        """Return whether a daemon reports the job as running, or a node that may run it has been silent for less than a
        day. Without that bound, nodes that are lost for good would hold slots forever."""
        facts = [self._view.cluster.current_facts(node) for node in known.nodes]
        return any(
            one.jobs.get(known.snapshot) or _SILENT_SECONDS < one.age < _LOST_SECONDS
            for one in facts
            if one is not None
        )

    # --- explanations ------------------------------------------------------------------------------------------------

    def explain(self, job: str) -> JobExplanation:
        known = self.jobs.get(job)
        if known is None:
            raise NotFound(f"no scheduler has reported a job {job!r}; `cachectl sched queue` lists the known jobs")
        request = self._job_request(known.request)
        if request is None:
            return JobExplanation(
                job=job, dataset=known.request.dataset, policy=known.request.policy, state=known.state,
                text=[self._why_unknown(known.request)], placed=list(known.nodes),
            )  # fmt: skip
        found = explain_ranking(request, self._candidates(None), self._view.cluster, known.nodes, _MAX_ROWS)
        size = self._view.cluster.snapshot_facts(request.snapshot)
        return JobExplanation(
            job=job,
            dataset=known.request.dataset,
            policy=known.request.policy,
            bytes=size.bytes if size is not None else 0,
            state=known.state,
            text=[*found.text, *([f"{known.why[0].upper()}{known.why[1:]}."] if known.why else [])],
            nodes=[self._node_estimate(row.node, row.score, row.estimate) for row in found.rows],
            placed=list(known.nodes),
        )

    # --- listeners ---------------------------------------------------------------------------------------------------

    def subscribe(self, on_change: Callable[[], None]) -> Unsubscribe:
        self._listeners.append(on_change)
        return lambda: self._listeners.remove(on_change)

    def pop_unsaved(self) -> bool:
        """Return whether persistent state has changed since the last call."""
        unsaved, self._unsaved = self._unsaved, False
        return unsaved

    def mark_unsaved(self) -> None:
        """Record that other persistent state has changed."""
        self._unsaved = True

    def _notify_listeners(self) -> None:
        self.version += 1
        self._unsaved = True
        for listener in list(self._listeners):
            listener()


def _admission(known: KnownJob) -> JobAdmission:
    return JobAdmission(
        job=known.request.job,
        go=known.state != AdmissionState.WAITING,
        why=known.why,
        place=known.queue_position,
        targets=list(known.targets),
    )
