"""What one run of a program has shown."""

from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """How a program is run."""

    NATIVE = "native"  # on the local disk, whose pages are cached
    BARE = "bare"  # mounted, nothing published, and the daemon guesses nothing
    MOUNTED = "mounted"  # mounted, nothing published; the daemon's rules guess
    RUN = "run"  # under `cachefs run`


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of a program. Times are seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float
    wait: float  # seconds that the program waited for data
    samples: int
    first: float = 0.0  # when it had its first samples and began to compute; 0: it did not tell


@dataclass(frozen=True, slots=True)
class Published:
    """What was published in a run, as the daemon told while it ran."""

    # Consumer -> its epochs, counted from 0, whose order was known, and when that was seen first (CLOCK_MONOTONIC).
    known: dict[str, dict[int, float]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run has shown."""

    mode: Mode
    digest: str  # of all that the program has read and computed
    epochs: tuple[Epoch, ...]
    wall: float  # seconds from the start of the process to its end
    said: tuple[str, ...] = ()  # lines of cachefs on the program's standard error
    origin_bytes: int = 0
    stall_seconds: float = 0.0  # that reads waited for the origin, of all readers together
    published: Published = Published()
    # Bytes that left the origin from the begin of the first epoch until that had its first samples.
    first_bytes: int = 0

    @property
    def wait(self) -> float:
        """Seconds that the program waited in all its epochs."""
        return sum(epoch.wait for epoch in self.epochs)

    @property
    def seconds(self) -> float:
        """Seconds from the begin of the first epoch to the end of the last."""
        return self.epochs[-1].end - self.epochs[0].begin
