"""The identity and the rights of a process that calls the daemon."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Caller:
    """A process at the other end of the daemon's socket."""

    # User id; -1 where it is unknown.
    uid: int
    # True for the user that the daemon runs as.
    is_daemon: bool = False
    # May administer the node: datasets, pins, limits, other users' jobs.
    is_administrator: bool = False
    # May mount: reads the tiers, and reports what was read.
    may_mount: bool = False

    def __str__(self) -> str:
        return f"user {self.uid}" if self.uid >= 0 else "an unknown user"


UNKNOWN_CALLER: Final = Caller(-1)
