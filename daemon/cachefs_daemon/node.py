"""The node: creates, connects, starts, maintains and stops every part of the daemon."""

import asyncio
import functools
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Final

from cachefs.block import MEMORY, SSD
from cachefs.errors import CachefsError
from cachefs.job_messages import StallRow
from cachefs.messages import Stall
from cachefs.planning.prefetch.fetch_plan import FetchLimits, FetchPlan
from cachefs.planning.prefetch.promotion_plan import PromotionPlan
from cachefs_daemon.cluster import NO_CLUSTER, AdoptConnection, BackgroundWork, Cluster, NodeParts
from cachefs_daemon.config import Config
from cachefs_daemon.content.dataset_changes import DatasetChanges
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.content.warmup import Warmups
from cachefs_daemon.content.warmup_persistence import WarmupPersistence
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_parts import FetchCounts, FetchParts, SourceLookups
from cachefs_daemon.fetch.fetch_processes import FetchProcesses
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.prefetcher import Prefetcher
from cachefs_daemon.fetch.promoter import Promoter
from cachefs_daemon.fetch.readahead import ReadaheadFetcher
from cachefs_daemon.fetch.reader_callbacks import PageCacheCallbacks, ReaderCallbacks
from cachefs_daemon.fetch.step_timer import StepTimer
from cachefs_daemon.jobs.attribution import Attribution
from cachefs_daemon.jobs.epoch_loader import EpochLoader, LoaderParts
from cachefs_daemon.jobs.persistence import JobPersistence
from cachefs_daemon.jobs.plan_memory import PlanMemory
from cachefs_daemon.jobs.process_reads import ProcessReads
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.local_reads import LocalReads
from cachefs_daemon.mounts.persistence import MountPersistence
from cachefs_daemon.mounts.pushers import Pushers, TierFacts
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.report_dispatcher import JobConsumersByMount, ReportDispatcher, ReportHandlers
from cachefs_daemon.reporting.residency import Residency
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage
from cachefs_daemon.store.tier_troubles import TierTroubles
from cachefs_daemon.troubles import NOTICE_SECONDS, CachedValue, ServerWithDatasets, TroubleInputs, Troubles

MAINTENANCE_SECONDS: Final = 2.0
# Mounts report at least every 10 s. Before all have, it is unknown which snapshots they use.
PRUNE_AFTER: Final = 30.0


