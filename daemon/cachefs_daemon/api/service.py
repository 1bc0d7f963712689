"""Answers the calls of mounts, jobs and cachectl.

cachefs.rpc lists the calls, each with the messages that it takes and gives. For each there is a method here of the same
name: a coroutine, or an async generator where the reply is a stream. Where jobs belong to users (`AccessRight.JOB`) it
receives the caller.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Final, TypeVar

import msgspec

from cachefs import __version__
from cachefs.cluster_messages import ClusterStatus, DrainRequest, DrainStatus, ScaleNode, ScaleStatus
from cachefs.errors import Busy, CachefsError, NotFound
from cachefs.job_messages import (
    JobEpoch,
    JobList,
    JobName,
    JobPriorityRequest,
    JobProgress,
    JobProgressResponse,
    JobPublication,
    JobView,
    StallRows,
)
from cachefs.messages import (
    MAX_DATASET_NAMES,
    CachedDatasets,
    CachedFiles,
    DatasetAddRequest,
    DatasetDetail,
    DatasetLimit,
    DatasetList,
    DatasetName,
    DatasetNames,
    DatasetSetRequest,
    DatasetSetResult,
    DatasetView,
    DirectoryEntries,
    DirectoryPath,
    Empty,
    EvictedAmount,
    EvictForecast,
    FileInfo,
    FilePath,
    ListingProgress,
    LogLevel,
    MountReport,
    NodeView,
    PinnedAmount,
    ReloadResult,
    Selection,
    Status,
    TierStatus,
    UnusableKey,
    VerifyProgress,
    WarmupForecast,
    WarmupId,
    WarmupList,
    WarmupProgress,
    WarmupRequest,
)
from cachefs.push_messages import PushAcknowledgement, PushCommand, PushReport, PushSubscription
from cachefs.read_messages import MountReadReport, ReadsRequest, ReadsResponse
from cachefs_daemon.caller import Caller
from cachefs_daemon.content import forecast, inventory, verify
from cachefs_daemon.content.cached_share import cached_share
from cachefs_daemon.content.warmup import Warmups, WarmupState
from cachefs_daemon.datasets import browsing, selection, trial
from cachefs_daemon.datasets.stamps import ChangeStamp
from cachefs_daemon.fetch.readahead import readahead_counts, readahead_views
from cachefs_daemon.jobs.job_files import JobPriority
from cachefs_daemon.jobs.owners import check_owner, check_weight, find_job_name, own_job_name
from cachefs_daemon.live_settings import LiveSettings
from cachefs_daemon.mounts.lagging import with_lag
from cachefs_daemon.node import Node
from cachefs_daemon.origin import request_counters
from cachefs_daemon.origin_settings import origin_settings
from cachefs_daemon.ports import SharedWarmups
from cachefs_daemon.reporting.scaling import planned_demands, scale_status
from cachefs_daemon.runtime.shielded import shielded
from cachefs_daemon.store.storage import TierUsage

log = logging.getLogger(__name__)

FromJob = TypeVar("FromJob", JobPublication, JobEpoch, JobProgress)

# Warmups in progress that the status tells of.
MAX_STATUS_WARMUPS: Final = 5
# Most seconds that a removal waits for the published state of other nodes.
_CATCH_UP_SECONDS: Final = 2.0
# Seconds within which an unmounted mount ends, including its workers' last reports: as long as `cachectl umount` waits.
_UNMOUNTED_SECONDS: Final = 10.0
# A mount that has been detached for longer probably has open files: `cachectl umount --lazy` waits this long.
_DETACHED_SECONDS: Final = 1.5
# Seconds within which other nodes publish the end of one of their mounts, which was unmounted a moment ago.
_UNMOUNTED_ELSEWHERE_SECONDS: Final = 4.0


class Service:
    """Answers the calls of cachefs.rpc, with a method for each. Used on the event loop. cachefs.rpc and the docstrings
    of the messages describe the calls."""

    def __init__(self, node: Node, settings: LiveSettings) -> None:
        self._node = node
        self._settings = settings
        # Directories of the tiers, by name, which do not change while the daemon runs.
        self._tiers = {tier.name: str(tier.directory) for tier in node.storage.usage()}

    # --- mounts -------------------------------------------------------------------------------------------------

    async def report(self, report: MountReport) -> NodeView:
        await self._node.lookahead.dispatcher.on_mount_report(report)
        return await self.node(Empty())

    async def node(self, _: Empty) -> NodeView:
        usage = await self._node.threads.run(self._node.storage.usage)
        return NodeView(
            instance=self._node.instance,
            index=str(self._node.storage.index.path),
            tiers=self._tiers,
            datasets=self._node.catalog.mountable(),
            capacity=sum(tier.limit for tier in usage),
            used=sum(tier.used for tier in usage),
            read_deadline=self._node.config.daemon.read_deadline,
            asking=self._node.process_reads.users_with_helpers(time.monotonic()),
        )

    async def push(self, request: PushSubscription) -> AsyncGenerator[PushCommand, None]:
        async with contextlib.aclosing(self._node.lookahead.pushers.commands(request)) as orders:
            async for order in orders:
                yield order

    async def push_report(self, report: PushReport) -> PushAcknowledgement:
        self._node.lookahead.pushers.handle_report(report)
        return PushAcknowledgement()

    async def tell_reads(self, report: MountReadReport) -> Empty:
        self._node.process_reads.add_reads(report.reads)
        return Empty()

    # --- jobs ---------------------------------------------------------------------------------------------------

    async def job_publish(self, request: JobPublication, caller: Caller) -> JobView:
        view = self._node.jobs.publish(_with_full_job_name(request, caller))
        self._node.lookahead.dispatcher.wake_fetching()
        return view

    async def job_epoch(self, request: JobEpoch, caller: Caller) -> Empty:
        self._node.jobs.add_order(_with_full_job_name(request, caller))
        self._node.lookahead.dispatcher.wake_fetching()
        return Empty()

    async def job_progress(self, request: JobProgress, caller: Caller) -> JobProgressResponse:
        return self._node.lookahead.dispatcher.on_job_progress(_with_full_job_name(request, caller))

    async def ask_reads(self, request: ReadsRequest, caller: Caller) -> ReadsResponse:
        return self._node.process_reads.take_reads(caller, request, time.monotonic())

    async def job_list(self, _: Empty) -> JobList:
        return JobList(
            jobs=[self._node.jobs.job_view(job, self._node.lookahead.pushers.bytes_ahead) for job in self._node.jobs],
            guessed=readahead_views(self._node.lookahead.readahead.book, self._node.catalog),
        )

    async def job_show(self, request: JobName, caller: Caller) -> JobView:
        job = self._node.jobs.get(self._full_job_name(request, caller))
        return self._node.jobs.job_view(job, self._node.lookahead.pushers.bytes_ahead)

    async def job_cancel(self, request: JobName, caller: Caller) -> Empty:
        name = self._full_job_name(request, caller)
        check_owner(caller, name)
        self._node.jobs.cancel(name)
        return Empty()

    async def job_priority(self, request: JobPriorityRequest, caller: Caller) -> JobView:
        name = self._full_job_name(JobName(job=request.job), caller)
        check_owner(caller, name)
        check_weight(caller, name, request.weight)
        known = self._node.jobs.get(name).priority.change
        change = ChangeStamp(known.clock + 1, nonce=secrets.randbits(32))
        self._node.jobs.set_priority(name, JobPriority(request.weight, change))
        return self._node.jobs.job_view(self._node.jobs.get(name))

    async def stall_list(self, request: JobName, caller: Caller) -> StallRows:
        name = self._full_job_name(request, caller) if request.job else ""
        if name:
            self._node.jobs.get(name)
        return StallRows(rows=self._node.jobs.stall_rows(name))

    def _full_job_name(self, request: JobName, caller: Caller) -> str:
        return find_job_name(caller, request.job, [job.name for job in self._node.jobs])

    # --- state of the node --------------------------------------------------------------------------------------

    async def status(self, _: Empty) -> Status:
        usage = await self._node.threads.run(self._node.storage.usage)
        counters = self._node.mounts.counters()
        reads = request_counters.total_counters().counters_for("read")
        blocks, size = self._node.fetcher.in_flight
        warmups = [one for one in self._node.warmups() if one.state == WarmupState.RUNNING]
        return Status(
            instance=self._node.instance,
            version=__version__,
            pid=os.getpid(),
            uptime=time.monotonic() - self._node.started,
            state_dir=str(self._node.config.daemon.state_dir),
            tiers=[_tier_status(tier, counters) for tier in usage],
            datasets=len(self._node.catalog),
            misses=counters["misses"],
            fetched_blocks=self._node.fetcher.fetched_blocks,
            fetched_bytes=self._node.fetcher.fetched_bytes,
            origin_requests=sum(read.requests for read in reads),
            origin_errors=sum(read.failed for read in reads),
            origin_detours=sum(read.fallback_reads for read in reads),
            in_flight_blocks=blocks,
            in_flight_bytes=size,
            repairs=self._node.storage.blocks.repairs,
            mounts=[
                with_lag(self._node.lookahead.pushers.with_push_counters(one), self._current_snapshot_id)
                for one in self._node.mounts.views()
            ],
            warmups=len(warmups),
            running_warmups=[msgspec.structs.replace(one, nodes=[]) for one in warmups[:MAX_STATUS_WARMUPS]],
            index_blocks=sum(tier.blocks for tier in usage),
            errors=self._node.errors.views(),
            causes=self._node.errors.causes(),
            passed_blocks=self._node.fetcher.bypass_blocks.count,
            endpoints=self._node.catalog.endpoints(),
            fetch_processes=self._node.fetching.processes.status(),
            peers=self._node.cluster.peer_counts(),
            guessed=readahead_counts(self._node.lookahead.readahead.counts),
            cluster=self._node.cluster.brief(),
            troubles=self._node.troubles.present_troubles(),
        )

    def _current_snapshot_id(self, dataset: str) -> str:
        """Return the id of the dataset's current snapshot; "" where there is none."""
        known = self._node.catalog.find(dataset)
        return known.current.id if known is not None and known.current is not None else ""

    async def reload(self, _: Empty) -> ReloadResult:
        return self._settings.reload()

    async def log_level(self, request: LogLevel) -> LogLevel:
        return self._settings.log_level(request)

    async def cluster(self, _: Empty) -> ClusterStatus:
        return await self._node.cluster.full_status()

    async def drain(self, request: DrainRequest) -> DrainStatus:
        return await self._node.cluster.drain(request.node, undo=request.undo)

    async def scale_hint(self, _: Empty) -> ScaleStatus:
        node = self._node
        if (found := await node.cluster.scale_inputs()) is not None:
            return scale_status(*found)
        usage = await node.threads.run(node.storage.usage)
        own = ScaleNode(node.cluster.name, sum(tier.limit for tier in usage), sum(tier.used for tier in usage))
        return scale_status([own], planned_demands(node.storage.planning.plan))

    async def verify(self, _: Empty) -> AsyncGenerator[VerifyProgress, None]:
        async for progress in verify.verify(self._node.storage.blocks, self._node.storage.index, self._node.threads):
            yield progress

    # --- datasets -----------------------------------------------------------------------------------------------

    async def dataset_list(self, _: Empty) -> DatasetList:
        return DatasetList(datasets=[self._node.catalog.view(dataset) for dataset in self._node.catalog])

    async def dataset_show(self, request: DatasetName) -> DatasetDetail:
        dataset = self._node.catalog.get(request.name)
        snapshot = self._node.catalog.snapshot(request.name)
        return DatasetDetail(
            dataset=self._node.catalog.view(dataset),
            block_size=snapshot.block_size,
            options=dataset.record.options,
            cached=await self._node.threads.background(inventory.cached_bytes, self._node.storage.index, snapshot),
            pinned=dataset.record.pins,
            problems=[UnusableKey(key=key, reason=reason) for key, reason in snapshot.problems()],
            snapshots=[known.id for known in dataset.record.snapshots],
        )

    async def dataset_cached(self, request: DatasetNames) -> CachedDatasets:
        datasets = (self._node.catalog.find(name) for name in request.names[:MAX_DATASET_NAMES])
        index = self._node.storage.index
        found = [
            await self._node.threads.background(cached_share, index, dataset.current, dataset.record.name)
            for dataset in datasets
            if dataset is not None and dataset.current is not None
        ]
        return CachedDatasets(datasets=found)

    async def dataset_add(self, request: DatasetAddRequest) -> AsyncGenerator[ListingProgress, None]:
        try:
            async with contextlib.aclosing(self._node.catalog.add(request)) as steps:
                async for progress in steps:
                    yield progress
        except CachefsError as error:
            log.warning("dataset %s is not added: %s", request.name, _without_url(str(error), request.url))
            raise

    async def dataset_try(self, request: DatasetAddRequest) -> AsyncGenerator[ListingProgress, None]:
        self._node.catalog.check_new(request.name, request.url)
        settings, directory = origin_settings(self._node.config), self._node.config.daemon.state_dir
        async with contextlib.aclosing(trial.try_listing(request, settings, directory)) as steps:
            async for progress in steps:
                yield progress

    async def dataset_refresh(self, request: DatasetName) -> AsyncGenerator[ListingProgress, None]:
        await self._node.catalog.wait_until_adopted(request.name)
        dataset = self._node.catalog.get(request.name)
        await self._node.catalog.check_files()
        before = followed = dataset.current
        try:
            async with contextlib.aclosing(self._node.catalog.refresh(request.name)) as steps:
                async for progress in steps:
                    if progress.dataset is not None:
                        followed = dataset.current
                        await shielded(self._node.content.changes.follow_snapshot(dataset, before))
                        progress = self._with_mounts_behind(progress, progress.dataset)
                    yield progress
        finally:
            # The caller may disconnect after the snapshot has changed, and before it receives the result.
            if followed is not dataset.current:
                await shielded(self._node.content.changes.follow_snapshot(dataset, before))

    def _with_mounts_behind(self, last: ListingProgress, view: DatasetView) -> ListingProgress:
        behind = self._node.cluster.directory.outdated_mounts(view.name, view.snapshot)
        return msgspec.structs.replace(last, behind_elsewhere=list(behind[:MAX_DATASET_NAMES]))

    async def dataset_remove(self, request: DatasetName) -> EvictedAmount:
        """Remove a dataset. Blocks that other datasets also have stay."""
        directory = self._node.cluster.directory
        await directory.catch_up(_CATCH_UP_SECONDS)  # datasets that were added elsewhere a moment ago are removed too
        await self._node.catalog.wait_until_adopted(request.name)
        await self._check_unmounted(request.name)
        await _wait_unused(directory.check_not_mounted_elsewhere, request.name)
        return await shielded(self._node.content.changes.remove(request.name))

    async def _check_unmounted(self, dataset: str) -> None:
        """Raise Busy where *dataset* is mounted. Wait for mounts that start, or were unmounted and end."""
        mounts, deadline = self._node.mounts, time.monotonic() + _UNMOUNTED_SECONDS
        while (mount := mounts.mount_of(dataset)) is not None:
            at = f"{mount.mountpoint} (pid {mount.pid})"
            if mounts.is_mounted(mount.id):
                raise Busy(f"dataset {dataset} is mounted at {at}; unmount that first")
            if time.monotonic() > deadline or mounts.seconds_detached(mount.id) > _DETACHED_SECONDS:
                raise Busy(f"dataset {dataset} was mounted at {at}, which has not ended yet; close its files")
            await asyncio.sleep(0.1)

    async def dataset_set(self, request: DatasetSetRequest) -> DatasetSetResult:
        return await self._node.content.changes.set_options(request)

    async def dataset_limit(self, request: DatasetLimit) -> DatasetView:
        return await self._node.content.quotas.change_limits(request)

    # --- blocks of datasets -------------------------------------------------------------------------------------

    async def warmup(self, request: WarmupRequest) -> AsyncGenerator[WarmupProgress, None]:
        if request.cluster:
            progress = await self._node.cluster.warmups.begin(request)
            if request.wait and progress.state == WarmupState.RUNNING:
                steps = self._node.cluster.warmups.watch(progress.id)
            else:
                yield progress
                return
        else:
            snapshot = self._node.catalog.snapshot(request.dataset)
            steps = self._node.content.warmups.run(snapshot, request)
        async with contextlib.aclosing(steps):
            async for progress in steps:
                yield progress

    async def warmup_list(self, _: Empty) -> WarmupList:
        return WarmupList(warmups=self._node.warmups())

    async def warmup_watch(self, request: WarmupId) -> AsyncGenerator[WarmupProgress, None]:
        async with contextlib.aclosing(self._warmups_with(request.id).watch(request.id)) as steps:
            async for progress in steps:
                yield progress

    async def warmup_cancel(self, request: WarmupId) -> WarmupProgress:
        return await self._warmups_with(request.id).cancel(request.id)

    def _warmups_with(self, number: int) -> Warmups | SharedWarmups:
        shared = self._node.cluster.warmups
        return shared if number in shared else self._node.content.warmups

    async def warmup_forecast(self, request: WarmupRequest) -> WarmupForecast:
        if request.cluster:
            return await self._node.cluster.warmups.forecast(request)
        snapshot, index = self._node.catalog.snapshot(request.dataset), self._node.storage.index
        usage = await self._node.threads.run(self._node.storage.usage)
        free = sum(max(0, tier.limit - tier.used) for tier in usage)
        return await self._node.threads.background(forecast.warmup, snapshot, request, index, free)

    async def evict_forecast(self, request: Selection) -> EvictForecast:
        snapshot, pins = (
            self._node.catalog.snapshot(request.dataset),
            self._node.catalog.get(request.dataset).record.pins,
        )
        index = self._node.storage.index
        return await self._node.threads.background(forecast.evict, snapshot, request.paths, pins, index)

    async def evict(self, request: Selection) -> EvictedAmount:
        snapshot = self._node.catalog.snapshot(request.dataset)
        files = await self._node.threads.background(selection.files, snapshot, request.paths)
        storage = self._node.storage
        return await self._node.threads.background(inventory.evict, storage.blocks, storage.index, files)

    async def pin(self, request: Selection) -> PinnedAmount:
        return await self._node.content.pins.pin(request)

    async def unpin(self, request: Selection) -> PinnedAmount:
        return await self._node.content.pins.unpin(request)

    async def directory_list(self, request: DirectoryPath) -> AsyncGenerator[DirectoryEntries, None]:
        pages = browsing.directory_pages(self._node.catalog.snapshot(request.dataset), request.dataset, request.path)
        while (page := await self._node.threads.background(next, pages, None)) is not None:
            yield page

    async def file_show(self, request: FilePath) -> FileInfo:
        dataset = self._node.catalog.get(request.dataset)
        found = (one for one in self._node.catalog.generations(dataset) if one.id.startswith(request.snapshot))
        snapshot = next(found, None) if request.snapshot else self._node.catalog.snapshot(request.dataset)
        if snapshot is None:
            raise NotFound(f"no snapshot {request.dataset}@{request.snapshot} on this node")
        return await self._node.threads.background(inventory.file_info, self._node.storage.index, snapshot, request)

    async def cached(self, request: Selection) -> AsyncGenerator[CachedFiles, None]:
        snapshot = self._node.catalog.snapshot(request.dataset)
        pins = self._node.catalog.get(request.dataset).record.pins
        files = await self._node.threads.background(selection.files, snapshot, request.paths)
        pages = inventory.file_pages(self._node.storage.index, snapshot, files, pins)
        while (page := await self._node.threads.background(next, pages, None)) is not None:
            yield page


def _without_url(text: str, url: str) -> str:
    """Remove a refused URL from a *text* for the log: it may contain a user, a password or a signature."""
    for one in (repr(url), url, repr(url.rstrip("/")), url.rstrip("/")):
        text = re.sub(re.escape(one) + "/*", "the URL", text) if one else text
    return text.replace("URL the URL", "the URL")


def _with_full_job_name(request: FromJob, caller: Caller) -> FromJob:
    """Return the job's message with the job's full name."""
    return msgspec.structs.replace(request, job=own_job_name(caller, request.job))


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


async def _wait_unused(check: Callable[[str], None], dataset: str) -> None:
    """Raise Busy where another node has mounted *dataset*. Wait for mounts there that were unmounted and end."""
    deadline = time.monotonic() + _UNMOUNTED_ELSEWHERE_SECONDS
    while True:
        try:
            return check(dataset)
        except Busy:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)
