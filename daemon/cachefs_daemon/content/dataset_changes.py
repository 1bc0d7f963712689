"""Applies changes of a dataset (another snapshot, other options, removal) to its pins, its quota and its blocks."""

from collections.abc import Callable

from cachefs.errors import Busy
from cachefs.messages import DatasetReached, DatasetSet, Freed
from cachefs.snapshot import Snapshot
from cachefs_daemon.content import inventory
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.datasets import reaching
from cachefs_daemon.datasets.catalog import Catalog, Dataset
from cachefs_daemon.origin.base import Origin
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.runtime.unbroken import unbroken
from cachefs_daemon.store.storage import Storage


class DatasetChanges:
    """Changes datasets, and follows changes from other nodes. Used on the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        pins: Pins,
        quotas: DatasetQuotas,
        storage: Storage,
        threads: Threads,
        is_read_elsewhere: Callable[[str], bool],
    ) -> None:
        """is_read_elsewhere: returns whether another node reads a snapshot, which this node then keeps."""
        self._catalog = catalog
        self._pins = pins
        self._quotas = quotas
        self._storage = storage
        self._threads = threads
        self._is_read_elsewhere = is_read_elsewhere

    async def follow(self, dataset: Dataset, before: Snapshot | None) -> None:
        """Follow a change of the dataset's snapshot from *before*, or a new file of the same snapshot."""
        if before is not None and before.is_replaced():
            before = None
        await self._pins.follow(before, dataset.record.pins)
        await self._quotas.follow(dataset)

    async def follow_limits(self, dataset: Dataset) -> None:
        """Follow a change of the dataset's limits."""
        await self._quotas.follow(dataset)

    async def set_options(self, request: DatasetSet) -> DatasetReached:
        """Change the options by which a dataset's origin is reached. Cached blocks stay.

        Raises NotFound, ConfigError, Busy, and errors of the origin if it does not respond with the new options.
        """
        dataset, catalog = self._catalog.get(request.name), self._catalog
        before = dataset.record.options
        now = reaching.changed(before, request.change)
        reaching.check_lengths(dataset.record.url, now)
        found = reaching.Look()
        if now != before:
            origin = catalog.opened(request.name, now)
            try:
                if not request.unchecked and dataset.current is not None:
                    found = await reaching.look(origin, dataset.current)
                    reaching.check(request.name, found)
                if catalog.find(request.name) is not dataset or dataset.record.options != before:
                    raise Busy(f"dataset {request.name} was changed meanwhile; look at it, and try again")
            except BaseException:
                await origin.close()
                raise
            named = reaching.name_kept(dataset.origin, origin, dataset.record.named)
            way = reaching.OriginWay(now, named, catalog.stamp())
            await unbroken(self._reach(request.name, way, origin))
        view = catalog.view(dataset)
        return DatasetReached(dataset=view, before=before, now=now, looked_at=found.looked_at, alike=found.alike)

    async def follow_way(self, name: str, way: reaching.OriginWay) -> None:
        """Apply options that another node of the cluster has set. Raises NotFound, CachefsError."""
        await unbroken(self._reach(name, way, self._catalog.opened(name, way.options)))

    async def _reach(self, name: str, way: reaching.OriginWay, origin: Origin) -> None:
        """Replace record and origin. They must not differ, so callers shield this from cancellation. Raises NotFound,
        CachefsError."""
        try:
            await self._catalog.reach(name, way, origin)
        except BaseException:
            await origin.close()
            raise

    async def remove(self, name: str) -> Freed:
        """Remove a dataset. Keeps blocks that are shared with other datasets, or with snapshots that other nodes still
        read. Raises NotFound, Busy."""
        removed = self._catalog.generations(self._catalog.get(name))
        dataset = await self._catalog.remove(name, self._is_read_elsewhere)
        await self._pins.follow(dataset.current, dataset.record.pins)
        self._quotas.removed(name)
        kept = self._catalog.read_snapshots(lambda _: True)
        blocks, index = self._storage.blocks, self._storage.index
        freed = await self._threads.background(inventory.evict_unshared, blocks, index, removed, kept)
        if not self._catalog.reaches_by(dataset.origin):
            await dataset.origin.close()
        return freed