class Node:
    """The parts of the daemon, connected. Used on the event loop.

    The attributes are for the service, which answers calls with them. A part receives the other parts that it needs
    when it is created.
    """

    def __init__(
        self, config: Config, storage: Storage, threads: Threads, errors: ErrorLog, cluster: Cluster = NO_CLUSTER
    ) -> None:
        """Raises CachefsError."""
        self.config = config
        self.storage = storage
        self.threads = threads
        self.instance = uuid.uuid4().hex  # changes with every start of the daemon
        self.started, self.began = time.monotonic(), time.time()
        self.errors = errors
        self.cluster = cluster
        self._tier_troubles = TierTroubles(self.errors)
        plan, presence = storage.planning.plan, storage.planning.presence
        state_dir, origin = config.daemon.state_dir, config.origin
        snapshots = OpenSnapshots(state_dir / "snapshots", config.daemon.block_size)
        self.catalog = Catalog(state_dir, snapshots, origin_settings(config), threads, cluster.directory)
        slots = ConcurrencyLimiter(origin.max_connections, origin.max_bytes_in_flight)
        counts, deadline = FetchCounts(), config.daemon.read_deadline
        processes = config.fetch_processes if config.prefetch.enabled else 0
        self.process_fetches = FetchProcesses(storage.reservations, threads, self.errors, counts, processes, deadline)
        self.fetcher = Fetcher(
            FetchParts(
                store=storage.blocks,
                sources=SourceLookups(snapshots.block_source, snapshots.renew_source, self.catalog.is_replaced),
                threads=threads,
                limiter=slots,
                errors=self.errors,
                read_deadline=deadline,
                peers=cluster.make_block_peers(slots),
                fetch_in_process=self.process_fetches.try_fetch,
                counts=counts,
                reads_parts=config.prefetch.enabled and config.prefetch.guess,
            )
        )
        self.warmups = Warmups(self.fetcher, threads)
        self.pins = Pins(storage.tiering, self.catalog, threads)
        self.quotas = DatasetQuotas(storage.tiering, storage.index, self.catalog, threads)
        self.changes = DatasetChanges(
            self.catalog,
            self.pins,
            self.quotas,
            storage,
            threads,
            cluster.directory,
        )
        self.mounts = MountRegistry(self.instance, cluster.directory.note_reads_changed)
        room = PlanMemory(config.plan_memory)
        loader = EpochLoader(
            LoaderParts(plan, storage.presence_watch, storage.blocks, self.fetcher, threads, room, cluster.placement)
        )
        self.jobs = JobRegistry(self.catalog, plan, presence, loader, lambda: storage.capacity, cluster.placement)
        self._reads = LocalReads(self.mounts, self.jobs, self.warmups, self.catalog, cluster.directory)
        audiences = JobConsumersByMount(self.mounts, self.jobs, self.catalog)
        pace = StepTimer(plan)
        limits = FetchLimits(
            config.prefetch.safety, config.prefetch.stall_worth, config.origin.max_bytes_in_flight, slots.max_planned
        )
        tiers = TierFacts(lambda: fetches.last_window, lambda: storage.capacity)
        self.pushers = Pushers(plan, presence, storage.planning.coverage, audiences, tiers)
        fetches = FetchPlan(plan, presence, limits, time.monotonic(), storage.planning.standing, self.pushers)
        attribution = Attribution(plan, self.jobs)
        pages = PageCacheCallbacks(self.pushers.can_push, self.pushers.push_readahead)
        self.readahead = ReadaheadFetcher(self.fetcher, storage, threads, snapshots.get, pages)
        listeners = ReportHandlers(
            self.jobs,
            attribution,
            audiences,
            self.pushers,
            pace,
            fetches.note_late_reads,
            self.readahead.note_reads,
            self.catalog.prepare_origins,
        )
        self.report_dispatcher = ReportDispatcher(self.mounts, listeners, storage.tiering, threads)
        self.process_reads = ProcessReads()
        self.troubles = Troubles(self._trouble_inputs, attribution.attribute_failed_reads)
        self.jobs.troubles_cached = self.troubles.troubles_of
        self.jobs.troubles_now = functools.partial(self.troubles.troubles_of, fresh=True)
        self.jobs.waiting_stalls = CachedValue(functools.partial(self._waiting_rows, attribution)).get
        self.residency = Residency(storage.index, storage.tiering, presence, plan)
        self._mount_persistence = MountPersistence(self.mounts, state_dir, threads)
        self._job_persistence = JobPersistence(self.jobs, state_dir, threads)
        self._warmup_persistence = WarmupPersistence(self.warmups, self.catalog.snapshot, state_dir, threads)
        self._background_work: list[BackgroundWork] = [
            self._job_persistence.run, self._mount_persistence.run, self._warmup_persistence.run,
        ]  # fmt: skip
        if config.prefetch.enabled:
            self._background_work += self._fetching_ahead(pace, fetches)
        if config.prefetch.enabled and config.prefetch.guess:
            self.fetcher.add_demand_listener(self.readahead.note_demand)
            self._background_work.append(self.readahead.run)
        cluster.attach(
            NodeParts(
                instance=self.instance,
                started=self.started,
                storage=storage,
                threads=threads,
                errors=errors,
                catalog=self.catalog,
                snapshots=snapshots,
                changes=self.changes,
                pins=self.pins,
                quotas=self.quotas,
                warmups=self.warmups,
                fetcher=self.fetcher,
                jobs=self.jobs,
                loader=loader,
                residency=self.residency,
                reads=self._reads,
                mount_reads=self.mounts.read_counts,
                copy_window=lambda: fetches.copy_window,
                fetches_ahead=config.prefetch.enabled,
            )
        )
        self._background_work += cluster.background_work
        self._background: list[asyncio.Task[None]] = []

    def _waiting_rows(self, attribution: Attribution) -> list[StallRow]:
        now = asyncio.get_running_loop().time()
        return attribution.waiting_rows(
            [
                Stall(one.key, now - one.since, f"peer {one.peers[0]}" if one.peers else "origin")
                for one in self.fetcher.waiting_reads(now)
                if not one.is_for_peer
            ]
        )

    def _trouble_inputs(self) -> TroubleInputs:
        now = asyncio.get_running_loop().time()
        servers: dict[int, ServerWithDatasets] = {}
        datasets: dict[str, str] = {}
        for dataset in self.catalog:
            endpoint, known = dataset.origin.endpoint, [one.id for one in dataset.record.snapshots]
            datasets |= dict.fromkeys(known, dataset.record.name)
            if id(endpoint) not in servers:  # many datasets may share one, and its status takes a microsecond
                servers[id(endpoint)] = ServerWithDatasets(endpoint, endpoint.status(), [])
            servers[id(endpoint)].snapshots.extend(known)
        return TroubleInputs(
            servers=list(servers.values()),
            reads=self.fetcher.waiting_reads(now - NOTICE_SECONDS),
            loop_now=now,
            failures=self.fetcher.failures.latest_first(),
            nodes=list(self.cluster.away_nodes(now)),
            tiers=self._tier_troubles.current,
            datasets=datasets,
        )

    def _margins(self) -> dict[str, float]:
        """Return, by consumer, the seconds by which it may be ahead of its position in the plan."""
        return {**self.jobs.margins(), **self.cluster.placement.margins()}

    def _fetching_ahead(self, pace: StepTimer, fetches: FetchPlan) -> list[BackgroundWork]:
        """Return the background work that fetches blocks before they are read."""
        config, storage, threads = self.config, self.storage, self.threads
        plan, presence = storage.planning.plan, storage.planning.presence
        readers = ReaderCallbacks(self._margins, self.jobs.note_fetched_block, self.pushers.has_active_pusher)
        promotions = PromotionPlan(plan, presence, config.prefetch.memory_ahead)
        return [
            Prefetcher(fetches, pace, self.fetcher, storage.tiering, threads, readers).run,
            Promoter(promotions, pace, storage.blocks, storage.tiering, threads, readers).run,
        ]

    def open_peer_servers(self, adopt: AdoptConnection) -> None:
        """Listen for other nodes, where the node is in a cluster. Call before `start`. adopt: serves a connection of
        the fetch channel. Raises ConfigError."""
        tiers = {usage.name: usage.directory for usage in self.storage.usage()}
        self.cluster.open_servers(self.storage.index.path, tiers, adopt)

    async def start(self) -> None:
        """Restore the state of the previous daemon, and begin to work."""
        await self._mount_persistence.restore()
        await self.pins.apply_records()
        await self.quotas.apply_records()
        await self._job_persistence.restore()
        await self.cluster.start()
        await self._warmup_persistence.restore()
        self._background = [asyncio.create_task(run()) for run in self._background_work]

    async def maintain(self) -> None:
        """Run as long as the daemon. Each step repeats on its own, so that limits are enforced in time."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self._forget_ended))
            group.create_task(self._repeat(self._check_snapshots))
            group.create_task(self._repeat(self._check_tiers))
            for each in self._upkeep():
                group.create_task(self._repeat(functools.partial(self.threads.upkeep, each)))

    def _upkeep(self) -> list[Callable[[], None]]:
        """Return the steps of the upkeep in threads, each on its own: a disk that hangs holds up one of them."""
        maintenance = self.storage.maintenance
        for_tiers = (maintenance.enforce_limit, maintenance.retry_tier)
        by_tier = [functools.partial(step, tier) for step in for_tiers for tier in (MEMORY, SSD)]
        return [*by_tier, maintenance.enforce_quotas, maintenance.compact, *self.cluster.upkeep]

    async def _repeat(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(MAINTENANCE_SECONDS)
            try:
                await step()
            except CachefsError as error:
                self.errors.add("maintenance", str(error))
            except Exception as error:
                self.errors.add("maintenance", f"internal error ({error!r})", bug=error)

    async def _forget_ended(self) -> None:
        self.report_dispatcher.forget_ended()
        await self.jobs.end_gone()
        if time.monotonic() - self.started > PRUNE_AFTER:
            await self.catalog.forget_unused(self._reads.may_be_read)

    async def _check_tiers(self) -> None:
        self._tier_troubles.check_tiers(self.storage.usage())
        self.troubles.all_troubles()  # records since when each trouble exists

    async def _check_snapshots(self) -> None:
        for problem in await self.catalog.check_files():
            self.errors.add("snapshots", problem)

    async def stop_background(self) -> None:
        """Cancel work that has no caller; calls still get their responses."""
        await self.cluster.leave()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.cluster.close()
        self.pushers.close()
        await self.warmups.close()
        await self.jobs.close()

    async def stop(self) -> None:
        """Stop the node. No call may be in progress any more."""
        await self.cluster.close()
        await self.fetcher.close()
        await self.process_fetches.close()
        await self.catalog.close()


def origin_settings(config: Config) -> OriginSettings:
    connect_timeout, read_timeout = config.origin_timeouts
    return OriginSettings(
        max_connections=config.origin.max_connections,
        connect_timeout=connect_timeout,
        hedge_share=config.origin.hedged,
        max_request=min(config.origin.max_request, config.origin.max_bytes_in_flight),
        max_listing=config.origin.max_listing,
        max_pages=config.origin.max_pages,
        read_timeout=read_timeout,
        block_size=config.daemon.block_size,
        file_roots=tuple(str(path) for path in config.security.file_roots),
        follow_symlinks=config.security.follow_symlinks,
    )
