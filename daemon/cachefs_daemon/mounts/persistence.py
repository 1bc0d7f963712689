"""Keeps the list of mounts on disk, so that a new daemon knows the mounts before they report.

The list is one JSON file in the state directory, replaced as a whole. A file that cannot be read is ignored: each mount
reports within 10 s.
"""

import logging
from pathlib import Path
from typing import Final

import msgspec

from cachefs_daemon.mounts.registry import MountRecord, MountRegistry
from cachefs_daemon.runtime.autosave import autosave, replace_file
from cachefs_daemon.runtime.threads import Threads

log = logging.getLogger(__name__)

FILE_NAME: Final = "mounts.json"


class MountPersistence:
    """Saves a registry of mounts, and restores it when the daemon starts."""

    def __init__(self, mounts: MountRegistry, state_dir: Path, threads: Threads) -> None:
        self._mounts = mounts
        self._path = state_dir / FILE_NAME
        self._threads = threads

    async def restore(self) -> None:
        """Restore the mounts of the previous daemon."""
        self._mounts.restore(await self._threads.background(_load, self._path))

    async def run(self) -> None:
        """Save changes as long as the daemon runs."""
        await autosave(self.save, "mounts are unknown until they report")

    async def save(self) -> None:
        """Write the file if anything has changed. Raises OSError; the old file then stays."""
        if self._mounts.take_unsaved():
            try:
                await self._threads.background(_save, self._path, self._mounts.records())
            except BaseException:
                self._mounts.mark_unsaved()
                raise


def _load(path: Path) -> list[MountRecord]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[MountRecord])
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        log.warning("%s cannot be used (%s) and is ignored; mounts are unknown until they report", path, error)
        return []


def _save(path: Path, records: list[MountRecord]) -> None:
    """Write the file without fsync: no mount outlives the machine."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(records), indent=1))
