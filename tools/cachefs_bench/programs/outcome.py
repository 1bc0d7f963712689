"""Results of one run of a program."""

from dataclasses import dataclass, field
from enum import StrEnum


class RunMode(StrEnum):
    """The ways to run a program."""

    NATIVE = "native"  # on the local disk, with cached pages
    BARE = "bare"  # mounted, nothing published, without readahead
    MOUNTED = "mounted"  # mounted, nothing published, with readahead by rules
    RUN = "run"  # under `cachefs run`


@dataclass(frozen=True, slots=True)
class ProgramEpoch:
    """An epoch of a program. Times are seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float
    wait: float  # seconds that the program waited for data
    samples: int
    first: float = 0.0  # when it had its first samples and began to compute; 0: not reported


@dataclass(frozen=True, slots=True)
class PublishedSequences:
    """Sequences that a run published, as the daemon reported them."""

    # Consumer -> its epochs (from 0) with a known order, and when that was first seen (CLOCK_MONOTONIC).
    known: dict[str, dict[int, float]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """Results of one run."""

    mode: RunMode
    digest: str  # of everything that the program has read and computed
    epochs: tuple[ProgramEpoch, ...]
    wall: float  # seconds from the start of the process to its end
    cachefs_lines: tuple[str, ...] = ()  # cachefs's lines on the program's standard error
    origin_bytes: int = 0
    stall_seconds: float = 0.0  # waits of reads for the origin, sum of all readers
    published: PublishedSequences = PublishedSequences()
    # Bytes from the origin between the begin of the first epoch and its first samples.
    first_bytes: int = 0

    @property
    def wait(self) -> float:
        """Seconds that the program waited in all its epochs."""
        return sum(epoch.wait for epoch in self.epochs)

    @property
    def seconds(self) -> float:
        """Seconds from the begin of the first epoch to the end of the last."""
        return self.epochs[-1].end - self.epochs[0].begin
