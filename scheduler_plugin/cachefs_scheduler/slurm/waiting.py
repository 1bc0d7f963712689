"""Decides how jobs with the policy `suspend` wait for a slot. Does no I/O; times are arguments.

A job waits by its begin time, which is postponed repeatedly. If postponing stops (this program has ended, the service
does not answer), the begin time passes and the job starts: cachefs cannot block a job. With `wait = "hold"`, jobs are
held instead until they are released.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs_scheduler.slurm.job_records import SlurmJob, single_tasks
from cachefs_scheduler.slurm.reported_jobs import MAX_TASKS

# A begin time later than any that this program sets is the user's.
_SLACK: Final = 5.0


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
