"""Time since the machine started, which nobody sets: when processes began, and what happened before what.

A process is known by its number and its beginning. Told in unix time, that moves when the clock is set, since the
kernel counts from its own start: a step of a second would make every process another one.
"""

import functools
import os
import time
from pathlib import Path
from typing import Final

import msgspec

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
# Of what follows the name in /proc/PID/stat (see proc_pid_stat(5)).
_STATE: Final = 0
_START: Final = 19
_ENDED: Final = (b"Z", b"X", b"x")  # zombies, and what the kernel is about to forget


class Moment(msgspec.Struct, frozen=True):
    """A moment, on the clock that runs from one start of the machine to the next."""

    seconds: float  # since that start
    boot: str  # which start it was: an id that the kernel makes up

    def after(self, seconds: float) -> "Moment":
        """The moment so many seconds later."""
        return Moment(self.seconds + seconds, self.boot)

    @property
    def unix_time(self) -> float:
        """The same moment in seconds of unix time, as the clock is set now."""
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - self.seconds)


def now() -> Moment:
    return Moment(time.clock_gettime(time.CLOCK_BOOTTIME), _boot())


def birth_of(pid: int) -> Moment | None:
    """When the process started, which tells it from another one of the same number. None where no process has that
    number, or only one that has ended and that nobody has waited for."""
    if pid <= 0:
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 1 :].split()  # the name may have blanks and parentheses
    if len(fields) <= _START or fields[_STATE] in _ENDED:
        return None
    return Moment(int(fields[_START]) / _TICKS_PER_SECOND, _boot())


@functools.cache
def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
