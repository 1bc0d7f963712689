"""Directories in which tiers have been, and which still hold segments: disk that is taken and that no daemon reads.

The state directory has the file `tiers`: one directory a line, those of the current tiers and of former ones that had
segments at the last start. So a changed `dir` is noticed at the next start, by doctor and by `cachefsd --check-config`.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from cachefs.sizes import format_size
from cachefs_daemon.store.segment_writer import segment_number

FILE_NAME: Final = "tiers"
# Directories that are remembered, and bytes of the file, at most.
_MOST: Final = 16
_MOST_BYTES: Final = _MOST * (os.pathconf("/", "PC_PATH_MAX") + 1)
_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FormerTier(NamedTuple):
    """A directory in which a tier has been."""

    directory: Path
    # That its segments take of the disk.
    bytes: int

    def __str__(self) -> str:
        return (
            f"{format_size(self.bytes)} of segments are in {self.directory}, where a tier was before its dir was "
            'changed; move them (docs: "Moving a tier"), or remove that directory'
        )


def find(state_dir: Path, current: Iterable[Path]) -> Iterator[FormerTier]:
    """Former directories that still have segments. current: those of the tiers that the configuration has."""
    used = {os.path.realpath(directory) for directory in current}
    for directory in _remembered(state_dir):
        if os.path.realpath(directory) not in used and (size := _size(directory)):
            yield FormerTier(directory, size)


def remember(state_dir: Path, current: Sequence[Path]) -> None:
    """Note the *current* directories, beside the former ones that still have segments. Raises OSError."""
    kept = [*current, *(former.directory for former in find(state_dir, current))]
    fresh = state_dir / f"{FILE_NAME}.new"
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o640)
    with open(descriptor, "wb") as file:
        file.writelines(os.fsencode(directory) + b"\n" for directory in kept[:_MOST])
    fresh.rename(state_dir / FILE_NAME)


def _remembered(state_dir: Path) -> list[Path]:
    try:
        descriptor = os.open(state_dir / FILE_NAME, os.O_RDONLY | _SAFELY)
    except OSError:  # none yet, or not to be read by this user
        return []
    with open(descriptor, "rb") as file:
        lines = file.read(_MOST_BYTES).splitlines()
    return [Path(os.fsdecode(line)) for line in lines[:_MOST] if line.startswith(b"/")]


def _size(directory: Path) -> int:
    size = 0
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if segment_number(entry.name) is not None and entry.is_file(follow_symlinks=False):
                size += 512 * entry.stat(follow_symlinks=False).st_blocks
    return size
