"""Creates the parts that carry out the commands of administrators."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.messages import WarmupRequest
from cachefs.snapshot import Snapshot
from cachefs_daemon.content.dataset_changes import DatasetChanges
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.content.warmup import Warmups
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.ports import RemoteReaders
from cachefs_daemon.runtime.autosave import autosave, replace_file
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage

log = logging.getLogger(__name__)

FILE_NAME: Final = "warmups.msgpack"


class WarmupPersistence:
    """Saves background warmups, and starts them again with the daemon.

    One file in the state directory, replaced as a whole. A continued warmup starts over: blocks that are here cost no
    time.
    """

    def __init__(
        self, warmups: Warmups, snapshot: Callable[[str], Snapshot], state_dir: Path, threads: Threads
    ) -> None:
        """snapshot: returns the current snapshot of a dataset; raises CachefsError."""
        self._warmups = warmups
        self._snapshot = snapshot
        self._path = state_dir / FILE_NAME
        self._threads = threads

    async def restore(self) -> None:
        """Start the warmups that the previous daemon had not finished."""
        for request in await self._threads.background(_load, self._path):
            try:
                run = await self._warmups.start(self._snapshot(request.dataset), request)
            except CachefsError as error:
                log.warning("a warmup of %s is not resumed: %s", request.dataset, error)
                self._warmups.mark_unsaved()
            else:
                log.info("warmup %d of %s is resumed after the restart of the daemon", run.id, request.dataset)

    async def run(self) -> None:
        """Save changes as long as the daemon runs."""
        await autosave(self.save, "background warmups are not resumed")

    async def save(self) -> None:
        """Write the file if anything has changed. Raises OSError; the old file then stays."""
        if self._warmups.take_unsaved():
            try:
                await self._threads.background(_save, self._path, self._warmups.background_requests())
            except BaseException:
                self._warmups.mark_unsaved()
                raise


def _load(path: Path) -> list[WarmupRequest]:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=list[WarmupRequest])
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        log.warning("%s cannot be used (%s) and is ignored; background warmups are not resumed", path, error)
        return []


def _save(path: Path, requests: list[WarmupRequest]) -> None:
    replace_file(path, msgspec.msgpack.encode(requests))


class ContentParts:
    """Warm-ups, pins, quotas and changes of datasets. Used on the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        storage: Storage,
        fetcher: Fetcher,
        threads: Threads,
        readers: RemoteReaders,
        state_dir: Path,
    ) -> None:
        """readers: keeps the snapshots that other nodes read."""
        self.warmups = Warmups(fetcher, threads)
        self.pins = Pins(storage.tiering, catalog, threads)
        self.quotas = DatasetQuotas(storage.tiering, storage.index, catalog, threads)
        self.changes = DatasetChanges(catalog, self.pins, self.quotas, storage, threads, readers)
        self.warmup_persistence = WarmupPersistence(self.warmups, catalog.snapshot, state_dir, threads)

    async def apply_records(self) -> None:
        """Apply the pins and limits of all datasets after a start."""
        await self.pins.apply_records()
        await self.quotas.apply_records()
