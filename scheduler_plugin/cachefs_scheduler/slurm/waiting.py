"""What happens to jobs with the policy `suspend` that wait for a slot of a copy. No I/O; times are arguments.

A job waits by its begin time, which is put off again and again. Where nobody does that any more (this program has
ended, the service does not answer), it passes, and the job starts: nothing of ours can keep a job waiting. Where the
administrator wants it (`wait = "hold"`), jobs are held instead, until they are released.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs_scheduler.slurm.job_records import SlurmJob, single_tasks
from cachefs_scheduler.slurm.told_jobs import MOST_TASKS

# A begin time further away than we put any is what the user wants.
_SLACK: Final = 5.0


@dataclass(frozen=True, slots=True)
class Steps:
    """By the names that scontrol knows."""

    # May start now.
    start: Sequence[str]
    # May start after so many seconds, as their users wanted.
    later: Sequence[tuple[str, int]]
    # Are held by us, and may start.
    release: Sequence[SlurmJob]
    # Wait on.
    put_off: Sequence[str]


def steps(jobs: Iterable[SlurmJob], may_start: Mapping[str, bool], now: float, wait_for: float) -> Steps:
    """may_start: what the service said, by the name of the job; not in it: it has not said anything of late.

    now: seconds since 1970, as Slurm's begin times.
    """
    start: list[str] = []
    later: list[tuple[str, int]] = []
    release: list[SlurmJob] = []
    put_off: list[str] = []
    for job in jobs:
        if not job.waiting or not job.tag.waits:
            continue
        refused = False
        for task in single_tasks(job, MOST_TASKS):
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
    return Steps(start, later, release, put_off)


def soon(job: SlurmJob, now: float, wait_for: float) -> bool:
    """Is it time to ask whether it may start? Not where its user wants it to begin much later."""
    return job.waiting and job.eligible <= now + wait_for + _SLACK
