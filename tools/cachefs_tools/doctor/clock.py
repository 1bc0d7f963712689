"""Checks that the machine's clock is synchronised and does not jump."""

import ctypes
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from cachefs_tools.doctor.finding import Finding, note, ok, warning

_UNSYNCHRONISED: Final = 0x40  # STA_UNSYNC (adjtimex(2))
_ERROR: Final = 5  # TIME_ERROR
# Largest movement in seconds of a slewed clock against the monotonic one while doctor runs.
_MAX_SLEW: Final = 0.25
# S3 refuses requests whose time differs by 15 min. A clock that is behind refuses new certificates.
_MAX_ERROR: Final = 60.0


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


class ClockFacts(msgspec.Struct, frozen=True):
    """Facts about the clock."""

    # Whether ntpd, chronyd or the like synchronise it, according to the kernel; None: unknown.
    is_synchronised: bool | None
    # Largest error in seconds, as estimated by the kernel.
    error: float
    # Unix time minus monotonic time.
    offset: float


def gather(_: object) -> ClockFacts:
    found = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(found))
    known = None if state < 0 else state != _ERROR and not found.status & _UNSYNCHRONISED
    return ClockFacts(known, found.maxerror / 1e6, _offset())


def _offset() -> float:
    return time.time() - time.monotonic()


def findings(facts: ClockFacts, offset_now: float) -> Iterator[Finding]:
    """Yield findings. offset_now: `offset` some seconds later."""
    moved = offset_now - facts.offset
    if abs(moved) > _MAX_SLEW:
        yield warning(
            "clock.stepped",
            f"the clock was set by {moved:+.1f} s while this ran",
            "S3 refuses signed requests, and TLS certificates, where the clock is wrong by minutes",
            "let chronyd or systemd-timesyncd keep it, and look why it jumps",
        )
    elif facts.is_synchronised is None:
        yield note("clock.synchronised", "the kernel does not tell whether the clock is synchronised")
    elif not facts.is_synchronised:
        yield note(
            "clock.synchronised",
            "the kernel knows of no synchronisation of the clock",
            "where it is wrong by minutes, S3 refuses signed requests (RequestTimeTooSkewed)",
            "run chronyd or systemd-timesyncd; in a container the host may do so",
        )
    elif facts.error > _MAX_ERROR:
        yield warning(
            "clock.synchronised",
            f"the clock may be wrong by {facts.error:.0f} s",
            "S3 refuses signed requests where it is wrong by minutes",
            "chronyc makestep",
        )
    else:
        yield ok("clock.synchronised", "the clock is synchronised")
