"""Quotas of datasets: limits on the share of each tier, and on the age of blocks. They outlive restarts and follow
refreshes."""

import asyncio
import logging
import math
import time
from typing import Final

import numpy as np

from cachefs.errors import ConfigError
from cachefs.messages import DatasetLimit, DatasetView
from cachefs.planning.blocks.space import NO_BLOCK, BlockSpace
from cachefs.planning.eviction.quotas import Quota
from cachefs.planning.eviction.tiering import Tiering
from cachefs.snapshot import Snapshot
from cachefs_daemon.datasets.catalog import Catalog, Dataset
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.shielded import shielded
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.index_writer import IndexWriter
from cachefs_daemon.store.transfers import batches

log = logging.getLogger(__name__)

MIN_TTL: Final = 1.0  # seconds
# Keys looked up in a snapshot at once.
_PORTION: Final = 1 << 16


class DatasetQuotas:
    """Keeps the quotas of the tiers equal to the datasets' records."""

    def __init__(self, tiering: Locked[Tiering], index: IndexWriter, catalog: Catalog, threads: Threads) -> None:
        self._tiering = tiering
        self._index = index
        self._catalog = catalog
        self._threads = threads
        self._changing = asyncio.Lock()

    async def change_limits(self, request: DatasetLimit) -> DatasetView:
        """Change a dataset's quota. Excess blocks are evicted within seconds. Raises NotFound, ConfigError."""
        if request.share is not None and not 0 < request.share <= 1:
            raise ConfigError(f"share {request.share:g}: expected more than 0 and at most 1 (1: no limit)")
        if request.most is not None and request.most < 0:
            raise ConfigError(f"{request.most} bytes: expected a number of bytes, or 0 for no limit")
        if request.ttl is not None and request.ttl != 0 and not MIN_TTL <= request.ttl < math.inf:
            raise ConfigError(f"ttl {request.ttl:g} s: expected at least {MIN_TTL:g} s, or 0 for no limit")
        return await shielded(self._change(request))

    async def _change(self, request: DatasetLimit) -> DatasetView:
        async with self._changing:
            record = self._catalog.get(request.name).record
            share = record.share if request.share is None else request.share
            ttl = record.ttl if request.ttl is None else request.ttl
            most = record.most if request.most is None else request.most
            await self._catalog.set_limits(request.name, share=share, most=most, ttl=ttl)
            dataset = self._catalog.get(request.name)
            await self._apply(dataset)
            log.info(
                "dataset %s: at most %.4g and %d bytes (0: all) of each tier, ttl %.0f s (0: none)",
                request.name, share, most, ttl,
            )  # fmt: skip
            return self._catalog.view(dataset)

    async def apply_quota(self, dataset: Dataset) -> None:
        """Follow a change of the dataset's snapshot."""
        async with self._changing:
            await self._apply(dataset)

    def remove_quota(self, name: str) -> None:
        """Remove the quota of a dataset."""
        with self._tiering as tiering:
            tiering.quotas.remove_quota(name)

    async def apply_records(self) -> None:
        """Apply the quotas of all records."""
        async with self._changing:
            for dataset in sorted(self._catalog, key=lambda one: one.record.name):
                await self._apply(dataset)

    async def _apply(self, dataset: Dataset) -> None:
        record = dataset.record
        if record.share >= 1 and not record.most and not record.ttl:
            self.remove_quota(record.name)
            return
        snapshots = self._catalog.generations(dataset)
        known = frozenset(snapshot.id for snapshot in snapshots)
        with self._tiering as tiering:
            quota = Quota(record.name, known, record.share, record.ttl or math.inf, record.most or math.inf)
            tiering.quotas.set_quota(quota)
        for snapshot in snapshots:
            await self._threads.background(_count_towards_quota, self._tiering, self._index, snapshot)


def _count_towards_quota(tiering: Locked[Tiering], index: IndexWriter, snapshot: Snapshot) -> None:
    """Count the snapshot's blocks on this node towards its quota. Works on whole arrays, as a starting daemon waits for
    it."""
    space = BlockSpace.of(snapshot)
    for keys in index.key_batches(_PORTION):
        here = np.flatnonzero(space.ids(keys) != NO_BLOCK)
        for batch in batches(keys[number] for number in here.tolist()):
            with tiering as deciding:
                deciding.claim_blocks(batch, snapshot.id, time.monotonic())
