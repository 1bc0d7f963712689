"""Follows jobs that read datasets: reports their nodes to the service, and starts jobs that waited for a slot."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from cachefs.errors import CachefsError
from cachefs.scheduling_messages import Placed, Policy
from cachefs_scheduler.slurm.config import SlurmSection
from cachefs_scheduler.slurm.few_lines import FewLines
from cachefs_scheduler.slurm.job_records import SlurmJob, prefix_of, single_tasks
from cachefs_scheduler.slurm.job_tag import released
from cachefs_scheduler.slurm.service_client import Refused, ServiceClient
from cachefs_scheduler.slurm.slurm_commands import SlurmCommands
from cachefs_scheduler.slurm.told_jobs import MOST_TASKS, ToldJobs
from cachefs_scheduler.slurm.waiting import soon, steps

_log = logging.getLogger(__name__)
# Calls of the service per pass; the rest follows in the next one.
_MOST_CALLS: Final = 1000
# Jobs in one call of scontrol.
_MOST_IDS: Final = 200
# Seconds before the next long poll if the service does not answer.
_AGAIN: Final = 2.0


class JobKeeper:
    """Reports jobs and lets them wait, once per pass."""

    def __init__(self, section: SlurmSection, service: ServiceClient, slurm: SlurmCommands) -> None:
        self._section, self._service, self._slurm = section, service, slurm
        self._told = ToldJobs()
        # By job name: the service's last answer and its time; and when it was asked.
        self._may_start: dict[str, tuple[bool, float]] = {}
        self._asked: dict[str, float] = {}
        # Whether the jobs that an earlier run has reported are known.
        self._remembers = False
        self._problems = FewLines(_log)
        self.changed = asyncio.Event()  # set when admissions have changed, so a pass is due

    async def look(self) -> None:
        """Run one pass."""
        self.changed.clear()
        # Ask before Slurm: a job submitted in between would otherwise look like one that has ended.
        known = None if self._remembers else await self._known()
        try:
            jobs = await self._slurm.jobs()
        except CachefsError as error:
            # A failed query does not mean that there are no jobs.
            self._problems.error("squeue", "jobs are not followed: %s", error)
            return
        self._problems.good("squeue")
        self._keep_only({task.name for job in jobs for task in single_tasks(job, MOST_TASKS)})
        for name in known or ():
            self._told.knows(name)
        self._remembers = self._remembers or known is not None
        await self._tell(jobs)
        await self._ask(jobs)
        await self._let_wait(jobs)

    async def follow(self) -> None:
        """Follow admissions with long polls, forever."""
        version: int | None = None
        while True:
            try:
                answer = await self._service.admissions(version)
            except CachefsError:
                version = None
                await asyncio.sleep(_AGAIN)
                continue
            now = time.monotonic()
            for each in answer.jobs:
                if each.job in self._asked:
                    self._may_start[each.job] = each.go, now
            if version is not None and version != answer.version:
                self.changed.set()
            if version == answer.version and not answer.jobs:
                await asyncio.sleep(_AGAIN / 4)  # for a service that answers without waiting
            version = answer.version

    async def _known(self) -> list[str] | None:
        """Return this cluster's jobs that the service knows; None if it does not answer. Jobs that Slurm no longer has
        ended while this program was down, and would keep their slots for hours."""
        prefix = prefix_of(self._section.cluster)
        try:
            found = await self._service.known(prefix)
        except CachefsError as error:
            self._problems.error("known", "the service does not say which jobs it knows: %s", error)
            return None
        self._problems.good("known")
        # Names of other clusters' jobs contain CLUSTER/.
        return [name for name in found if name.startswith(prefix) and "/" not in name.removeprefix(prefix)]

    async def _tell(self, jobs: Sequence[SlurmJob]) -> None:
        now = time.monotonic()
        news = self._told.news(jobs, now)
        for job in news.placed[:_MOST_CALLS]:
            if not await self._say(self._service.placed(Placed(job.name, list(job.nodes), job.ask))):
                return
            self._told.placed(job, now)
            self._forget(job.name)
        for job in news.resized[:_MOST_CALLS]:
            if not await self._say(self._service.resized(Placed(job.name, list(job.nodes), job.ask))):
                return
            self._told.placed(job, now)
        for name in news.ended[:_MOST_CALLS]:
            if not await self._say(self._service.ended(name)):
                return
            self._told.ended(name)
            self._forget(name)

    async def _ask(self, jobs: Iterable[SlurmJob]) -> None:
        """Ask for waiting jobs, first and then periodically, which keeps their places in the queue."""
        wall = time.time()
        due = [
            task
            for job in jobs
            if job.tag.policy in (Policy.SUSPEND, Policy.CLONE) and soon(job, wall, self._section.wait_for)
            for task in single_tasks(job, MOST_TASKS)
        ]
        now = time.monotonic()
        due = [task for task in due if now - self._asked.get(task.name, -1e9) >= self._section.wait_for / 4]
        for task in due[:_MOST_CALLS]:
            if not await self._say(self._admit(task)):
                return

    async def _admit(self, task: SlurmJob) -> None:
        # Recorded before the call: a refused job is not asked for in each pass, and waits for nothing.
        self._asked[task.name] = time.monotonic()
        answer = await self._service.admit(task.ask)
        self._may_start[task.name] = answer.go, time.monotonic()
        self._told.knows(task.name)

    async def _let_wait(self, jobs: Sequence[SlurmJob]) -> None:
        # Old answers do not count: while the service is silent, no job is kept waiting.
        since = time.monotonic() - self._section.wait_for / 2
        known = {name: go for name, (go, at) in self._may_start.items() if at >= since}
        todo = steps(jobs, known, time.time(), self._section.wait_for)
        # The whole array first, since a task that starts belongs to it.
        await self._in_parts(todo.put_off, lambda ids: self._slurm.begin_in(self._section.wait_for, ids))
        for name, seconds in todo.later:
            await self._in_parts([name], lambda ids, seconds=seconds: self._slurm.begin_in(seconds, ids))  # type: ignore[misc]
        await self._in_parts(todo.start, lambda ids: self._slurm.begin_in(0, ids))
        for job in todo.release:
            await self._try(self._slurm.release(job.id, released(job.admin_comment)))
        for name in (*todo.start, *(job.id for job in todo.release)):
            _log.info("job %s may start: a copy has a slot for it", name)

    async def _in_parts(self, ids: Sequence[str], change: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """Change jobs in groups. Names of tasks with brackets go alone, since they contain commas."""
        plain = [name for name in ids if "[" not in name]
        groups: list[Sequence[str]] = [plain[first : first + _MOST_IDS] for first in range(0, len(plain), _MOST_IDS)]
        for group in [*groups, *([name] for name in ids if "[" in name)]:
            await self._try(change(group))

    async def _try(self, change: Awaitable[None]) -> None:
        try:
            await change
        except CachefsError as error:
            # For instance, the job has ended meanwhile; scontrol processes the others.
            _log.info("%s", error)

    async def _say(self, call: Awaitable[None]) -> bool:
        """Return False if the service does not answer. A refused call does not stop the following ones: the job counts
        as reported, and is reported again later."""
        try:
            await call
        except Refused as error:
            self._problems.error("refused", "%s", error)
            return True
        except CachefsError as error:
            self._problems.error("service", "the service is not told of jobs: %s", error)
            return False
        self._problems.good("service")
        return True

    def _keep_only(self, names: set[str]) -> None:
        for name in self._asked.keys() - names:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._asked.pop(name, None)
        self._may_start.pop(name, None)
