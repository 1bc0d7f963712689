"""The time since the machine started, which cannot be set: for the start times of processes, and for the order of
events.

A process is identified by its number and its start time. In unix time, the start time moves when the clock is set,
since the kernel counts from its own start: a step of a second would make every process another one.
"""

import functools
import os
import time
from pathlib import Path
from typing import Final

import msgspec

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
# Indices of the fields after the name in /proc/PID/stat (see proc_pid_stat(5)).
_STATE_FIELD: Final = 0
_START_FIELD: Final = 19
_ENDED_STATES: Final = (b"Z", b"X", b"x")  # zombies, and processes that the kernel is about to forget


class BootMoment(msgspec.Struct, frozen=True):
    """A moment on the clock that runs from one start of the machine to the next."""

    seconds: float  # since that start
    boot: str  # the start: an id that the kernel generates

    def after(self, seconds: float) -> "BootMoment":
        """Return the moment *seconds* later."""
        return BootMoment(self.seconds + seconds, self.boot)

    @property
    def unix_time(self) -> float:
        """This moment in seconds of unix time, as the clock is set now."""
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - self.seconds)


def now() -> BootMoment:
    return BootMoment(time.clock_gettime(time.CLOCK_BOOTTIME), _boot_id())


def birth_of(pid: int) -> BootMoment | None:
    """Return the start time of the process, which distinguishes it from another one of the same number. None where no
    process has that number, or only a zombie."""
    if pid <= 0:
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 1 :].split()  # the name may have blanks and parentheses
    if len(fields) <= _START_FIELD or fields[_STATE_FIELD] in _ENDED_STATES:
        return None
    return BootMoment(int(fields[_START_FIELD]) / _TICKS_PER_SECOND, _boot_id())


@functools.cache
def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
