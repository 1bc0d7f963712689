"""What the daemon does for mounts and cachectl: one coroutine, or async generator where it streams, per rpc method."""

import asyncio
import contextlib
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Final

from cachefs import __version__
from cachefs.block import Location
from cachefs.errors import Busy, CachefsError
from cachefs.job_messages import JobEpoch, JobList, JobName, JobProgress, JobPublish, JobView, StallRows
from cachefs.messages import (
    CachedFiles,
    DatasetAdd,
    DatasetDetail,
    DatasetLimit,
    DatasetList,
    DatasetName,
    DatasetView,
    Empty,
    Fetch,
    Fetched,
    FetchedBlock,
    Freed,
    ListingProgress,
    MountReport,
    NodeView,
    Pinned,
    Problem,
    Selection,
    Status,
    TierStatus,
    VerifyProgress,
    Warmup,
    WarmupProgress,
)
from cachefs.push_messages import PushDone, PushOrder, PushReply, PushSubscribe
from cachefs_daemon.config import Config
from cachefs_daemon.content import inventory, verify
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.content.warmup import Warmups
from cachefs_daemon.datasets import selection
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.prefetcher import Prefetcher
from cachefs_daemon.fetch.slots import FetchSlots
from cachefs_daemon.jobs.epoch_loader import EpochLoader
from cachefs_daemon.jobs.persistence import JobPersistence
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.mounts.persistence import MountPersistence
from cachefs_daemon.mounts.pushers import Pushers
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore, TierUsage

MAINTENANCE_SECONDS: Final = 2.0
# MountRegistry report at least every 10 s. Before all have, nobody knows which snapshots they use.
PRUNE_AFTER: Final = 30.0


