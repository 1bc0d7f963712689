"""Measures reads of data on the node: from a tier, and from the page cache next to a native copy of the same files."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs_tools.kernel_pages import drop_pages
from cachefs_tools.trial.extent import TrialSample

# Most bytes and files that are copied.
MAX_BYTES: Final = 64 << 20
MAX_FILES: Final = 1000
_PYREAD: Final = Path(__file__).with_name("pyread.py")
_ROUNDS: Final = 3
_SECONDS: Final = 120.0
# Seconds for writing the copy to the disk: dirty pages cannot be dropped.
_WRITTEN_SECONDS: Final = 10.0


class WarmSpeed(msgspec.Struct, frozen=True):
    """Measured speeds."""

    # Without pages in the page cache: bytes per second of one reader, and median seconds of a read.
    tier: float
    tier_p50: float
    # Microseconds of open, read and close of a file in the page cache: natively, and through the mount.
    native_us: float
    mount_us: float

    @property
    def ratio(self) -> float:
        """Speed through the mount relative to the native file."""
        return self.native_us / self.mount_us if self.mount_us else 0.0


def measure_warm(mount: Path, work: Path, samples: Sequence[TrialSample]) -> WarmSpeed:
    """Measure reads of files that are all on the node. *work* is a directory on a local disk. Raises CachefsError,
    OSError."""
    names = _readable(samples)
    drop_pages(mount / name for name in names)
    took, count = [], 0
    for name in names:
        began = time.perf_counter()
        count += len((mount / name).read_bytes())
        took.append(time.perf_counter() - began)
    native = work / "native"
    for name in names:
        _copy(mount / name, native / name)
    # Load one file of each tree in turn, so that their pages are placed alike in memory (see
    # cachefs_tools.kernel_pages). An fsync could not be interrupted by Ctrl-C.
    drop_pages((native / name for name in names), _WRITTEN_SECONDS)
    drop_pages(mount / name for name in names)
    for name in names:
        for root in (native, mount):
            (root / name).read_bytes()
    native_us, mount_us = _time_reads(work, names, native, mount)
    return WarmSpeed(count / sum(took), sorted(took)[len(took) // 2], native_us, mount_us)


def _readable(samples: Sequence[TrialSample]) -> list[str]:
    """Return names that fit a list of one per line, within the bounds."""
    names: list[str] = []
    room = MAX_BYTES
    for sample in samples[: 4 * MAX_FILES]:
        name = os.fsdecode(sample.path)
        if name.isprintable() and sample.size <= room and len(names) < MAX_FILES:
            names.append(name)
            room -= sample.size
    if not names:
        raise CachefsError(
            "no file of the trial is small enough, and has a plain name, to be compared with a native copy"
        )
    return names


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())


def _time_reads(work: Path, names: Sequence[str], native: Path, mount: Path) -> tuple[float, float]:
    listing = work / "names"
    listing.write_text("\n".join(names) + "\n")
    command = [sys.executable, str(_PYREAD), str(listing), str(_ROUNDS), str(native), str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise CachefsError(f"{_PYREAD.name} failed: {done.stderr.strip()[-300:]}")
    theirs, ours = json.loads(done.stdout)["open"]
    return float(theirs), float(ours)
