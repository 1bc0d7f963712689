"""Creates the parts that carry out the commands of administrators."""

from pathlib import Path

from cachefs_daemon.content.dataset_changes import DatasetChanges
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.content.warmup import Warmups
from cachefs_daemon.content.warmup_persistence import WarmupPersistence
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.ports import RemoteReaders
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage


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
