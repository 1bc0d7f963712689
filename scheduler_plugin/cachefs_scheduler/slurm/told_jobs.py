"""Tracks which jobs the service knows. Does no I/O; `now`: monotonic seconds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs_scheduler.slurm.job_records import SlurmJob, single_tasks

# Seconds after which a running job is reported again, since a restarted service may have lost it.
SAY_AGAIN: Final = 180.0
# Most jobs that are reported; the first ones.
MOST_JOBS: Final = 20_000
# Tasks of one array that are asked for at a time.
MOST_TASKS: Final = 16


@dataclass(frozen=True, slots=True)
class News:
    """Changes that the service does not know yet."""

    placed: Sequence[SlurmJob]
    resized: Sequence[SlurmJob]
    ended: Sequence[str]


@dataclass(slots=True)
class _Told:
    nodes: tuple[str, ...] = ()
    at: float = 0.0


@dataclass
class ToldJobs:
    """The jobs that the service knows."""

    _told: dict[str, _Told] = field(default_factory=dict)

    def news(self, jobs: Iterable[SlurmJob], now: float) -> News:
        """Compare all of Slurm's jobs with the jobs that the service knows."""
        placed: list[SlurmJob] = []
        resized: list[SlurmJob] = []
        alive: set[str] = set()
        for job in jobs:
            if job.waiting:
                alive.update(task.name for task in single_tasks(job, MOST_TASKS))
            elif job.nodes and len(alive) < MOST_JOBS:
                alive.add(job.name)
                known = self._told.get(job.name)
                if known is None or not known.nodes or now - known.at >= SAY_AGAIN:
                    placed.append(job)
                elif known.nodes != job.nodes:
                    resized.append(job)
        return News(placed, resized, [name for name in self._told if name not in alive])

    def knows(self, name: str) -> None:
        """Record a job that the service knows, from a request or from an earlier run of this program."""
        if len(self._told) < MOST_JOBS:
            self._told.setdefault(name, _Told())

    def placed(self, job: SlurmJob, now: float) -> None:
        """Record that the service knows the job's nodes."""
        self._told[job.name] = _Told(job.nodes, now)

    def ended(self, name: str) -> None:
        """Record that the service knows of the job's end."""
        self._told.pop(name, None)
