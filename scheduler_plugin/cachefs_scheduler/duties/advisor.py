"""The core of the service: implements `cachefs_scheduler.advice.Advice`."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import numpy as np

from cachefs.errors import NotFound
from cachefs.planning.scheduling.assignment import assign
from cachefs.planning.scheduling.clones import clone_target
from cachefs.planning.scheduling.estimates import estimates
from cachefs.planning.scheduling.facts import MOST_RANKS, Estimate, JobAsk
from cachefs.planning.scheduling.scores import scores
from cachefs.planning.scheduling.words import explain
from cachefs.scheduling_messages import (
    Admission,
    Admissions,
    Ask,
    Assignment,
    Explanation,
    NodeEstimate,
    Policy,
    Ranking,
)
from cachefs_scheduler.advice import Unsubscribe
from cachefs_scheduler.duties.book import Book, JobState, KnownJob
from cachefs_scheduler.duties.moves import Moves
from cachefs_scheduler.duties.placement import Placement, Wanted
from cachefs_scheduler.duties.policies import Policies
from cachefs_scheduler.duties.reads import Reads
from cachefs_scheduler.duties.turns_of_jobs import Turns
from cachefs_scheduler.duties.warming import Warmings
from cachefs_scheduler.view.cluster_view import LEAST_RATE, ClusterView
from cachefs_scheduler.view.dataset_names import dataset_of

log = logging.getLogger(__name__)

# Rows in the table of an explanation.
_SHOWN: Final = 10
# Seconds within which an admitted job must start; afterwards its slot is free for another job too. Otherwise a job that
# fits no node would block all others.
START_WITHIN: Final = 1800.0
# Seconds after which a node counts as silent, and after which jobs that it may still run no longer count.
_SILENT: Final = 60.0
_LOST: Final = 86400.0
# The queue is evaluated at most this share of the time, unless one evaluation takes less than _SHORT seconds.
_SHARE: Final = 0.2
_SHORT: Final = 0.01


class Advisor:
    """Implements `Advice`. Used on the event loop."""

    def __init__(self, view: ClusterView, book: Book, policies: Policies, warmings: Warmings, enough: float) -> None:
        """enough: the share of a snapshot that counts as a copy."""
        self.book = book
        self.policies = policies
        self.version = 1  # of the admissions; grows with each change
        self._view = view
        self._warmings = warmings
        self.reads = Reads(view, book)
        self.placement = Placement(view, warmings, policies, self.reads)
        self.moves = Moves(view, book, self.placement, policies)
        self.turns = Turns(view, book, self._limit, self._making, enough)
        self._listeners: list[Callable[[], None]] = []
        self._unsaved = False
        self._next_look = 0.0

    # --- placement ---------------------------------------------------------------------------------------------------

    def rank(self, ask: Ask, candidates: Sequence[str] | None = None) -> Ranking:
        names = self._candidates(candidates)
        job = self._job_ask(ask)
        if job is None:
            return Ranking(why=self._unknown(ask))
        found = scores(job, names, self._view.cluster)
        ages = [self._view.age(name) for name in self._view.cluster.holders(job.snapshot)]
        ranking = dict(zip(names, np.clip(found, 0.0, 1.0).tolist(), strict=True))
        refused = self._refused(ask, job, names) if ask.policy == Policy.REQUIRE else {}
        return Ranking(scores=ranking, refused=refused, age=max(ages, default=0.0))

    def assign(
        self, ask: Ask, candidates: Sequence[str] | None = None, taken: Mapping[int, str] | None = None
    ) -> Assignment:
        job = self._job_ask(ask)
        if job is None:
            return Assignment(why=self._unknown(ask))
        return Assignment(nodes=list(assign(job, self._candidates(candidates), self._view.cluster, taken=taken)))

    def estimates(self, ask: Ask, nodes: Sequence[str]) -> list[NodeEstimate]:
        job = self._job_ask(ask)
        if job is None or not nodes:
            return []
        found = estimates(job, nodes, self._view.cluster)
        given = scores(job, nodes, self._view.cluster).tolist()
        return [self._shown(name, given[place], found.one(place)) for place, name in enumerate(nodes)]

    def _candidates(self, candidates: Sequence[str] | None) -> list[str]:
        self._view.now()
        return list(dict.fromkeys(candidates)) if candidates is not None else sorted(self._view.cluster)

    def _job_ask(self, ask: Ask) -> JobAsk | None:
        snapshot = self._view.datasets.snapshot(ask.dataset)
        if snapshot is None:
            return None
        rate = ask.rate if ask.rate >= LEAST_RATE else self._view.rate(snapshot)
        return JobAsk(ask.job, snapshot, min(ask.ranks, MOST_RANKS), rate, ask.epochs)

    def _unknown(self, ask: Ask) -> str:
        name = dataset_of(ask.dataset)
        if not self._view.datasets.names():
            return "no daemon has been heard yet, or none has a dataset; the scheduler decides without hints"
        if self._view.datasets.snapshot(name) is None:
            return f"no node knows a dataset {name}; `cachectl dataset list` shows those of a node"
        return f"{ask.dataset}: {name} has no such snapshot on any node now"

    def _refused(self, ask: Ask, job: JobAsk, names: Sequence[str]) -> dict[str, str]:
        holders = self._view.cluster.holders(job.snapshot)
        rows = self._view.cluster.rows(names)
        # Nodes that are draining or have been silent for long do not make other nodes ineligible.
        usable = (self._view.cluster.up(rows) & (self._view.cluster.trust(rows) > 0)).tolist()
        having = {
            name for name, can in zip(names, usable, strict=True) if can and name in holders and holders[name].bytes
        }
        if not having:
            return {}
        why = f"it holds nothing of {ask.dataset}, and {len(having)} other nodes do (policy require)"
        return {name: why for name in names if name not in having}

    def _shown(self, name: str, score: float, found: Estimate) -> NodeEstimate:
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
            age=self._view.age(name) if node is not None and node.heard is not None else -1.0,
            state=node.state if node is not None else "unknown",
        )

    # --- admission ---------------------------------------------------------------------------------------------------

    def admit(self, ask: Ask) -> Admission:
        now = self._view.now()
        known = self._remember(ask, now)
        if known is None:
            return Admission(job=ask.job, go=True, why="too many jobs wait already for this one to be put in the queue")
        if known.state in (JobState.PLACED, JobState.ADMITTED) or not known.snapshot:
            why = known.why if known.snapshot else self._unknown(ask)
            return Admission(job=ask.job, go=True, why=why, targets=list(known.targets))
        if ask.policy == Policy.SUSPEND:
            if known.state == JobState.ASKED:
                # Other waiting jobs are notified by the next evaluation of the queue: now, if there is time for it.
                known.state, known.why = JobState.WAITING, "it is looked at in a moment"
                self._unsaved = True
                self.version += 1
                if self._may_look():
                    self.settle()
        else:
            if ask.policy == Policy.CLONE:
                known.targets = self._clone(known) or known.targets
            known.state, known.admitted, known.why = (
                JobState.ADMITTED,
                now,
                f"policy {ask.policy} lets it start at once",
            )
            self._changed()
        return _admission(known)

    def admissions(self) -> Admissions:
        waiting = [one for one in self.book if one.state in (JobState.WAITING, JobState.ADMITTED)]
        return Admissions(version=self.version, jobs=[_admission(one) for one in waiting])

    def settle(self) -> None:
        """Admit waiting jobs for which a slot has become free."""
        begun = time.thread_time()
        started = self.turns.give_out(self._view.now())
        took = time.thread_time() - begun
        self._next_look = time.monotonic() + (took / _SHARE if took > _SHORT else 0.0)
        for one in started:
            log.info("job %s may start: %s", one.ask.job, one.why)
        if started:
            self._changed()

    def _may_look(self) -> bool:
        """Return whether the queue may be evaluated now. When a thousand jobs arrive at once, the service evaluates all
        of them together shortly after."""
        return time.monotonic() >= self._next_look

    def _remember(self, ask: Ask, now: float) -> KnownJob | None:
        snapshot = self._view.datasets.snapshot(ask.dataset) or ""
        known = self.book.get(ask.job)
        if known is None:
            known = KnownJob(ask, snapshot, now, now)
            if not self.book.put(known):
                return None
            self._unsaved = True
        known.touched = now
        if known.state in (JobState.ASKED, JobState.WAITING):
            known.ask, known.snapshot = ask, snapshot or known.snapshot
        return known

    def _limit(self, job: KnownJob) -> int:
        return job.ask.max_jobs_per_copy or self.policies.of(dataset_of(job.ask.dataset)).max_jobs_per_copy

    def _making(self, snapshot: str) -> int:
        jobs = {one.job for one in self._warmings if one.snapshot == snapshot and one.purpose == "clone"}
        return len(jobs & {one.job for one in self._warmings if not one.is_over})

    def _clone(self, known: KnownJob) -> tuple[str, ...]:
        """Begin another copy if all copies are busy, and return its nodes."""
        free = self.turns.slots(known)
        if free.free:
            return free.nodes[:16]
        most = self.policies.of(dataset_of(known.ask.dataset)).max_copies
        if len(free.copies) + self._making(known.snapshot) >= most:
            known.why = f"there are {most} copies already, which is all that may be (max_copies)"
            return ()
        nodes = self.another_copy(known.ask.job, known.snapshot, {node for copy in free.copies for node in copy.nodes})
        if nodes:
            self.placement.bring(Wanted(known.ask.dataset, known.snapshot, nodes, "clone", known.ask.job))
            log.info("another copy of %s is made on %s for %s", known.ask.dataset, ", ".join(nodes), known.ask.job)
        return nodes

    def another_copy(self, job: str, snapshot: str, taken: Collection[str]) -> tuple[str, ...]:
        """Return the nodes, outside of *taken*, where another copy can be made soonest; empty if no node has room."""
        making = {one.node for one in self._warmings if one.snapshot == snapshot and not one.is_over}
        candidates = [name for name in self._view.cluster if name not in taken and name not in making]
        target = clone_target(JobAsk(job, snapshot), candidates, self._view.cluster)
        return target.nodes if target is not None else ()

    # --- events of jobs ----------------------------------------------------------------------------------------------

    def placed(self, job: str, nodes: Sequence[str], ask: Ask | None = None) -> None:
        now = self._view.now()
        known = self.book.get(job)
        is_late = known is None
        if known is None and ask is not None:
            known = self._remember(ask, now)
        if known is None:
            return
        known.touched = now
        if not known.snapshot:
            known.snapshot = self._view.datasets.snapshot(known.ask.dataset) or ""
        chosen = tuple(dict.fromkeys(nodes))
        if known.state == JobState.PLACED and chosen == known.nodes:
            return
        known.state, known.nodes, known.place = JobState.PLACED, chosen, 0
        known.placement = int(time.time())
        # After a restart or a change of leader, the service hears of jobs that already run.
        runs = is_late and not self._view.cluster.jobs_on(known.snapshot).keys().isdisjoint(chosen)
        if known.snapshot and not runs and self.policies.of(dataset_of(known.ask.dataset)).preload:
            self.placement.bring(Wanted(known.ask.dataset, known.snapshot, chosen, "preload", job, known.placement))
        self._changed()

    def resized(self, job: str, nodes: Sequence[str]) -> None:
        known = self.book.get(job)
        if known is None:
            return
        before, after = known.nodes, tuple(dict.fromkeys(nodes))
        if before == after:
            known.touched = self._view.now()
            return
        if not before:
            self.placed(job, nodes)
            return
        known.touched, known.nodes, known.state = self._view.now(), after, JobState.PLACED
        known.placement = int(time.time())
        log.info("job %s has moved: %s -> %s", job, ", ".join(before), ", ".join(after))
        self.moves.begin(known, [node for node in before if node not in after])
        self._changed()

    def ended(self, job: str) -> None:
        if self._remove(job):
            self._changed()
            # When a thousand jobs end at once, the service evaluates the queue shortly after (see `service`).
            if self._may_look():
                self.settle()

    def _remove(self, job: str) -> bool:
        if self.book.remove(job) is None:
            return False
        self._warmings.stop(job)
        self.moves.forget(job)
        return True

    def known(self, prefix: str) -> list[str]:
        return [one.ask.job for one in self.book if one.ask.job.startswith(prefix)]

    def forget_lapsed(self) -> None:
        """Forget jobs without news for too long, and free slots of admitted jobs that did not start. Call
        periodically."""
        now = self._view.now()
        for one in self.book:
            if one.state == JobState.ADMITTED and not one.late and now - (one.admitted or now) > START_WITHIN:
                one.late = True
                log.info(
                    "job %s has not started for %.0f s: its slot is free for the next one", one.ask.job, START_WITHIN
                )
        forgotten = [one for one in self.book.lapsed(now) if one.state != JobState.PLACED or not self._is_seen(one)]
        for one in forgotten:
            self._remove(one.ask.job)
        if forgotten:
            names = ", ".join(one.ask.job for one in forgotten[:_SHOWN]) + (", ..." if len(forgotten) > _SHOWN else "")
            log.warning(
                "forgotten, as no scheduler has spoken of them for too long: %d jobs: %s", len(forgotten), names
            )
            self._changed()
            self.settle()

    def _is_seen(self, known: KnownJob) -> bool:
        """Return whether a daemon reports the job as running, or a node that may run it has been silent for less than a
        day. Without that bound, nodes that are lost for good would hold slots forever."""
        facts = [self._view.cluster.facts(node) for node in known.nodes]
        return any(one.jobs.get(known.snapshot) or _SILENT < one.age < _LOST for one in facts if one is not None)

    # --- explanations ------------------------------------------------------------------------------------------------

    def explain(self, job: str) -> Explanation:
        known = self.book.get(job)
        if known is None:
            raise NotFound(f"no scheduler has told of a job {job!r}; `cachectl sched queue` lists those that are known")
        ask = self._job_ask(known.ask)
        if ask is None:
            return Explanation(
                job=job, dataset=known.ask.dataset, policy=known.ask.policy, state=known.state,
                text=[self._unknown(known.ask)], placed=list(known.nodes),
            )  # fmt: skip
        found = explain(ask, self._candidates(None), self._view.cluster, known.nodes, _SHOWN)
        size = self._view.cluster.snapshot(ask.snapshot)
        return Explanation(
            job=job,
            dataset=known.ask.dataset,
            policy=known.ask.policy,
            bytes=size.bytes if size is not None else 0,
            state=known.state,
            text=[*found.text, *([f"{known.why[0].upper()}{known.why[1:]}."] if known.why else [])],
            nodes=[self._shown(row.node, row.score, row.estimate) for row in found.rows],
            placed=list(known.nodes),
        )

    # --- listeners ---------------------------------------------------------------------------------------------------

    def subscribe(self, changed: Callable[[], None]) -> Unsubscribe:
        self._listeners.append(changed)
        return lambda: self._listeners.remove(changed)

    def take_unsaved(self) -> bool:
        """Return whether persistent state has changed since the last call."""
        unsaved, self._unsaved = self._unsaved, False
        return unsaved

    def changed(self) -> None:
        """Record that other persistent state has changed."""
        self._unsaved = True

    def _changed(self) -> None:
        self.version += 1
        self._unsaved = True
        for listener in list(self._listeners):
            listener()


def _admission(known: KnownJob) -> Admission:
    return Admission(
        job=known.ask.job,
        go=known.state != JobState.WAITING,
        why=known.why,
        place=known.place,
        targets=list(known.targets),
    )
