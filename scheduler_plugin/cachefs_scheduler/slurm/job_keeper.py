"""Follows jobs that read datasets: reports their nodes to the service, and starts jobs that waited for a slot.

`ReportedJobs` tracks which jobs the service knows, and `waiting_changes` decides how jobs with the policy `suspend`
wait. Both do no I/O; times are arguments. A job waits by its begin time, which is postponed repeatedly. If postponing
stops (this program has ended, the service does not answer), the begin time passes and the job starts: cachefs cannot
block a job. With `wait = "hold"`, jobs are held instead until they are released.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.errors import CachefsError
from cachefs.scheduling_messages import PlacementPolicy, PlacementReport
from cachefs_scheduler.slurm.config import SlurmSection
from cachefs_scheduler.slurm.job_records import SlurmJob, job_prefix, released_comment, single_tasks
from cachefs_scheduler.slurm.problem_log import ProblemLog
from cachefs_scheduler.slurm.service_client import CallRefused, ServiceClient
from cachefs_scheduler.slurm.slurm_commands import SlurmCommands

# Seconds after which a running job is reported again, since a restarted service may have lost it.
REPEAT_SECONDS: Final = 180.0
# Most jobs that are reported; the first ones.
MAX_JOBS: Final = 20_000
# Tasks of one array that are asked for at a time.
MAX_TASKS: Final = 16
# A begin time later than any that this program sets is the user's.
_SLACK: Final = 5.0
_log = logging.getLogger(__name__)
# Calls of the service per pass; the rest follows in the next one.
_MAX_CALLS: Final = 1000
# Jobs in one call of scontrol.
_MAX_IDS: Final = 200
# Seconds before the next long poll if the service does not answer.
_RETRY_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class JobChanges:
    """Changes that the service does not know yet."""

    placed: Sequence[SlurmJob]
    resized: Sequence[SlurmJob]
    ended: Sequence[str]


@dataclass(slots=True)
class _ReportedJob:
    nodes: tuple[str, ...] = ()
    at: float = 0.0


@dataclass
class ReportedJobs:
    """The jobs that the service knows."""

    _reported: dict[str, _ReportedJob] = field(default_factory=dict)

    def unreported_changes(self, jobs: Iterable[SlurmJob], now: float) -> JobChanges:
        """Compare all of Slurm's jobs with the jobs that the service knows."""
        placed: list[SlurmJob] = []
        resized: list[SlurmJob] = []
        alive: set[str] = set()
        for job in jobs:
            if job.waiting:
                alive.update(task.name for task in single_tasks(job, MAX_TASKS))
            elif job.nodes and len(alive) < MAX_JOBS:
                alive.add(job.name)
                known = self._reported.get(job.name)
                if known is None or not known.nodes or now - known.at >= REPEAT_SECONDS:
                    placed.append(job)
                elif known.nodes != job.nodes:
                    resized.append(job)
        return JobChanges(placed, resized, [name for name in self._reported if name not in alive])

    def note_known(self, name: str) -> None:
        """Record a job that the service knows, from a request or from an earlier run of this program."""
        if len(self._reported) < MAX_JOBS:
            self._reported.setdefault(name, _ReportedJob())

    def note_placed(self, job: SlurmJob, now: float) -> None:
        """Record that the service knows the job's nodes."""
        self._reported[job.name] = _ReportedJob(job.nodes, now)

    def note_ended(self, name: str) -> None:
        """Record that the service knows of the job's end."""
        self._reported.pop(name, None)


@dataclass(frozen=True, slots=True)
class WaitingChanges:
    """Changes to jobs, by scontrol's names."""

    # Jobs that may start now.
    start: Sequence[str]
    # Jobs that may start after this many seconds, as their users requested.
    later: Sequence[tuple[str, int]]
    # Jobs held by cachefs that may start.
    release: Sequence[SlurmJob]
    # Jobs that keep waiting.
    put_off: Sequence[str]


