"""The open snapshots of this node, with the origins of their files."""

import contextlib
import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs import snapshot as snapshots
from cachefs.block import block_count, block_key, block_length
from cachefs.errors import CachefsError, ConfigError, NotFound, SnapshotDamaged
from cachefs.messages import BlockRef
from cachefs.sizes import format_size
from cachefs.snapshot import Snapshot
from cachefs_daemon.datasets.any_origin import combine_origins
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.origin.base import ObjectRange, Origin
from cachefs_daemon.runtime import descriptors

log = logging.getLogger(__name__)

# The share of the daemon's open files that may be snapshots. Segments and connections need the rest.
SHARE_OF_DESCRIPTORS: Final = 0.75


@dataclass(slots=True)
class _OpenSnapshot:
    """An open snapshot.

    It is never closed explicitly, since a thread may be reading it, but when the last reference to it goes.
    """

    snapshot: Snapshot
    # The origins of the datasets that have the snapshot; and an origin that reads from any of them.
    origins: list[Origin]
    any_origin: Origin

    @classmethod
    def from_origins(cls, snapshot: Snapshot, origins: list[Origin]) -> "_OpenSnapshot":
        return cls(snapshot, origins, combine_origins(origins))


class OpenSnapshots:
    """Opens snapshots: files in one directory, shared by all datasets with the same listing.

    Changed on the event loop only; `block_source` may be called in any thread.
    """

    def __init__(self, directory: Path, block_size: int) -> None:
        """Raises CachefsError where the directory cannot be used."""
        self.directory = directory
        self.block_size = block_size  # bytes of the blocks of new snapshots, and the largest that this node accepts
        # by id of a snapshot that was dropped: the reason; replaced, as `_open_snapshots` is
        self._damaged: dict[str, str] = {}
        self._open_listeners: list[Callable[[str], None]] = []
        self._incoming: set[Path] = set()  # files that are being received from other nodes
        self._open_snapshots: dict[
            str, _OpenSnapshot
        ] = {}  # by snapshot id; replaced, not shrunk, for the threads that read it
        try:
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            raise CachefsError(f"{directory} cannot be used: {error.strerror}; move it away") from None

    def add_open_listener(self, listener: Callable[[str], None]) -> None:
        """Call *listener* with the id of each newly opened snapshot from now on."""
        self._open_listeners.append(listener)

    def path(self, snapshot_id: str) -> Path:
        """Return the path of a snapshot's file."""
        return self.directory / f"{snapshot_id}{snapshots.SUFFIX}"

    def file_size(self, snapshot_id: str) -> int:
        """Return the bytes of a snapshot's file; 0 where it does not exist."""
        try:
            return self.path(snapshot_id).stat().st_size
        except OSError:
            return 0

    def get(self, snapshot_id: str) -> Snapshot | None:
        """Return an open snapshot, or None."""
        opened = self._open_snapshots.get(snapshot_id)
        return opened.snapshot if opened is not None else None

    def open_snapshot(self, snapshot_id: str, origin: Origin) -> Snapshot:
        """Open a snapshot, if it is not open yet, and add *origin*, which has its files. Raises SnapshotDamaged,
        ConfigError, and CachefsError where too many are open."""
        opened = self._open_snapshots.get(snapshot_id)
        if opened is None:
            if len(self._open_snapshots) >= descriptors.open_file_limit() * SHARE_OF_DESCRIPTORS:
                raise CachefsError(
                    f"snapshot {snapshot_id} is not opened, since {len(self._open_snapshots)} are open with a limit of "
                    f"{descriptors.open_file_limit()} open files; raise the hard limit (LimitNOFILE, ulimit -n)"
                )
            opened = self._open_snapshots[snapshot_id] = _OpenSnapshot.from_origins(
                self._open_file(snapshot_id), [origin]
            )
            for listener in self._open_listeners:
                listener(snapshot_id)
        elif opened.snapshot.is_replaced():
            self._reopen(snapshot_id, opened)
        opened = self._open_snapshots[snapshot_id]
        if origin not in opened.origins:
            opened = self._open_snapshots[snapshot_id] = _OpenSnapshot.from_origins(
                opened.snapshot, [*opened.origins, origin]
            )
        self._damaged = {lost: why for lost, why in self._damaged.items() if lost != snapshot_id}
        return opened.snapshot

    @contextlib.contextmanager
    def receive_file(self) -> Iterator[Path]:
        """Create a file for a snapshot from another node, which is removed after the block unless it was `install_file`
        in its place. Raises CachefsError."""
        try:
            fd, name = tempfile.mkstemp(prefix=".receiving-", suffix=snapshots.SUFFIX, dir=self.directory)
        except OSError as error:
            raise CachefsError(f"{self.directory} cannot be written: {error.strerror}") from None
        os.close(fd)
        path = Path(name)
        self._incoming.add(path)
        try:
            yield path
        finally:
            self._incoming.discard(path)
            path.unlink(missing_ok=True)

    def install_file(self, received: Path, snapshot_id: str) -> None:
        """Move a *received* file to the place of this snapshot. A valid file that is there stays, since mounts have it
        open. May be called in any thread. Raises CachefsError."""
        path = self.path(snapshot_id)
        try:
            with contextlib.suppress(CachefsError):
                snapshots.verify(path)
                return
            with received.open("rb") as file:
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            received.rename(path)
        except OSError as error:
            raise CachefsError(f"{path} cannot be written: {error.strerror}") from None

    def _open_file(self, snapshot_id: str) -> Snapshot:
        """Raises SnapshotDamaged, ConfigError."""
        snapshot = Snapshot(self.path(snapshot_id))
        if snapshot.block_size > self.block_size:
            raise ConfigError(
                f"snapshot {snapshot_id} has blocks of {format_size(snapshot.block_size)}, larger than "
                "daemon.block_size; refresh the dataset to list it again"
            )
        return snapshot

    def find_replaced(self) -> dict[str, str]:
        """Return the open snapshots whose files have changed on disk (truncated, written to or replaced), each with the
        reason for which the new file is invalid, or "". May be called in any thread; reads those files. Call every few
        seconds: see `Snapshot.is_replaced`."""
        replaced = [one for one, opened in list(self._open_snapshots.items()) if opened.snapshot.is_replaced()]
        return {one: self._invalid_reason(one) for one in replaced}

    def _invalid_reason(self, snapshot_id: str) -> str:
        try:
            snapshots.verify(self.path(snapshot_id))
        except CachefsError as error:
            return str(error)
        except OSError as error:
            return f"{self.path(snapshot_id)} cannot be read: {error.strerror}"
        return ""

    def reopen_replaced(self, replaced: Mapping[str, str]) -> list[str]:
        """Open the files that `find_replaced` has found. Return the errors; snapshots with errors are dropped."""
        problems = []
        for snapshot_id, why_not in replaced.items():
            opened = self._open_snapshots.get(snapshot_id)
            if opened is None:
                continue
            try:
                if why_not:
                    raise SnapshotDamaged(why_not)
                self._reopen(snapshot_id, opened)
            except CachefsError as error:
                problems.append(str(error))
                self._damaged = {**self._damaged, snapshot_id: str(error)}
                self._open_snapshots = {
                    one: opened for one, opened in self._open_snapshots.items() if one != snapshot_id
                }
        return problems

    def _reopen(self, snapshot_id: str, opened: _OpenSnapshot) -> None:
        """Open the present file of a snapshot. Raises SnapshotDamaged, ConfigError."""
        self._open_snapshots[snapshot_id] = _OpenSnapshot.from_origins(self._open_file(snapshot_id), opened.origins)

    def block_source(self, ref: BlockRef) -> BlockSource:
        """Return the origin of the block *ref*. Raises NotFound, SnapshotDamaged."""
        opened = self._open_snapshots.get(ref.snapshot)
        if opened is None and ref.snapshot in self._damaged:
            raise SnapshotDamaged(self._damaged[ref.snapshot])
        if opened is None:
            raise NotFound(f"snapshot {ref.snapshot} is not on this node; mount the dataset again")
        snapshot = opened.snapshot
        entry = snapshot.entry(ref.entry)
        if not 0 <= ref.number < block_count(entry.size, snapshot.block_size):
            raise NotFound(f"entry {ref.entry} of snapshot {ref.snapshot} has no block {ref.number}")
        wanted = ObjectRange(
            key=snapshot.path_of(entry),
            version=entry.version,
            size=entry.size,
            offset=ref.number * snapshot.block_size,
            length=block_length(entry.size, snapshot.block_size, ref.number),
        )
        key = block_key(entry.content, ref.number)
        return BlockSource(key, opened.any_origin, wanted, ref.snapshot, ref.entry, ref.number)

    def renew_source(self, source: BlockSource) -> BlockSource:
        """Return the same block with the origin that is in use now."""
        opened = self._open_snapshots.get(source.snapshot)
        return source if opened is None else dataclasses.replace(source, origin=opened.any_origin)

    def keep_only(self, origins: Mapping[str, list[Origin]]) -> None:
        """Drop all snapshots but those in *origins*: by id of a snapshot, the origins that have its files."""
        self._damaged = {lost: why for lost, why in self._damaged.items() if lost in origins}
        self._open_snapshots = {
            snapshot_id: one
            if one.origins == origins[snapshot_id]
            else _OpenSnapshot.from_origins(one.snapshot, origins[snapshot_id])
            for snapshot_id, one in self._open_snapshots.items()
            if snapshot_id in origins
        }

    def remove_files(self, origins: Mapping[str, list[Origin]]) -> None:
        """Remove all files except those of the snapshots in *origins*, including files of broken listings."""
        kept = {self.path(snapshot_id) for snapshot_id in origins}
        for path in self.directory.iterdir():
            if path not in kept and path not in self._incoming and path.is_file():
                log.info("removing %s, which no dataset refers to", path)
                path.unlink(missing_ok=True)
