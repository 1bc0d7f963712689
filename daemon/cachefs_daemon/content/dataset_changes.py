"""What follows where a dataset has another snapshot, or is removed: for its pins, its quota and its blocks."""

from cachefs.messages import Freed
from cachefs.snapshot import Snapshot
from cachefs_daemon.content import inventory
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.datasets.catalog import Catalog, Dataset
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage


class DatasetChanges:
    """Used on the event loop."""

    def __init__(self, catalog: Catalog, pins: Pins, quotas: DatasetQuotas, storage: Storage, threads: Threads) -> None:
        self._catalog = catalog
        self._pins = pins
        self._quotas = quotas
        self._storage = storage
        self._threads = threads

    async def follow(self, dataset: Dataset, before: Snapshot | None) -> None:
        """A dataset has another snapshot than *before*, or the same in a new file."""
        if before is not None and before.is_replaced():
            before = None
        await self._pins.follow(before, dataset.record.pins)
        await self._quotas.follow(dataset)

    async def follow_limits(self, dataset: Dataset) -> None:
        """A dataset has other limits."""
        await self._quotas.follow(dataset)

    async def remove(self, name: str) -> Freed:
        """Remove a dataset. Blocks that other datasets have as well stay. Raises NotFound, Busy."""
        removed = self._catalog.generations(self._catalog.get(name))
        dataset = await self._catalog.remove(name)
        await self._pins.follow(dataset.current, dataset.record.pins)
        self._quotas.removed(name)
        kept = [snapshot for other in self._catalog for snapshot in self._catalog.generations(other)]
        blocks, index = self._storage.blocks, self._storage.index
        freed = await self._threads.background(inventory.evict_unshared, blocks, index, removed, kept)
        await dataset.origin.close()
        return freed