def waiting_changes(
    jobs: Iterable[SlurmJob], may_start: Mapping[str, bool], now: float, wait_for: float
) -> WaitingChanges:
    """Return the changes that are due.

    may_start: the service's answers by job name; jobs without a recent answer are absent. now: Unix seconds.
    """
    start: list[str] = []
    later: list[tuple[str, int]] = []
    release: list[SlurmJob] = []
    put_off: list[str] = []
    for job in jobs:
        if not job.waiting or not job.tag.can_wait:
            continue
        refused = False
        for task in single_tasks(job, MAX_TASKS):
            go = may_start.get(task.name)
            refused |= go is False
            if not go:
                continue
            if job.held and job.tag.held:
                release.append(task)
            elif job.tag.begin > now + 1:
                if abs(job.eligible - job.tag.begin) > 1:
                    later.append((task.id, round(job.tag.begin - now)))
            elif not job.held and now + 1 < job.eligible <= now + wait_for + _SLACK:
                start.append(task.id)
        if refused and not job.held and job.eligible - now < wait_for / 2:
            put_off.append(f"{job.id}_[{job.tasks}]" if job.tasks else job.id)
    return WaitingChanges(start, later, release, put_off)


def is_due(job: SlurmJob, now: float, wait_for: float) -> bool:
    """Return whether to ask for the job now: not if its user wants it to begin much later."""
    return job.waiting and job.eligible <= now + wait_for + _SLACK


