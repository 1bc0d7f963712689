"""What the service has been told of jobs, and what it is told next. No I/O; `now` is any clock that only goes on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs_scheduler.slurm.job_records import SlurmJob, single_tasks

# Seconds after which a job that runs is said again: a service that was started again has lost it.
SAY_AGAIN: Final = 180.0
# Jobs that are told of; of more, the first ones.
MOST_JOBS: Final = 20_000
# Tasks of one array that are asked for at a time.
MOST_TASKS: Final = 16


@dataclass(frozen=True, slots=True)
class News:
    """What the service does not know yet."""

    placed: Sequence[SlurmJob]
    resized: Sequence[SlurmJob]
    ended: Sequence[str]


@dataclass(slots=True)
class _Told:
    nodes: tuple[str, ...] = ()
    at: float = 0.0


@dataclass
class ToldJobs:
    """One for the life of the program."""

    _told: dict[str, _Told] = field(default_factory=dict)

    def news(self, jobs: Iterable[SlurmJob], now: float) -> News:
        """Of all jobs that Slurm has."""
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
        """The service knows of the job: it was asked whether that may start, or an earlier run of this program has told
        of it."""
        if len(self._told) < MOST_JOBS:
            self._told.setdefault(name, _Told())

    def placed(self, job: SlurmJob, now: float) -> None:
        """The service knows where it runs."""
        self._told[job.name] = _Told(job.nodes, now)

    def ended(self, name: str) -> None:
        """The service knows that it is no more."""
        self._told.pop(name, None)
