"""Applies changes of a dataset (another snapshot, other options, removal) to its pins, its quota and its blocks."""

from cachefs.errors import Busy
from cachefs.messages import DatasetSetRequest, DatasetSetResult, EvictedAmount
from cachefs.snapshot import Snapshot
from cachefs_daemon.content import inventory
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.datasets import origin_access
from cachefs_daemon.datasets.catalog import Catalog, Dataset
from cachefs_daemon.origin.base import Origin
from cachefs_daemon.ports import LOCAL_DIRECTORY, RemoteReaders
from cachefs_daemon.runtime.shielded import shielded
from cachefs_daemon.runtime.threads import Threads
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
        readers: RemoteReaders = LOCAL_DIRECTORY,
    ) -> None:
        """readers: keeps the snapshots that other nodes read."""
        self._catalog = catalog
        self._pins = pins
        self._quotas = quotas
        self._storage = storage
        self._threads = threads
        self._readers = readers

    async def follow_snapshot(self, dataset: Dataset, before: Snapshot | None) -> None:
        """Follow a change of the dataset's snapshot from *before*, or a new file of the same snapshot."""
        if before is not None and before.is_replaced():
            before = None
        await self._pins.move_pins(before, dataset.record.pins)
        await self._quotas.apply_quota(dataset)

    async def follow_limits(self, dataset: Dataset) -> None:
        """Follow a change of the dataset's limits."""
        await self._quotas.apply_quota(dataset)

    async def set_options(self, request: DatasetSetRequest) -> DatasetSetResult:
        """Change the options by which a dataset's origin is reached. Cached blocks stay.

        Raises NotFound, ConfigError, Busy, and errors of the origin if it does not respond with the new options.
        """
        dataset, catalog = self._catalog.get(request.name), self._catalog
        before = dataset.record.options
        now = origin_access.apply_change(before, request.change)
        origin_access.check_lengths(dataset.record.url, now)
        found = origin_access.ListingComparison()
        if now != before:
            origin = catalog.open_origin_of(request.name, now)
            try:
                if not request.unchecked and dataset.current is not None:
                    found = await origin_access.compare_listing(origin, dataset.current)
                    origin_access.check_any_alike(request.name, found)
                if catalog.find(request.name) is not dataset or dataset.record.options != before:
                    raise Busy(
                        f"dataset {request.name} was changed by another command meanwhile; check it, and try again"
                    )
            except BaseException:
                await origin.close()
                raise
            named = origin_access.kept_name_prefix(dataset.origin, origin, dataset.record.named)
            access = origin_access.OriginAccess(now, named, catalog.shared.stamp())
            await shielded(self._replace_origin(request.name, access, origin))
        view = catalog.view(dataset)
        return DatasetSetResult(dataset=view, before=before, now=now, looked_at=found.compared, alike=found.alike)

    async def apply_origin_access(self, name: str, access: origin_access.OriginAccess) -> None:
        """Apply options that another node of the cluster has set. Raises NotFound, CachefsError."""
        await shielded(self._replace_origin(name, access, self._catalog.open_origin_of(name, access.options)))

    async def _replace_origin(self, name: str, access: origin_access.OriginAccess, origin: Origin) -> None:
        """Replace record and origin. They must not differ, so callers shield this from cancellation. Raises NotFound,
        CachefsError."""
        try:
            await self._catalog.set_origin(name, access, origin)
        except BaseException:
            await origin.close()
            raise

    async def remove(self, name: str) -> EvictedAmount:
        """Remove a dataset. Keeps blocks that are shared with other datasets, or with snapshots that other nodes still
        read. Raises NotFound, Busy."""
        removed = self._catalog.generations(self._catalog.get(name))
        dataset = await self._catalog.remove(name, self._readers.keep_if_read)
        await self._pins.move_pins(dataset.current, dataset.record.pins)
        self._quotas.remove_quota(name)
        kept = self._catalog.read_snapshots(lambda _: True)
        blocks, index = self._storage.blocks, self._storage.index
        freed = await self._threads.background(inventory.evict_unshared, blocks, index, removed, kept)
        if not self._catalog.is_origin_used(dataset.origin):
            await dataset.origin.close()
        return freed
