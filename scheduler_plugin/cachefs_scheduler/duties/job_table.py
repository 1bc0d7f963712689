"""The jobs that schedulers have named, and their states. The number of jobs is bounded, and jobs without news are
forgotten."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from cachefs.scheduling_messages import PlacementRequest


class AdmissionState(StrEnum):
    """The progress of a job through the queue."""

    # Known, and not told to wait.
    ASKED = "asked"
    WAITING = "waiting"
    # Allowed to start; holds a slot.
    ADMITTED = "admitted"
    PLACED = "placed"


@dataclass(slots=True)
class KnownJob:
    """A job known from a scheduler. Times are monotonic seconds."""

    request: PlacementRequest
    # Id of the snapshot that the job reads; empty if no node knew the dataset when the job was asked for.
    snapshot: str
    requested_at: float
    # When a scheduler last mentioned the job.
    mentioned_at: float
    state: AdmissionState = AdmissionState.ASKED
    nodes: tuple[str, ...] = ()
    # Position in the job's queue, from 1.
    queue_position: int = 0
    why: str = ""
    # Nodes where copies are made for the job, or where it has a slot.
    targets: tuple[str, ...] = ()
    # Identifies a placement: changes whenever the job is placed on other nodes.
    placement: int = field(default=0)
    # When the job was admitted (0: never), and whether it took so long to start that its slot is free for another job.
    admitted_at: float = 0.0
    late: bool = False

    @property
    def has_slot(self) -> bool:
        """Return whether the job counts as a reader of its dataset."""
        return self.state == AdmissionState.PLACED or (self.state == AdmissionState.ADMITTED and not self.late)


class JobTable:
    """The known jobs. Used on the event loop."""

    def __init__(self, most: int, forgotten: float) -> None:
        """most: number of jobs; forgotten: seconds without news after which a job that does not run is forgotten."""
        self._most = most
        self._forgotten = forgotten
        self._jobs: dict[str, KnownJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[KnownJob]:
        return iter(list(self._jobs.values()))

    def get(self, job: str) -> KnownJob | None:
        return self._jobs.get(job)

    def add_job(self, known: KnownJob) -> bool:
        """Add a job, evicting the oldest job in state ASKED if the book is full. Returns False if there is none."""
        if known.request.job not in self._jobs and len(self._jobs) >= self._most:
            asked = [job for job, one in self._jobs.items() if one.state == AdmissionState.ASKED]
            if not asked:
                return False
            del self._jobs[min(asked, key=lambda job: self._jobs[job].mentioned_at)]
        self._jobs[known.request.job] = known
        return True

    def remove(self, job: str) -> KnownJob | None:
        return self._jobs.pop(job, None)

    def readers_of(self, snapshot: str) -> list[KnownJob]:
        """Return the jobs that read a snapshot."""
        return [job for job in self._jobs.values() if job.snapshot == snapshot]

    def lapsed_jobs(self, now: float) -> list[KnownJob]:
        """Return the jobs without news for too long; placed jobs are kept ten times as long."""
        return [
            job
            for job in self._jobs.values()
            if now - job.mentioned_at > self._forgotten * (10 if job.state == AdmissionState.PLACED else 1)
        ]

    def longest_waiting_since(self) -> float:
        """Return when the longest-waiting job was first asked for; inf if no job waits."""
        return min(
            (job.requested_at for job in self._jobs.values() if job.state == AdmissionState.WAITING), default=math.inf
        )
