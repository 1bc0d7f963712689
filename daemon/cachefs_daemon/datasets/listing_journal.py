"""How far a listing has come, kept on disk, so that the next one of the same origin goes on from there.

A journal is a directory `state_dir/listings/KEY` with two files: `rows` has what was listed, as sorted runs, and
`place` says how much of that counts, which ranges of keys are left, and at which cuts nobody has looked yet whether a
key was lost. `place` is replaced at once, after the rows are written. So whenever the listing ends, each key is either
in the rows or in a range that is left. The rows have checksums, so they need not be synced.
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
from cachefs_daemon.origin.key_ranges import KeyRange, ListingPlace, Seam

# Seconds after its last word in which a listing is gone on with. Who lists anew later wants to see what is new.
FRESH: Final = 900.0
_VERSION: Final = 3
_PLACE: Final = "place"
_ROWS: Final = "rows"


class _Place(msgspec.Struct, frozen=True):
    """What is in the file `place`."""

    version: int
    # Unix time when the listing began.
    began: float
    left: list[KeyRange]
    seams: list[Seam]
    built: BuilderState


class ListingJournal:
    """The journal of one listing, which is its only user until `close`."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError, BlockingIOError where another listing has it."""
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

    def restore(self, builder: SnapshotBuilder) -> ListingPlace | None:
        """How far an earlier listing is, whose objects the builder then has. None: there is none to go on with,
        and the builder has nothing."""
        place = _read(self._directory)
        if place is not None:
            try:
                builder.restore(place.built)
            except CachefsError:
                place = None
        if place is None:
            builder.restore(BuilderState())
            return None
        self._began = place.began
        return ListingPlace(place.left, place.seams)

    @property
    def began(self) -> float:
        """Unix time when the listing began, in its first process."""
        return self._began

    def save(self, builder: SnapshotBuilder, left: list[KeyRange], seams: list[Seam]) -> None:
        """Raises OSError."""
        draft = self._directory / f"{_PLACE}-draft"
        draft.write_bytes(msgspec.msgpack.encode(_Place(_VERSION, self._began, left, seams, builder.state())))
        draft.replace(self._directory / _PLACE)

    def give_up(self) -> None:
        """Nobody can go on with this listing: the server lists in no order. Raises OSError."""
        (self._directory / _PLACE).unlink(missing_ok=True)

    def forget(self) -> None:
        """The listing has come to its end."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        self.rows.close()
        os.close(self._lock)


def journal_path(state_dir: Path, url: str, block_size: int, options: OriginOptions) -> Path:
    """Where the journal is of a listing that is asked for so."""
    asked = msgspec.json.encode((url, block_size, options))
    return _listings(state_dir) / hashlib.blake2b(asked, digest_size=16).hexdigest()


def remove_stale(state_dir: Path) -> None:
    """Remove the journals that nobody will go on with. Those in use stay."""
    for directory in _journals(state_dir):
        with contextlib.suppress(OSError):
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who has just made it has not locked it yet.
                if not _is_fresh(directory):
                    shutil.rmtree(directory)
            finally:
                os.close(lock)


def _listings(state_dir: Path) -> Path:
    return state_dir / "listings"


def _journals(state_dir: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from _listings(state_dir).iterdir()


def _is_fresh(path: Path) -> bool:
    try:
        return abs(time.time() - path.stat().st_mtime) < FRESH
    except OSError:
        return False


def _read(directory: Path) -> _Place | None:
    """What is left of a listing that ended a short while ago."""
    if not _is_fresh(directory / _PLACE):
        return None
    try:
        place = msgspec.msgpack.decode((directory / _PLACE).read_bytes(), type=_Place)
    except (OSError, msgspec.MsgspecError):
        return None
    return place if place.version == _VERSION else None