class Service:
    """The parts of a node put together. Made before the event loop starts, used on it."""

    def __init__(self, config: Config, store: BlockStore, threads: Threads) -> None:
        """Raises CachefsError."""
        self._config = config
        self._store = store
        self._threads = threads
        self._instance = uuid.uuid4().hex
        self._started = time.monotonic()
        self._errors = ErrorLog()
        self._mounts = MountRegistry()
        self._mount_keeper = MountPersistence(self._mounts, config.daemon.state_dir, threads)
        self._datasets = Catalog(config.daemon.state_dir, config.daemon.block_size, config.origin_settings(), threads)
        gate = FetchSlots(config.origin.max_connections, config.origin.max_bytes_in_flight)
        self._fetcher = Fetcher(store, self._datasets.source, threads, gate, self._errors, config.daemon.read_deadline)
        self._warmups = Warmups(self._fetcher, threads)
        self._pins = Pins(store, self._datasets, threads)
        self._limits = DatasetQuotas(store, self._datasets, threads)
        self._jobs = JobRegistry(self._datasets, store, EpochLoader(store, self._fetcher, threads))
        self._job_keeper = JobPersistence(self._jobs, config.daemon.state_dir, threads)
        self._pushing = Pushers(store, self._jobs.readers, self._shows)
        self._prefetcher = Prefetcher(
            store,
            self._fetcher,
            gate,
            threads,
            config.prefetch_settings(),
            self._jobs.margin,
            self._jobs.fetched,
            self._pushing.is_active,
        )
        self._background: list[asyncio.Task[None]] = []
        self._tiers = {
            tier.name: str(tier.directory) for tier in store.usage()
        }  # they do not change while the daemon runs

    async def start(self) -> None:
        await self._mount_keeper.restore()
        await self._pins.apply()
        await self._limits.apply()
        await self._job_keeper.restore()
        self._background = [
            asyncio.create_task(part.run()) for part in (self._prefetcher, self._job_keeper, self._mount_keeper)
        ]

    async def maintain(self) -> None:
        """Runs as long as the daemon."""
        while True:
            await asyncio.sleep(MAINTENANCE_SECONDS)
            try:
                await self._threads.background(self._store.maintain)
                self._mounts.forget_gone()
                self._pushing.forget_gone(self._mounts.lives)
                self._pushing.show_cached()
                await self._jobs.end_lapsed()
                if time.monotonic() - self._started > PRUNE_AFTER:
                    await self._datasets.prune(self._mounts.may_use)
            except CachefsError as error:
                self._errors.add("maintenance", str(error))
            except Exception as error:
                self._errors.add("maintenance", f"internal error ({error!r})", bug=error)

    async def stop_background(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._warmups.close()
        await self._jobs.close()

    async def close(self) -> None:
        await self._fetcher.close()
        await self._datasets.close()

    # --- mounts -------------------------------------------------------------------------------------------------

    async def report(self, report: MountReport) -> NodeView:
        self._mounts.report(report)
        if report.accessed or report.stalls:
            tripped = self._jobs.saw(report.id, report.accessed, report.stalls, self._pushing.pages_of(report.id))
            self._pushing.saw(report.id, report.accessed, tripped)
            self._prefetcher.wake()
        if report.accessed:
            await self._threads.run(self._store.accessed, report.accessed)
        return await self.node(Empty())

    def _shows(self, mount: str, snapshot: str) -> bool:
        return self._mounts.shows(mount, snapshot, [dataset.record for dataset in self._datasets])

    async def node(self, _: Empty) -> NodeView:
        usage = await self._threads.run(self._store.usage)
        return NodeView(
            instance=self._instance,
            index=str(self._store.index_path),
            tiers=self._tiers,
            datasets=self._datasets.readable(),
            capacity=sum(tier.limit for tier in usage),
            used=sum(tier.used for tier in usage),
            read_deadline=self._config.daemon.read_deadline,
        )

    async def push(self, request: PushSubscribe) -> AsyncGenerator[PushOrder, None]:
        async with contextlib.aclosing(self._pushing.orders(request)) as orders:
            async for order in orders:
                yield order

    async def push_report(self, report: PushDone) -> PushReply:
        self._pushing.report(report)
        return PushReply()

    async def fetch(self, request: Fetch) -> Fetched:
        if request.ahead:
            await self._fetcher.hint(request.blocks)
            return Fetched(blocks=[])
        # The caller's own timer runs as long as the deadline: answer a little before, so that it learns the reason.
        patience = request.deadline - min(1.0, request.deadline / 20)
        return Fetched(blocks=[_answer(outcome) for outcome in await self._fetcher.demand(request.blocks, patience)])

    # --- jobs ---------------------------------------------------------------------------------------------------

    async def job_publish(self, request: JobPublish) -> JobView:
        return self._jobs.publish(request)

    async def job_epoch(self, request: JobEpoch) -> Empty:
        self._jobs.epoch(request)
        return Empty()

    async def job_progress(self, request: JobProgress) -> Empty:
        self._jobs.progress(request)
        self._pushing.wake()
        return Empty()

    async def job_list(self, _: Empty) -> JobList:
        return JobList(jobs=[self._jobs.view(job, self._pushing.ahead) for job in self._jobs])

    async def job_show(self, request: JobName) -> JobView:
        return self._jobs.view(self._jobs.get(request.job), self._pushing.ahead)

    async def job_cancel(self, request: JobName) -> Empty:
        self._jobs.cancel(request.job)
        return Empty()

    async def stall_list(self, request: JobName) -> StallRows:
        if request.job:
            self._jobs.get(request.job)
        return StallRows(rows=self._jobs.stalls.rows(request.job))

    # --- state of the node --------------------------------------------------------------------------------------

    async def status(self, _: Empty) -> Status:
        usage = await self._threads.run(self._store.usage)
        counters = self._mounts.counters()
        requests, failed = self._datasets.origin_requests()
        blocks, size = self._fetcher.in_flight
        return Status(
            instance=self._instance,
            version=__version__,
            pid=os.getpid(),
            uptime=time.monotonic() - self._started,
            state_dir=str(self._config.daemon.state_dir),
            tiers=[_tier_status(tier, counters) for tier in usage],
            datasets=len(self._datasets),
            misses=counters["misses"],
            fetched_blocks=self._fetcher.fetched_blocks,
            fetched_bytes=self._fetcher.fetched_bytes,
            origin_requests=requests,
            origin_errors=failed,
            in_flight_blocks=blocks,
            in_flight_bytes=size,
            repairs=self._store.repairs,
            mounts=[self._pushing.shown(view) for view in self._mounts.views()],
            warmups=len(self._warmups),
            index_blocks=sum(tier.blocks for tier in usage),
            errors=self._errors.views(),
        )

    async def verify(self, _: Empty) -> AsyncGenerator[VerifyProgress, None]:
        async for progress in verify.verify(self._store, self._threads):
            yield progress

    # --- datasets -----------------------------------------------------------------------------------------------

    async def dataset_list(self, _: Empty) -> DatasetList:
        return DatasetList(datasets=[self._datasets.view(dataset) for dataset in self._datasets])

    async def dataset_show(self, request: DatasetName) -> DatasetDetail:
        dataset = self._datasets.get(request.name)
        snapshot = self._datasets.snapshot(request.name)
        return DatasetDetail(
            dataset=self._datasets.view(dataset),
            block_size=snapshot.block_size,
            options=dataset.record.options,
            cached=await self._threads.background(inventory.cached_bytes, self._store, snapshot),
            pinned=dataset.record.pins,
            problems=[Problem(key=key, reason=reason) for key, reason in snapshot.problems()],
            snapshots=[known.id for known in dataset.record.snapshots],
        )

    async def dataset_add(self, request: DatasetAdd) -> AsyncGenerator[ListingProgress, None]:
        async with contextlib.aclosing(self._datasets.add(request)) as steps:
            async for progress in steps:
                yield progress

    async def dataset_refresh(self, request: DatasetName) -> AsyncGenerator[ListingProgress, None]:
        dataset = self._datasets.get(request.name)
        before = dataset.current
        async with contextlib.aclosing(self._datasets.refresh(request.name)) as steps:
            async for progress in steps:
                if progress.dataset is not None:
                    await self._pins.follow(before, dataset.record.pins)
                    await self._limits.follow(dataset)
                yield progress

    async def dataset_remove(self, request: DatasetName) -> Freed:
        """Blocks that other datasets have as well stay."""
        mount = self._mounts.using(request.name)
        if mount is not None:
            raise Busy(f"dataset {request.name} is mounted at {mount.mountpoint} (pid {mount.pid}); unmount that first")
        removed = self._datasets.generations(self._datasets.get(request.name))
        dataset = await self._datasets.remove(request.name)
        await self._pins.follow(dataset.current, dataset.record.pins)
        self._limits.removed(request.name)
        kept = [snapshot for other in self._datasets for snapshot in self._datasets.generations(other)]
        freed = await self._threads.background(inventory.evict_unshared, self._store, removed, kept)
        await dataset.origin.close()
        return freed

    async def dataset_limit(self, request: DatasetLimit) -> DatasetView:
        return await self._limits.change(request)

    # --- blocks of datasets -------------------------------------------------------------------------------------

    async def warmup(self, request: Warmup) -> AsyncGenerator[WarmupProgress, None]:
        snapshot = self._datasets.snapshot(request.dataset)
        async with contextlib.aclosing(self._warmups.run(snapshot, request)) as steps:
            async for progress in steps:
                yield progress

    async def evict(self, request: Selection) -> Freed:
        snapshot = self._datasets.snapshot(request.dataset)
        files = await self._threads.background(selection.files, snapshot, request.paths)
        return await self._threads.background(inventory.evict, self._store, files)

    async def pin(self, request: Selection) -> Pinned:
        return await self._pins.pin(request)

    async def unpin(self, request: Selection) -> Pinned:
        return await self._pins.unpin(request)

    async def cached(self, request: Selection) -> AsyncGenerator[CachedFiles, None]:
        snapshot = self._datasets.snapshot(request.dataset)
        pins = self._datasets.get(request.dataset).record.pins
        files = await self._threads.background(selection.files, snapshot, request.paths)
        pages = inventory.pages(self._store, snapshot, files, pins)
        while (page := await self._threads.background(next, pages, None)) is not None:
            yield page


def _answer(outcome: Location | CachefsError) -> FetchedBlock:
    if isinstance(outcome, CachefsError):
        return FetchedBlock(location=b"", errno=outcome.errno, message=str(outcome))
    return FetchedBlock(location=outcome.pack())


def _tier_status(tier: TierUsage, counters: Counter[str]) -> TierStatus:
    return TierStatus(
        name=tier.name,
        directory=str(tier.directory),
        budget=tier.budget,
        limit=tier.limit,
        used=tier.used,
        blocks=tier.blocks,
        segments=tier.segments,
        hits=counters[f"hits_{tier.name}"],
        hit_bytes=counters[f"hit_bytes_{tier.name}"],
        evicted=tier.evicted,
        policy=tier.policy,
        problem=tier.problem,
    )
