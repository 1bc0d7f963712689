"""Keeps the progress of a listing on disk, so that the next listing of the same origin resumes it.

A journal is a directory `state_dir/listings/KEY` with two files: `rows` has the listed objects, as sorted runs, and
`place` says how much of that counts, which ranges of keys are left, and at which cuts a lost key is still to be
checked. `place` is replaced atomically, after the rows are written. So whenever the listing ends, each key is either in
the rows or in a range that is left. The rows have checksums, so they need not be synced.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import BuilderState, SnapshotBuilder
from cachefs.spill_file import SpillFile
from cachefs_daemon.origin.key_ranges import KeyRange, ListingCheckpoint, RangeCut

# Seconds after its last save for which a listing is resumed. A user who lists later wants to see new objects.
RESUMABLE_SECONDS: Final = 900.0
_VERSION: Final = 3
_POSITION_FILE: Final = "place"
_ROWS: Final = "rows"


class _JournalPosition(msgspec.Struct, frozen=True):
    """The content of the file `place`."""

    version: int
    # Unix time when the listing began.
    began: float
    left: list[KeyRange]
    seams: list[RangeCut]
    built: BuilderState


class ListingJournal:
    """The journal of one listing, which is its only user until `close`."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError, BlockingIOError where another listing uses it."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.rows = SpillFile(directory, directory / _ROWS)
        except OSError:
            os.close(self._lock)
            raise
        self._began = time.time()

    def restore(self, builder: SnapshotBuilder) -> ListingCheckpoint | None:
        """Restore the objects of an earlier listing into *builder*, and return its position. None where there is none
        to resume; the builder is then empty."""
        position = _read_position(self._directory)
        if position is not None:
            try:
                builder.restore_state(position.built)
            except CachefsError:
                position = None
        if position is None:
            builder.restore_state(BuilderState())
            return None
        self._began = position.began
        return ListingCheckpoint(position.left, position.seams)

    @property
    def began(self) -> float:
        """Unix time when the listing began, in its first process."""
        return self._began

    def save(self, builder: SnapshotBuilder, left: list[KeyRange], seams: list[RangeCut]) -> None:
        """Write the position. Raises OSError."""
        draft = self._directory / f"{_POSITION_FILE}-draft"
        draft.write_bytes(
            msgspec.msgpack.encode(_JournalPosition(_VERSION, self._began, left, seams, builder.export_state()))
        )
        draft.replace(self._directory / _POSITION_FILE)

    def make_unresumable(self) -> None:
        """Make the listing not resumable: the server lists in no order. Raises OSError."""
        (self._directory / _POSITION_FILE).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the journal of a listing that has ended."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        self.rows.close()
        os.close(self._lock)


def journal_path(state_dir: Path, url: str, block_size: int, options: OriginOptions) -> Path:
    """Return the path of the journal for a listing with these parameters."""
    parameters = msgspec.json.encode((url, block_size, options))
    return _listings(state_dir) / hashlib.blake2b(parameters, digest_size=16).hexdigest()


def remove_stale(state_dir: Path) -> None:
    """Remove the journals that no listing will resume. Those in use stay."""
    for directory in _journals(state_dir):
        with contextlib.suppress(OSError):
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A new one may not be locked yet by the process that has created it.
                if not _is_resumable(directory):
                    shutil.rmtree(directory)
            finally:
                os.close(lock)


def _listings(state_dir: Path) -> Path:
    return state_dir / "listings"


def _journals(state_dir: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from _listings(state_dir).iterdir()


def _is_resumable(path: Path) -> bool:
    try:
        return abs(time.time() - path.stat().st_mtime) < RESUMABLE_SECONDS
    except OSError:
        return False


def _read_position(directory: Path) -> _JournalPosition | None:
    """Return the position of a listing that ended a short while ago, or None."""
    if not _is_resumable(directory / _POSITION_FILE):
        return None
    try:
        position = msgspec.msgpack.decode((directory / _POSITION_FILE).read_bytes(), type=_JournalPosition)
    except (OSError, msgspec.MsgspecError):
        return None
    return position if position.version == _VERSION else None