class JobKeeper:
    """Reports jobs and lets them wait, once per pass."""

    def __init__(self, section: SlurmSection, service: ServiceClient, slurm: SlurmCommands) -> None:
        self._section, self._service, self._slurm = section, service, slurm
        self._reported = ReportedJobs()
        # By job name: the service's last answer and its time; and when it was asked.
        self._may_start: dict[str, tuple[bool, float]] = {}
        self._requested_at: dict[str, float] = {}
        # Whether the jobs that an earlier run has reported are known.
        self._knows_earlier_jobs = False
        self._problems = ProblemLog(_log)
        self.changed = asyncio.Event()  # set when admissions have changed, so a pass is due

    async def run_pass(self) -> None:
        """Run one pass."""
        self.changed.clear()
        # Ask before Slurm: a job submitted in between would otherwise look like one that has ended.
        known = None if self._knows_earlier_jobs else await self._earlier_jobs()
        try:
            jobs = await self._slurm.list_jobs()
        except CachefsError as error:
            # A failed query does not mean that there are no jobs.
            self._problems.report_problem("squeue", "jobs are not followed: %s", error)
            return
        self._problems.report_solved("squeue")
        self._forget_others({task.name for job in jobs for task in single_tasks(job, MAX_TASKS)})
        for name in known or ():
            self._reported.note_known(name)
        self._knows_earlier_jobs = self._knows_earlier_jobs or known is not None
        await self._report_changes(jobs)
        await self._request_admissions(jobs)
        await self._apply_job_changes(jobs)

    async def follow_admissions(self) -> None:
        """Follow admissions with long polls, forever."""
        version: int | None = None
        while True:
            try:
                response = await self._service.fetch_admissions(version)
            except CachefsError:
                version = None
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            now = time.monotonic()
            for each in response.jobs:
                if each.job in self._requested_at:
                    self._may_start[each.job] = each.go, now
            if version is not None and version != response.version:
                self.changed.set()
            if version == response.version and not response.jobs:
                await asyncio.sleep(_RETRY_SECONDS / 4)  # for a service that answers without waiting
            version = response.version

    async def _earlier_jobs(self) -> list[str] | None:
        """Return this cluster's jobs that the service knows; None if it does not answer. Jobs that Slurm no longer has
        ended while this program was down, and would keep their slots for hours."""
        prefix = job_prefix(self._section.cluster)
        try:
            found = await self._service.fetch_known_jobs(prefix)
        except CachefsError as error:
            self._problems.report_problem("known", "the known jobs cannot be read from the service: %s", error)
            return None
        self._problems.report_solved("known")
        # Names of other clusters' jobs contain CLUSTER/.
        return [name for name in found if name.startswith(prefix) and "/" not in name.removeprefix(prefix)]

    async def _report_changes(self, jobs: Sequence[SlurmJob]) -> None:
        now = time.monotonic()
        changes = self._reported.unreported_changes(jobs, now)
        for job in changes.placed[:_MAX_CALLS]:
            if not await self._call_service(
                self._service.report_placed(PlacementReport(job.name, list(job.nodes), job.request))
            ):
                return
            self._reported.note_placed(job, now)
            self._forget(job.name)
        for job in changes.resized[:_MAX_CALLS]:
            if not await self._call_service(
                self._service.report_resized(PlacementReport(job.name, list(job.nodes), job.request))
            ):
                return
            self._reported.note_placed(job, now)
        for name in changes.ended[:_MAX_CALLS]:
            if not await self._call_service(self._service.report_ended(name)):
                return
            self._reported.note_ended(name)
            self._forget(name)

    async def _request_admissions(self, jobs: Iterable[SlurmJob]) -> None:
        """Ask for waiting jobs, first and then periodically, which keeps their places in the queue."""
        wall = time.time()
        due = [
            task
            for job in jobs
            if job.tag.policy in (PlacementPolicy.SUSPEND, PlacementPolicy.CLONE)
            and is_due(job, wall, self._section.wait_for)
            for task in single_tasks(job, MAX_TASKS)
        ]
        now = time.monotonic()
        due = [task for task in due if now - self._requested_at.get(task.name, -1e9) >= self._section.wait_for / 4]
        for task in due[:_MAX_CALLS]:
            if not await self._call_service(self._admit(task)):
                return

    async def _admit(self, task: SlurmJob) -> None:
        # Recorded before the call: a refused job is not asked for in each pass, and waits for nothing.
        self._requested_at[task.name] = time.monotonic()
        response = await self._service.request_admission(task.request)
        self._may_start[task.name] = response.go, time.monotonic()
        self._reported.note_known(task.name)

    async def _apply_job_changes(self, jobs: Sequence[SlurmJob]) -> None:
        # Old answers do not count: while the service is silent, no job is kept waiting.
        since = time.monotonic() - self._section.wait_for / 2
        known = {name: go for name, (go, at) in self._may_start.items() if at >= since}
        todo = waiting_changes(jobs, known, time.time(), self._section.wait_for)
        # The whole array first, since a task that starts belongs to it.
        await self._change_in_groups(todo.put_off, lambda ids: self._slurm.postpone_jobs(self._section.wait_for, ids))
        for name, seconds in todo.later:
            await self._change_in_groups([name], lambda ids, seconds=seconds: self._slurm.postpone_jobs(seconds, ids))  # type: ignore[misc]
        await self._change_in_groups(todo.start, lambda ids: self._slurm.postpone_jobs(0, ids))
        for job in todo.release:
            await self._log_failure(self._slurm.release_job(job.id, released_comment(job.admin_comment)))
        for name in (*todo.start, *(job.id for job in todo.release)):
            _log.info("job %s may start: a copy has a slot for it", name)

    async def _change_in_groups(self, ids: Sequence[str], change: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """Change jobs in groups. Names of tasks with brackets go alone, since they contain commas."""
        plain = [name for name in ids if "[" not in name]
        groups: list[Sequence[str]] = [plain[first : first + _MAX_IDS] for first in range(0, len(plain), _MAX_IDS)]
        for group in [*groups, *([name] for name in ids if "[" in name)]:
            await self._log_failure(change(group))

    async def _log_failure(self, change: Awaitable[None]) -> None:
        try:
            await change
        except CachefsError as error:
            # For instance, the job has ended meanwhile; scontrol processes the others.
            _log.info("%s", error)

    async def _call_service(self, call: Awaitable[None]) -> bool:
        """Return False if the service does not answer. A refused call does not stop the following ones: the job counts
        as reported, and is reported again later."""
        try:
            await call
        except CallRefused as error:
            self._problems.report_problem("refused", "%s", error)
            return True
        except CachefsError as error:
            self._problems.report_problem("service", "jobs cannot be reported to the service: %s", error)
            return False
        self._problems.report_solved("service")
        return True

    def _forget_others(self, names: set[str]) -> None:
        for name in self._requested_at.keys() - names:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._requested_at.pop(name, None)
        self._may_start.pop(name, None)
