"""The node: creates, connects, starts, maintains and stops every part of the daemon."""

import asyncio
import functools
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec
from cachefs_cluster.membership.open_membership import open_membership
from cachefs_cluster.membership.secret import load_secret
from cachefs_cluster.membership.status import Traffic, no_traffic
from cachefs_cluster.search.missing_snapshots import MissingSnapshots

from cachefs.block import MEMORY, SSD
from cachefs.cluster_messages import NodeCounters, TierUse
from cachefs.errors import CachefsError
from cachefs.job_messages import StallRow
from cachefs.messages import PeerCounts, Stall
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.prefetch.fetch_plan import FetchLimits, FetchPlan
from cachefs.planning.prefetch.promotion_plan import PromotionPlan
from cachefs_daemon.config import Config
from cachefs_daemon.content.dataset_changes import DatasetChanges
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.content.warmup import Warmups
from cachefs_daemon.content.warmup_persistence import WarmupPersistence
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.datasets.records import SnapshotRecord
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_counts import FetchCounts
from cachefs_daemon.fetch.fetch_parts import FetchParts, SourceLookups
from cachefs_daemon.fetch.fetch_processes import FetchProcesses
from cachefs_daemon.fetch.fetcher import Fetcher, FetchForPeer
from cachefs_daemon.fetch.prefetcher import Prefetcher
from cachefs_daemon.fetch.promoter import Promoter
from cachefs_daemon.fetch.readahead import ReadaheadFetcher
from cachefs_daemon.fetch.reader_callbacks import PageCacheCallbacks, ReaderCallbacks
from cachefs_daemon.fetch.step_timer import StepTimer
from cachefs_daemon.jobs.attribution import Attribution
from cachefs_daemon.jobs.epoch_loader import EpochLoader
from cachefs_daemon.jobs.persistence import JobPersistence
from cachefs_daemon.jobs.plan_memory import PlanMemory
from cachefs_daemon.jobs.process_reads import ProcessReads
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.mounts.persistence import MountPersistence
from cachefs_daemon.mounts.pushers import Pushers, TierFacts
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.ports import NO_PEERS
from cachefs_daemon.report_dispatcher import JobConsumersByMount, ReportDispatcher, ReportHandlers
from cachefs_daemon.reporting.residency import Residency
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage
from cachefs_daemon.store.tier_troubles import TierTroubles
from cachefs_daemon.troubles import NOTICE_SECONDS, AwayNode, CachedValue, ServerWithDatasets, TroubleInputs, Troubles

# Modules that only a node of a cluster needs are imported where they are used: with their dependencies they take 14 MB.
if TYPE_CHECKING:
    from cachefs_cluster.directory.used_snapshots import LocalRead
    from cachefs_cluster.node_sharing import NodeSharing
    from cachefs_cluster.peers.fetches_for_peers import FetchesForPeers
    from cachefs_cluster.peers.plane import DataPlane
    from cachefs_cluster.placement.cluster_routes import ClusterRoutes
    from cachefs_cluster.placement.cooperation import Cooperation
    from cachefs_cluster.placement.draining import DrainController
    from cachefs_cluster.placement.rebalance import Rebalance
    from cachefs_cluster.search.home_routes import HomeRoutes
    from cachefs_cluster.search.peer_source import PeerSource

BackgroundWork = Callable[[], Coroutine[Any, Any, None]]  # runs as long as the daemon

MAINTENANCE_SECONDS: Final = 2.0
# Mounts report at least every 10 s. Before all have, it is unknown which snapshots they use.
PRUNE_AFTER: Final = 30.0


