"""The daemon's state directory: who owns it, which index file is in use, and whether that can be trusted.

    lock              held by flock while a daemon runs; contains its pid
    index-<n>.lmdb    the highest number is in use; each start makes a new one, and mounts may still map the old
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

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_INDEX_NAME: Final = re.compile(r"index-(\d+)\.lmdb")


class StateDirectory:
    """The state directory of a running daemon, which owns it until `close`."""

    def __init__(self, directory: Path) -> None:
        """Raises Busy where another daemon owns it, ConfigError where it cannot be used."""
        self.directory = directory
        self._running = directory / "running"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(f"state_dir {directory} cannot be used: {error.strerror}; choose another") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            raise Busy(
                f"state_dir {directory} belongs to a running daemon (pid {owner}); stop that one or choose another"
            ) from None

    def index_paths(self) -> list[Path]:
        """Index files, newest last."""
        found = [
            (int(match[1]), path) for path in self.directory.iterdir() if (match := _INDEX_NAME.fullmatch(path.name))
        ]
        return [path for _, path in sorted(found)]

    def new_index_path(self) -> Path:
        """Path for the next index, with a number higher than that of any index here."""
        paths = self.index_paths()
        number = int(paths[-1].stem.partition("-")[2]) + 1 if paths else 1
        return self.directory / f"index-{number}.lmdb"

    def remove_index(self, path: Path) -> None:
        """Remove an index and its lock file. Who has it open keeps it."""
        for file in (path, path.with_name(path.name + "-lock")):
            file.unlink(missing_ok=True)

    def torn(self) -> bool:
        """Was the machine restarted under a running daemon?"""
        try:
            return self._running.read_bytes() != _BOOT_ID.read_bytes()
        except FileNotFoundError:
            return False

    def mark_running(self) -> None:
        """From now on the index may differ from what is on disk. Raises ConfigError where the directory cannot be
        written."""
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)
            with self._running.open("wb") as file:
                file.write(_BOOT_ID.read_bytes())
                file.flush()
                os.fsync(file.fileno())
            self._sync()
        except OSError as error:
            raise ConfigError(f"state_dir {self.directory} cannot be written: {error.strerror}") from None

    def mark_clean(self) -> None:
        """From now on the index is what is on disk."""
        self._running.unlink(missing_ok=True)
        self._sync()

    def close(self) -> None:
        """Let another daemon have the directory."""
        os.close(self._lock)

    def _sync(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
