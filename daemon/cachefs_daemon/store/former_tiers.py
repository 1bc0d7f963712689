"""Former directories of tiers that still hold segments: disk space that no daemon uses.

The state directory has the file `tiers`: one directory a line, those of the current tiers and of former ones that had
segments at the last look. So a changed `dir` is noticed once the daemon serves, by doctor and by `cachefsd
--check-config`. The disk of a former directory may hang, so only threads with a deadline touch such a directory.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from cachefs.sizes import format_size
from cachefs_daemon.store.segment_writer import segment_number

_log: Final = logging.getLogger(__name__)

FILE_NAME: Final = "tiers"
# Seconds for looking at all of them together.
LOOK_SECONDS: Final = 5.0
# Most directories that are remembered, and most bytes of the file.
_MOST: Final = 16
_MAX_BYTES: Final = _MOST * (os.pathconf("/", "PC_PATH_MAX") + 1)
_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FormerTier(NamedTuple):
    """A former directory of a tier."""

    directory: Path
    # Bytes on disk of its segments; None: the directory cannot be read, or its disk does not answer.
    bytes: int | None

    def __str__(self) -> str:
        if self.bytes is None:
            return f"{self.directory}, a former directory of a tier, cannot be read now"
        return (
            f"{format_size(self.bytes)} of segments are in {self.directory}, a former directory of a tier; move them "
            '(docs: "Moving a tier"), or remove that directory'
        )


def find(state_dir: Path, current: Iterable[Path]) -> list[FormerTier]:
    """Return former directories that have segments, or cannot be read. Takes LOOK_SECONDS at most, also where a disk
    hangs.

    current: the directories of the tiers in the configuration.
    """
    return [former for former in _examine_directories(state_dir, tuple(current)) if former.bytes != 0]


def remember(state_dir: Path, current: Iterable[Path]) -> None:
    """Write the *current* directories, beside former ones, without touching any of them. Raises OSError."""
    _write(state_dir, dict.fromkeys([*current, *_remembered(state_dir)]))


def report(state_dir: Path, current: Iterable[Path]) -> None:
    """Log the former directories that have segments, and forget those that have none."""
    found = _examine_directories(state_dir, tuple(current))
    for former in found:
        if former.bytes != 0:
            _log.warning("%s", former)
    empty = {former.directory for former in found if former.bytes == 0}
    if empty:
        with suppress(OSError):  # they are looked at again after the next start
            _write(state_dir, [directory for directory in _remembered(state_dir) if directory not in empty])


def _examine_directories(state_dir: Path, current: tuple[Path, ...]) -> list[FormerTier]:
    """Look at all former directories at once, each in a thread of its own, which may hang forever with its disk."""
    directories = [directory for directory in _remembered(state_dir) if directory not in current]
    results: SimpleQueue[FormerTier] = SimpleQueue()
    for directory in directories:
        look = partial(_examine_directory, results, directory, current)
        threading.Thread(target=look, name="former-tier", daemon=True).start()
    deadline = time.monotonic() + LOOK_SECONDS
    found: dict[Path, FormerTier] = {}
    with suppress(Empty):
        while len(found) < len(directories):
            former = results.get(timeout=max(0.0, deadline - time.monotonic()))
            found[former.directory] = former
    return [found.get(directory, FormerTier(directory, None)) for directory in directories]


def _examine_directory(results: SimpleQueue[FormerTier], directory: Path, current: tuple[Path, ...]) -> None:
    try:
        is_current = os.path.realpath(directory) in map(os.path.realpath, current)
        size = 0 if is_current else _segment_bytes(directory)
    except (FileNotFoundError, NotADirectoryError):
        size = 0
    except OSError:
        results.put(FormerTier(directory, None))
        return
    results.put(FormerTier(directory, size))


def _write(state_dir: Path, directories: Iterable[Path]) -> None:
    fresh = state_dir / f"{FILE_NAME}.new"
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o640)
    with open(descriptor, "wb") as file:
        file.writelines(os.fsencode(directory) + b"\n" for directory in islice(directories, _MOST))
    fresh.rename(state_dir / FILE_NAME)


def _remembered(state_dir: Path) -> list[Path]:
    try:
        descriptor = os.open(state_dir / FILE_NAME, os.O_RDONLY | _SAFELY)
    except OSError:  # no file yet, or this user may not read it
        return []
    with open(descriptor, "rb") as file:
        lines = file.read(_MAX_BYTES).splitlines()
    paths = [Path(os.fsdecode(line)) for line in lines[:_MOST] if line.startswith(b"/") and b"\0" not in line]
    return list(dict.fromkeys(paths))


def _segment_bytes(directory: Path) -> int:
    """Return the bytes on disk of the segments. Raises OSError."""
    size = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if segment_number(entry.name) is not None and entry.is_file(follow_symlinks=False):
                size += 512 * entry.stat(follow_symlinks=False).st_blocks
    return size