class Node:
    """The parts of the daemon, connected. Used on the event loop.

    The attributes are for the service, which answers calls with them. A part receives the other parts that it needs
    when it is created.
    """

    def __init__(self, config: Config, storage: Storage, threads: Threads) -> None:
        """Raises CachefsError."""
        self.config = config
        self.storage = storage
        self.threads = threads
        self.instance = uuid.uuid4().hex  # changes with every start of the daemon
        self.started, self.began = time.monotonic(), time.time()
        self.errors = ErrorLog()
        self._tier_troubles = TierTroubles(self.errors)
        plan, presence = storage.planning.plan, storage.planning.presence
        state_dir, origin = config.daemon.state_dir, config.origin
        self._secret = load_secret(config.cluster)
        self.membership = open_membership(config.cluster, state_dir, config.memory_budget, config.ssd_budget)
        self.data_plane = self._make_data_plane() if config.cluster.enabled else None
        self.traffic: Traffic = self.data_plane.traffic if self.data_plane is not None else no_traffic
        snapshots = OpenSnapshots(state_dir / "snapshots", config.daemon.block_size)
        self.catalog = Catalog(state_dir, snapshots, origin_settings(config), threads)
        slots = ConcurrencyLimiter(origin.max_connections, origin.max_bytes_in_flight)
        counts, deadline = FetchCounts(), config.daemon.read_deadline
        self._home_routes: HomeRoutes | None = None
        self._cluster_routes: ClusterRoutes | None = None
        self._missing_snapshots = MissingSnapshots()
        self.peer_source = self._make_peer_source(self.data_plane, slots) if self.data_plane is not None else None
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
                peers=self.peer_source or NO_PEERS,
                fetch_in_process=self.process_fetches.try_fetch,
                counts=counts,
                reads_parts=config.prefetch.enabled and config.prefetch.guess,
            )
        )
        if self.data_plane is not None:
            self.fetches_for_peers = self._make_fetches_for_peers(snapshots)
        self.warmups = Warmups(self.fetcher, threads)
        self.pins = Pins(storage.tiering, self.catalog, threads)
        self.quotas = DatasetQuotas(storage.tiering, storage.index, self.catalog, threads)
        self.changes = DatasetChanges(
            self.catalog,
            self.pins,
            self.quotas,
            storage,
            threads,
            lambda one: self.sharing is not None and self.sharing.used.keep_if_read(one),
        )
        self.mounts = MountRegistry(self.instance, self._on_mounts)
        room = PlanMemory(config.plan_memory)
        loader = EpochLoader(plan, storage.presence_watch, storage.blocks, self.fetcher, threads, room)
        self.jobs = JobRegistry(self.catalog, plan, presence, loader, lambda: storage.capacity)
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
        self.sharing = self._make_sharing(snapshots) if config.cluster.enabled else None
        self.cooperation = self._make_cooperation(fetches, loader, snapshots) if self.sharing is not None else None
        self._rebalance: Rebalance | None = None
        self.draining = self._make_draining()
        self._make_observer_endpoint()
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
            nodes=list(self._away_nodes(now)),
            tiers=self._tier_troubles.current,
            datasets=datasets,
        )

    def _away_nodes(self, now: float) -> Iterator[AwayNode]:
        """Yield the nodes of the cluster that are not asked, or send no heartbeat. now: loop time."""
        elsewhere, plane = self.peer_source, self.data_plane
        if plane is None:
            return
        silent = elsewhere.silent_nodes() if elsewhere is not None else {}
        for record in self.membership.view.others:
            if reason := plane.client.silence_reason(record.id):
                yield AwayNode(record.name, reason)
            elif record.id in silent:
                since = time.time() - (now - silent[record.id])
                yield AwayNode(record.name, "it gives no sign of life", since)
            elif record.state == "away":
                yield AwayNode(record.name, "it is away from the cluster")

    def _make_data_plane(self) -> "DataPlane":
        from cachefs_cluster.peers.plane import DataPlane

        return DataPlane(self.config.cluster, self.membership, self.errors, self._secret)

    def _make_draining(self) -> "DrainController | None":
        """Create the parts that join and leave the cluster, and that fetch blocks from peers as members change."""
        if self.sharing is None or self.data_plane is None:
            return None
        from cachefs_cluster.placement.cooperation import placement_ring_of
        from cachefs_cluster.placement.draining import DrainController
        from cachefs_cluster.placement.rebalance import Rebalance, RebalanceParts

        cooperation = self.cooperation
        foresight, sharing = self.storage.planning, self.sharing
        filling = self._rebalance = Rebalance(
            RebalanceParts(
                membership=self.membership,
                shared=self.sharing.shared,
                client=self.data_plane.client,
                blocks=self.storage.blocks,
                plan=foresight.plan,
                standing=foresight.standing or Ownership(),
                threads=self.threads,
                snapshots=lambda: self.catalog.read_snapshots(sharing.used.is_read),
                is_snapshot_pending=lambda: self.sharing is not None and self.sharing.is_behind,
                shared_snapshot=cooperation.shared_snapshot if cooperation is not None else lambda snapshot: None,
                free_bytes=lambda: sum(self.storage.tiering.unlocked.free_by_tier),
                replicas=self.config.cluster.replicas,
                bandwidth=self.config.cluster.bandwidth,
            ),
            placement_ring_of(self.membership.view),
        )
        self.membership.add_listener(lambda view: filling.set_ring(placement_ring_of(view)))
        if self._home_routes is not None:
            self._home_routes.follow_rebalance(filling.is_searching)
        draining = DrainController(self.membership, self.sharing.shared, lambda: bool(self.jobs.consumers))
        self._background_work += [filling.run, draining.run]
        return draining

    def _make_observer_endpoint(self) -> None:
        """Serve the observers and schedulers that the configuration names, if any."""
        section, sharing, draining = self.config.cluster, self.sharing, self.draining
        if sharing is None or draining is None or not (section.observers or section.schedulers):
            return
        from cachefs_cluster.reporting.command_executor import CommandContext, CommandExecutor
        from cachefs_cluster.reporting.observer_endpoint import ObserverEndpoint
        from cachefs_cluster.reporting.reports import NodeReports, ReportSources
        from cachefs_cluster.reporting.shard_warmups import ShardWarmups

        storage, plan = self.storage, self.storage.planning.plan
        warmups = ShardWarmups(self.warmups, plan, self.jobs, self.threads)
        reports = NodeReports(
            ReportSources(
                instance=self.instance,
                membership=self.membership,
                catalog=self.catalog,
                jobs=self.jobs,
                plan=plan,
                residency=self.residency,
                warmups=warmups,
                threads=self.threads,
                usage=storage.usage,
                traffic=self._traffic_totals,
                reads=self.mounts.read_counts,
            )
        )
        means = CommandContext(
            self.catalog, self.pins, self.quotas, storage, self.threads, warmups, draining.drain_this_node
        )
        ObserverEndpoint(sharing.shared.endpoint, self.membership, reports, CommandExecutor(means))
        self._background_work.append(reports.run)

    def _traffic_totals(self) -> tuple[int, int, int]:
        """Return bytes since the start: from origins, from other nodes, to other nodes."""
        counts = self.peer_counts()
        return self.fetcher.fetched_bytes, counts.bytes, counts.served_bytes

    def _make_cooperation(self, fetches: FetchPlan, loader: EpochLoader, held: OpenSnapshots) -> "Cooperation | None":
        """Create the part that fetches for readers of other nodes. None where nothing is fetched ahead."""
        foresight, sharing = self.storage.planning, self.sharing
        if foresight.standing is None or sharing is None or not self.config.prefetch.enabled:
            return None
        from cachefs_cluster.placement.cooperation import Cooperation, CooperationParts

        cooperation = Cooperation(
            CooperationParts(
                plan=foresight.plan,
                standing=foresight.standing,
                tiering=self.storage.tiering,
                jobs=self.jobs,
                loader=loader,
                snapshots=held,
                threads=self.threads,
                shared=sharing.shared,
                consumers=sharing.consumers,
                window=lambda: fetches.copy_window,
                directory=self.config.daemon.state_dir / "holders",
                replicas=self.config.cluster.replicas,
            )
        )
        self._background_work.append(cooperation.run)
        if self.data_plane is not None:
            self.data_plane.on_served = cooperation.note_served_blocks
        if self._cluster_routes is not None:
            self._cluster_routes.follow_snapshots(cooperation.shared_snapshot)
        return cooperation

    def _margins(self) -> dict[str, float]:
        """Return, by consumer, the seconds by which it may be ahead of its position in the plan."""
        others = self.cooperation.margins() if self.cooperation is not None else {}
        return {**self.jobs.margins(), **others}

    def _make_sharing(self, held: OpenSnapshots) -> "NodeSharing":
        from cachefs_cluster.directory.used_snapshots import LocalDatasets
        from cachefs_cluster.node_sharing import NodeSharing, SharingContext

        here = LocalDatasets(self.catalog, held, self.changes, self.errors, self._mount_point_of, self._local_reads)
        certificates = self.data_plane.certificates if self.data_plane is not None else None
        return NodeSharing(
            SharingContext(
                self.config.cluster,
                self.membership,
                certificates,
                self._secret,
                here,
                self.jobs,
                self.threads,
                self._own_counters,
            )
        )

    def _mount_point_of(self, dataset: str) -> str:
        """Return the mount point of a dataset on this node; "" where it is not mounted."""
        mount = self.mounts.mount_of(dataset)
        return mount.mountpoint if mount is not None else ""

    def _local_reads(self) -> "Iterator[LocalRead]":
        """Yield what the mounts, jobs and warm-ups of this node read."""
        from cachefs_cluster.directory.used_snapshots import LocalRead

        for one in self.mounts.shown_datasets(
            lambda name: found.record if (found := self.catalog.find(name)) else None
        ):
            yield LocalRead(one.name, one.snapshots, one.mountpoint, one.stays)
        for dataset, snapshot in self._read_without_mounts():
            yield LocalRead(dataset, [snapshot])

    def _read_without_mounts(self) -> set[tuple[str, str]]:
        """Return the datasets and snapshots that jobs and warm-ups read."""
        return {
            *((one.request.dataset, one.snapshot.id) for one in self.jobs.consumers),
            *self.warmups.read_snapshots(),
        }

    def _may_be_read(self, snapshot: SnapshotRecord) -> bool:
        """Return whether a mount, job or warm-up of the cluster may still read *snapshot*, which is not current."""
        if self.sharing is not None and self.sharing.used.is_used(snapshot.id):
            return True
        return any(read == snapshot.id for _, read in self._read_without_mounts()) or self.mounts.may_read(snapshot)

    def _on_mounts(self) -> None:
        if self.sharing is not None:
            self.sharing.used.check_soon()

    async def _own_counters(self) -> NodeCounters:
        from cachefs_cluster.node_sharing import counters_of

        usage = await self.threads.run(self.storage.usage)
        counters = counters_of(
            self.started,
            [TierUse(tier.name, tier.limit, tier.used) for tier in usage],
            self.jobs,
            (self.fetcher.fetched_blocks, self.fetcher.fetched_bytes),
            self.sharing.problems() if self.sharing is not None else [],
            {record.id: self.traffic(record.id).bytes_in for record in self.membership.view.others},
        )
        section = self.config.cluster
        return msgspec.structs.replace(counters, replicas=section.replicas, grace=section.grace)

    def _make_peer_source(self, plane: "DataPlane", slots: ConcurrencyLimiter) -> "PeerSource":
        """Create the source of blocks that consists of the other nodes. slots: limits the reads from origins."""
        from cachefs_cluster.placement.cluster_routes import ClusterRoutes
        from cachefs_cluster.search.home_routes import HomeRoutes
        from cachefs_cluster.search.peer_source import PeerSource

        membership, missing, steal = self.membership, self._missing_snapshots, self.config.cluster.steal
        self._home_routes = HomeRoutes(membership, missing, self.config.cluster.replicas)
        self._cluster_routes = ClusterRoutes(membership, self._home_routes.find_route, missing)
        route = self._cluster_routes.find_route
        found = PeerSource(plane.client, route, membership, slots, missing, steal=steal)
        membership.add_listener(found.on_view)
        return found

    def _make_fetches_for_peers(self, snapshots: OpenSnapshots) -> "FetchesForPeers":
        """Create the part that serves the blocks that other nodes request."""
        from cachefs_cluster.peers.fetches_for_peers import FetchesForPeers
        from cachefs_cluster.search.awaited_snapshots import AwaitedSnapshots

        awaited = AwaitedSnapshots(
            lambda one: snapshots.get(one) is not None,
            lambda one: self.sharing is not None and self.sharing.is_coming(one),
        )
        snapshots.add_open_listener(awaited.resume_requests)
        return FetchesForPeers(self.fetcher, awaited, self._missing_snapshots)

    def peer_counts(self) -> PeerCounts:
        """Return counters of the blocks exchanged with other nodes."""
        bringing, plane = self.fetcher.in_flight_fetches, self.data_plane
        if self.peer_source is None or plane is None:
            return PeerCounts()
        served = list(plane.servers.served_totals().values()) if plane.servers is not None else []
        return PeerCounts(
            blocks=bringing.peer_blocks,
            bytes=bringing.peer_bytes,
            served_blocks=sum(one.blocks for one in served),
            served_bytes=sum(one.bytes for one in served),
            served_fetched=sum(one.fetched for one in served),
            filled=self._rebalance.fetched_blocks if self._rebalance is not None else 0,
            **asdict(self.peer_source.counts),
        )

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

    def open_data_plane(self, adopt: Callable[[socket.socket, FetchForPeer], Awaitable[None]]) -> None:
        """Listen for other nodes, where the node is in a cluster. Call before `start`. adopt: serves a connection of
        the fetch channel. Raises ConfigError."""
        if self.data_plane is not None:
            tiers = {usage.name: usage.directory for usage in self.storage.usage()}
            answer = self.fetches_for_peers.request
            self.data_plane.open_servers(self.storage.index.path, tiers, lambda link: adopt(link, answer))

    async def start(self) -> None:
        """Restore the state of the previous daemon, and begin to work."""
        await self._mount_persistence.restore()
        await self.pins.apply_records()
        await self.quotas.apply_records()
        await self._job_persistence.restore()
        await self.membership.start()
        if self.sharing is not None:
            await self.sharing.start()
        if self.data_plane is not None:
            await self.data_plane.start()
        if self.draining is None:
            await self.membership.announce("active")
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
        for_cluster = [self._secret.restore_file] if self._secret is not None else []
        return [*by_tier, maintenance.enforce_quotas, maintenance.compact, *for_cluster]

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
            await self.catalog.forget_unused(self._may_be_read)

    async def _check_tiers(self) -> None:
        self._tier_troubles.check_tiers(self.storage.usage())
        self.troubles.all_troubles()  # records since when each trouble exists

    async def _check_snapshots(self) -> None:
        for problem in await self.catalog.check_files():
            self.errors.add("snapshots", problem)

    async def stop_background(self) -> None:
        """Cancel work that has no caller; calls still get their responses."""
        if self.sharing is not None:
            await self.sharing.stop()
        await self.membership.stop()
        if self.data_plane is not None:
            await self.data_plane.stop()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self.cooperation is not None:
            await self.cooperation.close()
        self.pushers.close()
        await self.warmups.close()
        await self.jobs.close()

    async def stop(self) -> None:
        """Stop the node. No call may be in progress any more."""
        await self.membership.stop()
        if self.data_plane is not None:
            await self.data_plane.stop()
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
