"""Tracks which jobs the service knows. Does no I/O; `now`: monotonic seconds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs_scheduler.slurm.job_records import SlurmJob, single_tasks

# Seconds after which a running job is reported again, since a restarted service may have lost it.
REPEAT_SECONDS: Final = 180.0
# Most jobs that are reported; the first ones.
MAX_JOBS: Final = 20_000
# Tasks of one array that are asked for at a time.
MAX_TASKS: Final = 16


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
