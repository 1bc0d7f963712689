"""The node: creates, connects, starts, maintains and stops every part of the daemon."""

import asyncio
import functools
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cachefs.block import MEMORY, SSD
from cachefs.cluster_messages import NodeCounters, TierUse
from cachefs.errors import CachefsError
from cachefs.job_messages import StallRow
from cachefs.messages import PeerCounts, Stall
from cachefs.planning.cluster.standing import Standing
from cachefs.planning.prefetch.fetch_plan import FetchLimits, FetchPlan
from cachefs.planning.prefetch.promotion_plan import PromotionPlan
from cachefs_daemon.cluster.opening import open_membership
from cachefs_daemon.cluster.secret import load_secret
from cachefs_daemon.cluster.shown import Traffic, no_traffic
from cachefs_daemon.config import Config
from cachefs_daemon.content.dataset_changes import DatasetChanges
from cachefs_daemon.content.pins import Pins
from cachefs_daemon.content.quotas import DatasetQuotas
from cachefs_daemon.content.warmup import Warmups
from cachefs_daemon.content.warmup_persistence import WarmupPersistence
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.held_snapshots import HeldSnapshots
from cachefs_daemon.datasets.records import SnapshotRecord
from cachefs_daemon.exchange import Exchange, JobAudiences, Listeners
from cachefs_daemon.fetch.awaited_snapshots import AwaitedSnapshots
from cachefs_daemon.fetch.carrying import Carrying
from cachefs_daemon.fetch.elsewhere import Elsewhere
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.fetch.guesser import Guesser
from cachefs_daemon.fetch.home_routes import HomeRoutes
from cachefs_daemon.fetch.pace import Pace
from cachefs_daemon.fetch.prefetcher import Prefetcher
from cachefs_daemon.fetch.promoter import Promoter
from cachefs_daemon.fetch.readers import PageCaches, Readers
from cachefs_daemon.fetch.slots import FetchSlots
from cachefs_daemon.fetch.snapshot_lacks import SnapshotLacks
from cachefs_daemon.jobs.attribution import Attribution
from cachefs_daemon.jobs.epoch_loader import EpochLoader
from cachefs_daemon.jobs.persistence import JobPersistence
from cachefs_daemon.jobs.plan_room import PlanRoom
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.jobs.told_reads import ToldReads
from cachefs_daemon.mounts.persistence import MountPersistence
from cachefs_daemon.mounts.pushers import Pushers, TierFacts
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.origin.base import OriginSettings
from cachefs_daemon.reporting.residency import Residency
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage
from cachefs_daemon.store.tier_troubles import TierTroubles
from cachefs_daemon.troubles import NOTICED, AwayNode, Found, Lasting, Server, Troubles

# Modules that only a node of a cluster needs are imported where they are used: with their dependencies they take 14 MB.
if TYPE_CHECKING:
    from cachefs_daemon.content.used_snapshots import Reading
    from cachefs_daemon.cooperation.cooperation import Cooperation
    from cachefs_daemon.cooperation.draining import Draining
    from cachefs_daemon.cooperation.filling import Filling
    from cachefs_daemon.node_sharing import NodeSharing
    from cachefs_daemon.peers.plane import Adopt, DataPlane

