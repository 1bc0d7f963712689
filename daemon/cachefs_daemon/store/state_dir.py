"""The daemon's state directory: its owner, the index file in use, and whether that file can be trusted.

    format            the version of all that is in the directory (cachefs_daemon.store.state_format)
    lock              held by flock while a daemon runs; contains its pid
    index-<n>.lmdb    the highest number is in use; each start makes a new one, and mounts may still map the old
    index-draft.lmdb  the next one, while it is made; one that a start finds is removed
    running           exists while the index may differ from what is on disk; contains the boot id

The index is not synced while in use. What the kernel holds outlives a killed process but not the machine, so an index
left `running` by another boot may be torn.
"""

import fcntl
import os
import re
from pathlib import Path
from typing import Final

from cachefs.errors import Busy, ConfigError
from cachefs_daemon.store import state_format
from cachefs_daemon.store.owned_directory import ConfiguredDirectory, open_owned

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_INDEX_NAME: Final = re.compile(r"index-(\d+)\.lmdb")
_LOCK_SUFFIX: Final = "-lock"  # what LMDB appends for the name of the lock file
_DRAFT: Final = "index-draft.lmdb"
_RUNNING: Final = "running"
_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def state_directory(directory: Path) -> ConfiguredDirectory:
    """Return the state directory, for messages and checks."""
    return ConfiguredDirectory("state_dir", directory)


def snapshots_directory(directory: Path) -> ConfiguredDirectory:
    """Return the directory of the snapshots in the state directory."""
    return ConfiguredDirectory("snapshots in state_dir", directory / "snapshots")


def is_index(name: str) -> bool:
    """Return whether *name* is that of an index, or of an index's lock file."""
    return _INDEX_NAME.fullmatch(name.removesuffix(_LOCK_SUFFIX)) is not None


class StateDirectory:
    """The state directory of a running daemon, which owns it until `close`."""

    def __init__(self, directory: Path) -> None:
        """Raises Busy where another daemon owns it, ConfigError where it cannot be used."""
        self.directory = directory
        self.draft_path = directory / _DRAFT  # the next index, while it is made
        self._configured = state_directory(directory)
        self._descriptor = open_owned(self._configured)
        try:
            self._require_files()
            self._check_format()
            self._lock = self._open("lock", os.O_RDWR | os.O_CREAT)
        except (ConfigError, OSError) as error:
            os.close(self._descriptor)
            raise self._unusable_error(error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.close()
            raise Busy(
                f"state_dir {directory} belongs to a running daemon (pid {owner}); stop that one or choose another"
            ) from None

    def index_paths(self) -> list[Path]:
        """Return the index files, newest last."""
        found = [
            (int(match[1]), name) for name in os.listdir(self._descriptor) if (match := _INDEX_NAME.fullmatch(name))
        ]
        return [self.directory / name for _, name in sorted(found)]

    def new_index_path(self) -> Path:
        """Return the path of the next index, with a number higher than that of any index here."""
        paths = self.index_paths()
        number = int(paths[-1].stem.partition("-")[2]) + 1 if paths else 1
        return self.directory / f"index-{number}.lmdb"

    def install_index(self, draft: Path, path: Path) -> None:
        """Give a complete index its name. Raises ConfigError."""
        try:
            draft.with_name(draft.name + _LOCK_SUFFIX).unlink(missing_ok=True)
            draft.rename(path)
        except OSError as error:
            raise self._unusable_error(error) from None

    def remove_index(self, path: Path) -> None:
        """Remove an index and its lock file. Processes that have it open keep it."""
        for file in (path, path.with_name(path.name + _LOCK_SUFFIX)):
            file.unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Remove the files of a start that did not complete. Raises ConfigError."""
        known = {path.name for path in self.index_paths()}
        try:
            for name in os.listdir(self._descriptor):
                if name.startswith("index-") and name.removesuffix(_LOCK_SUFFIX) not in known:
                    os.unlink(name, dir_fd=self._descriptor)
        except OSError as error:
            raise self._unusable_error(error) from None

    def is_torn(self) -> bool:
        """Return whether the machine was restarted under a running daemon. Raises ConfigError where that is unknown."""
        try:
            running = self._open(_RUNNING, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unusable_error(error) from None
        try:
            return os.pread(running, 64, 0) != _BOOT_ID.read_bytes()
        finally:
            os.close(running)

    def mark_running(self) -> None:
        """Record that the index may differ from what is on disk from now on. Raises ConfigError where the directory
        cannot be written."""
        try:
            state_format.mark(self.directory)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)
            running = self._open(_RUNNING, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                os.write(running, _BOOT_ID.read_bytes())
                os.fsync(running)
            finally:
                os.close(running)
            os.fsync(self._descriptor)
        except OSError as error:
            raise ConfigError(
                f"state_dir {self.directory} cannot be written: {error.strerror}; free space there, or choose another"
            ) from None

    def mark_clean(self) -> None:
        """Record that the index is on disk."""
        (self.directory / _RUNNING).unlink(missing_ok=True)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Release the directory for another daemon."""
        os.close(self._lock)
        os.close(self._descriptor)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | _SAFELY, 0o640, dir_fd=self._descriptor)

    def _require_files(self) -> None:
        """Refuse anything but plain files where files are expected: it would cause errors later."""
        with os.scandir(self._descriptor) as entries:
            for entry in entries:
                ours = entry.name in ("lock", _RUNNING) or entry.name.startswith("index-")
                if ours and not entry.is_file(follow_symlinks=False):
                    raise self._configured.unusable_error(
                        f"{entry.name} in it is not a plain file; remove it, or choose another"
                    )

    def _check_format(self) -> None:
        """Raises ConfigError, OSError."""
        try:
            state_format.check(self.directory)
        except ConfigError as error:
            raise self._configured.unusable_error(str(error)) from None

    def _unusable_error(self, error: ConfigError | OSError) -> ConfigError:
        if isinstance(error, ConfigError):
            return error
        about = f"{error.filename}: " if isinstance(error.filename, str) else ""
        return self._configured.unusable_error(f"{about}{error.strerror}; mend that, or choose another")
