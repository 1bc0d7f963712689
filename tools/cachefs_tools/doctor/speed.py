"""Measures the present write and read speed of a tier's directory, briefly and with few bytes.

The file has no name (O_TMPFILE), so nothing is left behind, however the check ends.
"""

import os
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from cachefs_tools.doctor.disks import MEMORY
from cachefs_tools.doctor.finding import Finding, note, ok, warning

MAX_BYTES: Final = 64 << 20
MAX_SECONDS: Final = 1.0
_CHUNK: Final = 1 << 20
# Bytes per second below which a tier is hardly useful: the speed of one connection to an object store.
_SLOW: Final = {MEMORY: 500e6}
_SLOW_DISK: Final = 100e6


class SpeedFacts(msgspec.Struct, frozen=True):
    """Measured speeds in bytes per second; 0: not measured."""

    written: float = 0.0
    read: float = 0.0
    bytes: int = 0
    # Why nothing was measured; empty if it was.
    error: str = ""


def gather(directory: object) -> SpeedFacts:
    """Gather facts. directory: a path."""
    assert isinstance(directory, str)
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return SpeedFacts(error=error.strerror or str(error))
    try:
        free = os.fstatvfs(descriptor)
        if free.f_bavail * free.f_frsize < 4 * MAX_BYTES:
            return SpeedFacts(error="too little room for a look")
        began = time.monotonic()
        count = _write(descriptor, began)
        os.fsync(descriptor)
        written = count / (time.monotonic() - began)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.monotonic()
        read = _read(descriptor, began) / (time.monotonic() - began)
        return SpeedFacts(written, read, count)
    except OSError as error:
        return SpeedFacts(error=error.strerror or str(error))
    finally:
        os.close(descriptor)


def findings(tier: str, directory: str, facts: SpeedFacts) -> Iterator[Finding]:
    name = f"speed.{tier}"
    if facts.error:
        yield note(name, f"the speed of {directory} was not measured: {facts.error}")
        return
    text = f"{directory}: {facts.written / 1e6:,.0f} MB/s written, {facts.read / 1e6:,.0f} MB/s read at this moment"
    if facts.read < _SLOW.get(tier, _SLOW_DISK):
        yield warning(
            name,
            text,
            f"the {tier} tier is hardly faster than an origin, or others use the disk now",
            "run it again on a quiet machine; cachectl bench DATASET shows what a job gets",
        )
    else:
        yield ok(name, text)


def _write(descriptor: int, began: float) -> int:
    piece, count = os.urandom(_CHUNK), 0
    while count < MAX_BYTES and time.monotonic() - began < MAX_SECONDS:
        count += os.write(descriptor, piece)
    return count


def _read(descriptor: int, began: float) -> int:
    buffer, count = bytearray(_CHUNK), 0
    while time.monotonic() - began < MAX_SECONDS:
        got = os.preadv(descriptor, [buffer], count)
        if not got:
            break
        count += got
    return count