Endless = Callable[[], Coroutine[Any, Any, None]]  # runs as long as the daemon

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
        plan, presence = storage.foresight.plan, storage.foresight.presence
        state_dir, origin = config.daemon.state_dir, config.origin
        self._secret = load_secret(config.cluster)
        self.membership = open_membership(config.cluster, state_dir, config.memory_budget, config.ssd_budget)
        self.data_plane = self._make_data_plane() if config.cluster.enabled else None
        self.traffic: Traffic = self.data_plane.traffic if self.data_plane is not None else no_traffic
        snapshots = HeldSnapshots(state_dir / "snapshots", config.daemon.block_size)
        self.catalog = Catalog(state_dir, snapshots, origin_settings(config), threads)
        slots = FetchSlots(origin.max_connections, origin.max_bytes_in_flight)
        self.fetcher = Fetcher(
            storage.blocks, snapshots.source, threads, slots, self.errors, config.daemon.read_deadline
        )
        processes = config.fetch_processes if config.prefetch.enabled else 0
        self._home_routes: HomeRoutes | None = None
        self._snapshot_lacks = SnapshotLacks()
        self.carrying = Carrying(storage.rooms, threads, self.errors, processes, config.daemon.read_deadline)
        self.fetcher.bringing.carry = self.carrying.take
        self.fetcher.bringing.renewed = snapshots.renewed
        self.fetcher.bringing.is_replaced = self.catalog.is_replaced
        self.carrying.discard = self.fetcher.bringing.tally.discard
        if self.data_plane is not None:
            self.fetcher.bringing.elsewhere = self._elsewhere(self.data_plane, slots)
            self.fetcher.awaited = AwaitedSnapshots(
                lambda one: snapshots.get(one) is not None,
                lambda one: self.sharing is not None and self.sharing.is_coming(one),
            )
            snapshots.on_hold = self.fetcher.awaited.came
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
        room = PlanRoom(config.plan_memory)
        loader = EpochLoader(plan, storage.watch, storage.blocks, self.fetcher, threads, room)
        self.jobs = JobRegistry(self.catalog, plan, presence, loader, lambda: storage.capacity)
        audiences = JobAudiences(self.mounts, self.jobs, self.catalog)
        pace = Pace(plan)
        limits = FetchLimits(
            config.prefetch.safety, config.prefetch.stall_worth, config.origin.max_bytes_in_flight, slots.most_planned
        )
        tiers = TierFacts(lambda: fetches.last_window, lambda: storage.capacity)
        self.pushers = Pushers(plan, presence, storage.foresight.coverage, audiences, tiers)
        fetches = FetchPlan(plan, presence, limits, time.monotonic(), storage.foresight.standing, self.pushers)
        attribution = Attribution(plan, self.jobs)
        pages = PageCaches(self.pushers.takes, self.pushers.guess)
        self.guesser = Guesser(self.fetcher, storage, threads, snapshots.get, pages)
        listeners = Listeners(
            self.jobs,
            attribution,
            audiences,
            self.pushers,
            pace,
            fetches.late,
            self.guesser.on_reads,
            self.catalog.prepare,
        )
        self.exchange = Exchange(self.mounts, listeners, storage.tiering, threads)
        self.told_reads = ToldReads()
        self.troubles = Troubles(self._find_troubles, attribution.jobs_of)
        self.jobs.troubles = self.troubles.of
        self.jobs.troubles_now = functools.partial(self.troubles.of, fresh=True)
        self.jobs.waiting = Lasting(functools.partial(self._waiting_rows, attribution)).get
        self.residency = Residency(storage.index, storage.tiering, presence, plan)
        self._mount_persistence = MountPersistence(self.mounts, state_dir, threads)
        self._job_persistence = JobPersistence(self.jobs, state_dir, threads)
        self._warmup_persistence = WarmupPersistence(self.warmups, self.catalog.snapshot, state_dir, threads)
        self._endless: list[Endless] = [
            self._job_persistence.run, self._mount_persistence.run, self._warmup_persistence.run,
        ]  # fmt: skip
        if config.prefetch.enabled:
            self._endless += self._fetching_ahead(pace, fetches)
        if config.prefetch.enabled and config.prefetch.guess:
            self.fetcher.on_ask = self.guesser.asked
            self.fetcher.read_in_parts()
            self._endless.append(self.guesser.run)
        self.sharing = self._make_sharing(snapshots) if config.cluster.enabled else None
        self.cooperation = self._make_cooperation(fetches, loader, snapshots) if self.sharing is not None else None
        self._filling: Filling | None = None
        self.draining = self._make_draining()
        self._make_reception()
        self._background: list[asyncio.Task[None]] = []

    def _waiting_rows(self, attribution: Attribution) -> list[StallRow]:
        now = asyncio.get_running_loop().time()
        return attribution.waiting(
            [
                Stall(one.key, now - one.since, f"peer {one.peers[0]}" if one.peers else "origin")
                for one in self.fetcher.waiting_reads(now)
                if not one.is_for_peer
            ]
        )

    def _find_troubles(self) -> Found:
        now = asyncio.get_running_loop().time()
        servers: dict[int, Server] = {}
        datasets: dict[str, str] = {}
        for dataset in self.catalog:
            endpoint, known = dataset.origin.endpoint, [one.id for one in dataset.record.snapshots]
            datasets |= dict.fromkeys(known, dataset.record.name)
            if id(endpoint) not in servers:  # many datasets may share one, and its status takes a microsecond
                servers[id(endpoint)] = Server(endpoint, endpoint.status(), [])
            servers[id(endpoint)].snapshots.extend(known)
        return Found(
            servers=list(servers.values()),
            reads=self.fetcher.waiting_reads(now - NOTICED),
            loop_now=now,
            failures=self.fetcher.failures.all(),
            nodes=list(self._away_nodes(now)),
            tiers=self._tier_troubles.now,
            datasets=datasets,
        )

    def _away_nodes(self, now: float) -> Iterator[AwayNode]:
        """Yield the nodes of the cluster that are not asked, or send no heartbeat. now: loop time."""
        elsewhere, plane = self.fetcher.bringing.elsewhere, self.data_plane
        if plane is None:
            return
        silent = elsewhere.silent_nodes() if elsewhere is not None else {}
        for record in self.membership.view.others:
            if reason := plane.client.silence(record.id):
                yield AwayNode(record.name, reason)
            elif record.id in silent:
                since = time.time() - (now - silent[record.id])
                yield AwayNode(record.name, "it gives no sign of life", since)
            elif record.state == "away":
                yield AwayNode(record.name, "it is away from the cluster")

    def _make_data_plane(self) -> "DataPlane":
        from cachefs_daemon.peers.plane import DataPlane

        return DataPlane(self.config.cluster, self.membership, self.errors, self._secret)

    def _make_draining(self) -> "Draining | None":
        """Create the parts that join and leave the cluster, and that fetch blocks from peers as members change."""
        if self.sharing is None or self.data_plane is None:
            return None
        from cachefs_daemon.cooperation.cooperation import ring_of
        from cachefs_daemon.cooperation.draining import Draining
        from cachefs_daemon.cooperation.filling import Filling, FillingParts

        cooperation = self.cooperation
        foresight, sharing = self.storage.foresight, self.sharing
        filling = self._filling = Filling(
            FillingParts(
                membership=self.membership,
                shared=self.sharing.shared,
                client=self.data_plane.client,
                blocks=self.storage.blocks,
                plan=foresight.plan,
                standing=foresight.standing or Standing(),
                threads=self.threads,
                snapshots=lambda: self.catalog.read_snapshots(sharing.used.is_read),
                pending=lambda: self.sharing is not None and self.sharing.is_behind,
                cooperating=cooperation.get if cooperation is not None else lambda snapshot: None,
                free=lambda: sum(self.storage.tiering.unlocked.free_by_tier),
                replicas=self.config.cluster.replicas,
                bandwidth=self.config.cluster.bandwidth,
            ),
            ring_of(self.membership.view),
        )
        self.membership.listen(lambda view: filling.follow(ring_of(view)))
        if self._home_routes is not None:
            self._home_routes.is_filling = filling.is_filling
        draining = Draining(self.membership, self.sharing.shared, lambda: bool(self.jobs.consumers))
        self._endless += [filling.run, draining.run]
        return draining

    def _make_reception(self) -> None:
        """Serve the observers and schedulers that the configuration names, if any."""
        section, sharing, draining = self.config.cluster, self.sharing, self.draining
        if sharing is None or draining is None or not (section.observers or section.schedulers):
            return
        from cachefs_daemon.reporting.orders import Means, Orders
        from cachefs_daemon.reporting.reception import Reception
        from cachefs_daemon.reporting.reports import Reports, Sources
        from cachefs_daemon.reporting.shard_warmups import ShardWarmups

        storage, plan = self.storage, self.storage.foresight.plan
        warmups = ShardWarmups(self.warmups, plan, self.jobs, self.threads)
        reports = Reports(
            Sources(
                instance=self.instance,
                membership=self.membership,
                catalog=self.catalog,
                jobs=self.jobs,
                plan=plan,
                residency=self.residency,
                warmups=warmups,
                threads=self.threads,
                usage=storage.usage,
                traffic=self._traffic,
                reads=self.mounts.reads,
            )
        )
        means = Means(self.catalog, self.pins, self.quotas, storage, self.threads, warmups, draining.drain_here)
        Reception(sharing.shared.endpoint, self.membership, reports, Orders(means))
        self._endless.append(reports.run)

    def _traffic(self) -> tuple[int, int, int]:
        """Return bytes since the start: from origins, from other nodes, to other nodes."""
        counts = self.peer_counts()
        return self.fetcher.fetched_bytes, counts.bytes, counts.served_bytes

    def _make_cooperation(self, fetches: FetchPlan, loader: EpochLoader, held: HeldSnapshots) -> "Cooperation | None":
        """Create the part that fetches for readers of other nodes. None where nothing is fetched ahead."""
        foresight, sharing = self.storage.foresight, self.sharing
        if foresight.standing is None or sharing is None or not self.config.prefetch.enabled:
            return None
        from cachefs_daemon.cooperation.cooperation import Cooperation, Parts
        from cachefs_daemon.cooperation.routes import Routes

        cooperation = Cooperation(
            Parts(
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
        self._endless.append(cooperation.run)
        if self.data_plane is not None:
            self.data_plane.on_served = cooperation.on_served
        elsewhere = self.fetcher.bringing.elsewhere
        if elsewhere is not None:
            elsewhere.route = Routes(self.membership, elsewhere.route, cooperation.get, self._snapshot_lacks).route
        return cooperation

    def _margins(self) -> dict[str, float]:
        """Return, by consumer, the seconds by which it may be ahead of its position in the plan."""
        others = self.cooperation.margins() if self.cooperation is not None else {}
        return {**self.jobs.margins(), **others}

    def _make_sharing(self, held: HeldSnapshots) -> "NodeSharing":
        from cachefs_daemon.content.used_snapshots import ReadHere
        from cachefs_daemon.node_sharing import NodeSharing, Surroundings

        here = ReadHere(self.catalog, held, self.changes, self.errors, self._mounted, self._read_here)
        certificates = self.data_plane.certificates if self.data_plane is not None else None
        return NodeSharing(
            Surroundings(
                self.config.cluster,
                self.membership,
                certificates,
                self._secret,
                here,
                self.jobs,
                self.threads,
                self._count,
            )
        )

    def _mounted(self, dataset: str) -> str:
        """Return the mount point of a dataset on this node; "" where it is not mounted."""
        mount = self.mounts.using(dataset)
        return mount.mountpoint if mount is not None else ""

    def _read_here(self) -> "Iterator[Reading]":
        """Yield what the mounts, jobs and warm-ups of this node read."""
        from cachefs_daemon.content.used_snapshots import Reading

        for one in self.mounts.shown(lambda name: found.record if (found := self.catalog.find(name)) else None):
            yield Reading(one.name, one.snapshots, one.mountpoint, one.stays)
        for dataset, snapshot in self._read_without_mounts():
            yield Reading(dataset, [snapshot])

    def _read_without_mounts(self) -> set[tuple[str, str]]:
        """Return the datasets and snapshots that jobs and warm-ups read."""
        return {*((one.request.dataset, one.snapshot.id) for one in self.jobs.consumers), *self.warmups.reading()}

    def _may_use(self, snapshot: SnapshotRecord) -> bool:
        """Return whether a mount, job or warm-up of the cluster may still read *snapshot*, which is not current."""
        if self.sharing is not None and self.sharing.used.is_used(snapshot.id):
            return True
        return any(read == snapshot.id for _, read in self._read_without_mounts()) or self.mounts.may_use(snapshot)

    def _on_mounts(self) -> None:
        if self.sharing is not None:
            self.sharing.used.look_soon()

    async def _count(self) -> NodeCounters:
        from cachefs_daemon.node_sharing import counters_of

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

    def _elsewhere(self, plane: "DataPlane", slots: FetchSlots) -> Elsewhere:
        """Create the source of blocks that consists of the other nodes. slots: limits the reads from origins."""
        membership, steal = self.membership, self.config.cluster.steal
        self._home_routes = HomeRoutes(membership, self._snapshot_lacks, self.config.cluster.replicas)
        route = self._home_routes.route
        found = Elsewhere(plane.client, route, membership, slots, self._snapshot_lacks, steal=steal)
        membership.listen(found.on_view)
        return found

    def peer_counts(self) -> PeerCounts:
        """Return counters of the blocks exchanged with other nodes."""
        bringing, plane = self.fetcher.bringing, self.data_plane
        if bringing.elsewhere is None or plane is None:
            return PeerCounts()
        served = list(plane.servers.served().values()) if plane.servers is not None else []
        return PeerCounts(
            blocks=bringing.peer_blocks,
            bytes=bringing.peer_bytes,
            served_blocks=sum(one.blocks for one in served),
            served_bytes=sum(one.bytes for one in served),
            served_fetched=sum(one.fetched for one in served),
            filled=self._filling.got if self._filling is not None else 0,
            **asdict(bringing.elsewhere.counts),
        )

    def _fetching_ahead(self, pace: Pace, fetches: FetchPlan) -> list[Endless]:
        """Return the background work that fetches blocks before they are read."""
        config, storage, threads = self.config, self.storage, self.threads
        plan, presence = storage.foresight.plan, storage.foresight.presence
        readers = Readers(self._margins, self.jobs.fetched, self.pushers.is_active)
        promotions = PromotionPlan(plan, presence, config.prefetch.memory_ahead)
        return [
            Prefetcher(fetches, pace, self.fetcher, storage.tiering, threads, readers).run,
            Promoter(promotions, pace, storage.blocks, storage.tiering, threads, readers).run,
        ]

    def open_data_plane(self, adopt: "Adopt") -> None:
        """Listen for other nodes, where the node is in a cluster. Call before `start`. adopt: serves a connection of
        the fetch channel. Raises ConfigError."""
        if self.data_plane is not None:
            tiers = {usage.name: usage.directory for usage in self.storage.usage()}
            self.data_plane.open_servers(self.storage.index.path, tiers, adopt)

    async def start(self) -> None:
        """Restore the state of the previous daemon, and begin to work."""
        await self._mount_persistence.restore()
        await self.pins.apply()
        await self.quotas.apply()
        await self._job_persistence.restore()
        await self.membership.start()
        if self.sharing is not None:
            await self.sharing.start()
        if self.data_plane is not None:
            await self.data_plane.start()
        if self.draining is None:
            await self.membership.announce("active")
        await self._warmup_persistence.restore()
        self._background = [asyncio.create_task(run()) for run in self._endless]

    async def maintain(self) -> None:
        """Run as long as the daemon. Each step repeats on its own, so that limits are enforced in time."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self._keep_order))
            group.create_task(self._repeat(self._check_snapshots))
            group.create_task(self._repeat(self._look_at_tiers))
            for each in self._upkeep():
                group.create_task(self._repeat(functools.partial(self.threads.upkeep, each)))

    def _upkeep(self) -> list[Callable[[], None]]:
        """Return the steps of the upkeep in threads, each on its own: a disk that hangs holds up one of them."""
        maintenance = self.storage.maintenance
        for_tiers = (maintenance.keep_limit, maintenance.retry)
        by_tier = [functools.partial(step, tier) for step in for_tiers for tier in (MEMORY, SSD)]
        for_cluster = [self._secret.keep_file] if self._secret is not None else []
        return [*by_tier, maintenance.keep_quotas, maintenance.compact, *for_cluster]

    async def _repeat(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(MAINTENANCE_SECONDS)
            try:
                await step()
            except CachefsError as error:
                self.errors.add("maintenance", str(error))
            except Exception as error:
                self.errors.add("maintenance", f"internal error ({error!r})", bug=error)

    async def _keep_order(self) -> None:
        self.exchange.refresh()
        await self.jobs.end_lapsed()
        if time.monotonic() - self.started > PRUNE_AFTER:
            await self.catalog.prune(self._may_use)

    async def _look_at_tiers(self) -> None:
        self._tier_troubles.look(self.storage.usage())
        self.troubles.all()  # records since when each trouble exists

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
        await self.carrying.close()
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
