"""The jobs that schedulers have told of, and what is known of each. Bounded; jobs of which nothing is heard are
forgotten."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from cachefs.scheduling_messages import Ask


class JobState(StrEnum):
    """How far a job is."""

    # It is known, and was not told to wait.
    ASKED = "asked"
    WAITING = "waiting"
    # It may start, and has a slot.
    ADMITTED = "admitted"
    PLACED = "placed"


@dataclass(slots=True)
class KnownJob:
    """A job. Times are monotonic seconds."""

    ask: Ask
    # Id of the snapshot that it reads; empty: no node knew the dataset when it was asked for.
    snapshot: str
    since: float
    # When a scheduler last spoke of it.
    touched: float
    state: JobState = JobState.ASKED
    nodes: tuple[str, ...] = ()
    # In its queue, from 1.
    place: int = 0
    why: str = ""
    # Where copies are made for it, or where it has a slot.
    targets: tuple[str, ...] = ()
    # Another number each time that it is placed on other nodes.
    placement: int = field(default=0)
    # When it was told that it may start; 0: it was not. Has it taken so long that its slot is another one's too?
    admitted: float = 0.0
    late: bool = False

    @property
    def has_slot(self) -> bool:
        """Does it count among those that read its dataset?"""
        return self.state == JobState.PLACED or (self.state == JobState.ADMITTED and not self.late)


class Book:
    """Used on the event loop."""

    def __init__(self, most: int, forgotten: float) -> None:
        """most: jobs; forgotten: seconds without a word after which one is forgotten that does not run."""
        self._most = most
        self._forgotten = forgotten
        self._jobs: dict[str, KnownJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[KnownJob]:
        return iter(list(self._jobs.values()))

    def get(self, job: str) -> KnownJob | None:
        return self._jobs.get(job)

    def put(self, known: KnownJob) -> bool:
        """Remember a job; False where there is no room. Those that only were asked for go first."""
        if known.ask.job not in self._jobs and len(self._jobs) >= self._most:
            asked = [job for job, one in self._jobs.items() if one.state == JobState.ASKED]
            if not asked:
                return False
            del self._jobs[min(asked, key=lambda job: self._jobs[job].touched)]
        self._jobs[known.ask.job] = known
        return True

    def remove(self, job: str) -> KnownJob | None:
        """It is no more."""
        return self._jobs.pop(job, None)

    def of(self, snapshot: str) -> list[KnownJob]:
        """Jobs that read it."""
        return [one for one in self._jobs.values() if one.snapshot == snapshot]

    def lapsed(self, now: float) -> list[KnownJob]:
        """Those of which nothing was heard for too long: ten times as long where they run."""
        return [
            one
            for one in self._jobs.values()
            if now - one.touched > self._forgotten * (10 if one.state == JobState.PLACED else 1)
        ]

    def oldest(self) -> float:
        """When the job was first asked for that waits longest; inf where none waits."""
        return min((one.since for one in self._jobs.values() if one.state == JobState.WAITING), default=math.inf)
