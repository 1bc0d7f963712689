"""The cluster that this node has joined: creates, connects, starts and stops all parts of `cachefs_cluster`.

The connections to other nodes exist before the node's parts, which use them through the ports of the daemon; all
services that use the node's parts follow in `JoinedCluster.attach`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from cachefs.cluster_messages import ClusterStatus, DrainStatus, NodeCounters, ScaleNode, TierUse
from cachefs.messages import ClusterBrief, PeerCounts
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.cluster.scale import SnapshotDemand
from cachefs_cluster.cluster_directory import ClusterDirectory
from cachefs_cluster.config import cluster_section
from cachefs_cluster.directory.used_snapshots import LocalDatasets
from cachefs_cluster.membership.open_membership import open_membership
from cachefs_cluster.membership.secret import load_secret
from cachefs_cluster.membership.static import StaticMembership
from cachefs_cluster.membership.status import cluster_brief, cluster_status, scaled_nodes
from cachefs_cluster.node_sharing import NodeSharing, SharingContext, counters_of
from cachefs_cluster.peers.plane import DataPlane
from cachefs_cluster.placement.cluster_placement import ClusterPlacement
from cachefs_cluster.placement.cluster_routes import ClusterRoutes
from cachefs_cluster.placement.cooperation import Cooperation, CooperationParts, placement_ring_of
from cachefs_cluster.placement.draining import DrainController
from cachefs_cluster.placement.rebalance import Rebalance, RebalanceParts
from cachefs_cluster.reporting.command_executor import CommandContext, CommandExecutor
from cachefs_cluster.reporting.observer_endpoint import ObserverEndpoint
from cachefs_cluster.reporting.reports import NodeReports, ReportSources
from cachefs_cluster.reporting.shard_warmups import ShardWarmups
from cachefs_cluster.search.fetches_for_peers import AwaitedSnapshots, FetchesForPeers
from cachefs_cluster.search.home_routes import HomeRoutes
from cachefs_cluster.search.missing_snapshots import MissingSnapshots
from cachefs_cluster.search.peer_source import PeerSource
from cachefs_cluster.section import ClusterSection
from cachefs_cluster.warmups.cluster_warmups import ClusterWarmupParts, ClusterWarmups
from cachefs_cluster.warmups.part import PartFetcher, PartParts
from cachefs_daemon.config import Config
from cachefs_daemon.content.warmup import WarmupState
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.node_cluster import AdoptConnection, NodeParts
from cachefs_daemon.ports import AwayNode, BlockPeers
from cachefs_daemon.runtime.background import BackgroundWork
from cachefs_daemon.runtime.error_log import ErrorLog


def join_cluster(config: Config, errors: ErrorLog) -> "JoinedCluster":
    """Return the cluster that the configuration names. Raises CachefsError."""
    return JoinedCluster(
        cluster_section(config), config.daemon.state_dir, errors, memory=config.memory_budget, ssd=config.ssd_budget
    )


class JoinedCluster:
    """Implements `cachefs_daemon.node_cluster.Cluster`. Used on the event loop."""

    def __init__(self, section: ClusterSection, state_dir: Path, errors: ErrorLog, *, memory: int, ssd: int) -> None:
        """memory, ssd: bytes that the node's tiers may take. Raises CachefsError."""
        self._section = section
        self._state_dir = state_dir
        self._secret = load_secret(section)
        self._membership = open_membership(section, state_dir, memory, ssd)
        self._plane = DataPlane(section, self._membership, errors, self._secret)
        if isinstance(self._membership, StaticMembership):
            self._membership.probe = self._plane.client.probe_silent
        self._missing_snapshots = MissingSnapshots()
        self._home_routes = HomeRoutes(self._membership, self._missing_snapshots, section.replicas)
        self.directory = ClusterDirectory()
        self.placement = ClusterPlacement()
        self._routes = ClusterRoutes(self._membership, self._home_routes.find_route, self._missing_snapshots)
        # Set by `make_block_peers` and `attach`.
        self._source: PeerSource
        self._node: NodeParts
        self._fetches_for_peers: FetchesForPeers
        self._sharing: NodeSharing
        self._rebalance: Rebalance
        self._draining: DrainController
        self._warmups: ClusterWarmups
        self._background_work: list[BackgroundWork] = []

    @property
    def name(self) -> str:
        return self._section.own_name

    @property
    def warmups(self) -> ClusterWarmups:
        return self._warmups

    @property
    def background_work(self) -> Sequence[BackgroundWork]:
        return self._background_work

    @property
    def upkeep(self) -> Sequence[Callable[[], None]]:
        return [self._secret.restore_file] if self._secret is not None else []

    # --- construction -------------------------------------------------------------------------------------------------

    def make_block_peers(self, limiter: ConcurrencyLimiter) -> BlockPeers:
        self._source = PeerSource(
            self._plane.client,
            self._routes.find_route,
            self._membership,
            limiter,
            self._missing_snapshots,
            steal=self._section.steal,
        )
        self._membership.add_listener(self._source.on_view)
        return self._source

    def attach(self, parts: NodeParts) -> None:
        self._node = parts
        self._fetches_for_peers = self._make_fetches_for_peers()
        self._sharing = self._make_sharing()
        self.directory.connect(self._sharing)
        standing = parts.storage.planning.standing or Ownership()
        if parts.fetches_ahead:
            cooperation = self._make_cooperation(standing)
            self.placement.connect(cooperation)
            self._routes.follow_snapshots(cooperation.shared_snapshot)
            self._plane.add_served_listener(cooperation.note_served_blocks)
        self._rebalance = self._make_rebalance(standing)
        self._home_routes.follow_rebalance(self._rebalance.is_searching)
        self._draining = DrainController(self._membership, self._sharing.shared, lambda: bool(parts.jobs.consumers))
        self._warmups = self._make_warmups()
        self._background_work += [self._rebalance.run, self._draining.run, self._warmups.run]
        if self._section.observers or self._section.schedulers:
            self._make_observer_endpoint()

    def _make_fetches_for_peers(self) -> FetchesForPeers:
        """Create the part that serves the blocks that other nodes request."""
        snapshots = self._node.snapshots
        awaited = AwaitedSnapshots(lambda one: snapshots.get(one) is not None, self.directory.is_coming)
        snapshots.add_open_listener(awaited.resume_requests)
        return FetchesForPeers(self._node.fetcher, awaited, self._missing_snapshots)

    def _make_sharing(self) -> NodeSharing:
        node = self._node
        return NodeSharing(
            SharingContext(
                self._section,
                self._membership,
                self._plane.certificates,
                self._secret,
                LocalDatasets(
                    node.catalog,
                    node.snapshots,
                    node.content.changes,
                    node.errors,
                    node.reads.mount_point_of,
                    node.reads.current_reads,
                ),
                node.jobs,
                node.threads,
                self._own_counters,
                node.shares,
            )
        )

    def _make_cooperation(self, standing: Ownership) -> Cooperation:
        """Create the part that fetches for readers of other nodes."""
        node, sharing = self._node, self._sharing
        cooperation = Cooperation(
            CooperationParts(
                plan=node.storage.planning.plan,
                standing=standing,
                tiering=node.storage.tiering,
                presence=node.storage.planning.presence,
                jobs=node.jobs,
                loader=node.loader,
                snapshots=node.snapshots,
                threads=node.threads,
                shared=sharing.shared,
                consumers=sharing.consumers,
                window=node.copy_window,
                directory=self._state_dir / "holders",
                replicas=self._section.replicas,
            )
        )
        self._background_work.append(cooperation.run)
        return cooperation

    def _make_rebalance(self, standing: Ownership) -> Rebalance:
        """Create the part that fetches blocks from peers as members change."""
        node, sharing, storage = self._node, self._sharing, self._node.storage
        rebalance = Rebalance(
            RebalanceParts(
                membership=self._membership,
                shared=sharing.shared,
                client=self._plane.client,
                blocks=storage.blocks,
                plan=storage.planning.plan,
                standing=standing,
                threads=node.threads,
                snapshots=lambda: node.catalog.read_snapshots(sharing.used.is_read),
                is_snapshot_pending=lambda: sharing.is_behind,
                shared_snapshot=self.placement.shared_snapshot,
                presence=storage.planning.presence,
                free_bytes=lambda: sum(storage.tiering.unlocked.free_by_tier),
                replicas=self._section.replicas,
                bandwidth=self._section.bandwidth,
            ),
            placement_ring_of(self._membership.view),
        )
        self._membership.add_listener(lambda view: rebalance.set_ring(placement_ring_of(view)))
        return rebalance

    def _make_warmups(self) -> ClusterWarmups:
        """Create the part that carries out the warm-ups of the whole cluster."""
        node = self._node
        fetcher = PartFetcher(
            PartParts(
                me=self._membership.view.me,
                warmups=node.content.warmups,
                fetcher=node.fetcher,
                catalog=node.catalog,
                storage=node.storage,
                threads=node.threads,
                shared_snapshot=self.placement.shared_snapshot,
            )
        )
        return ClusterWarmups(
            ClusterWarmupParts(
                shared=self._sharing.shared,
                catalog=node.catalog,
                jobs=node.jobs,
                threads=node.threads,
                fetcher=fetcher,
                state_dir=self._state_dir,
                grace=self._section.grace,
            )
        )

    def _make_observer_endpoint(self) -> None:
        """Serve the observers and schedulers that the configuration names."""
        node, storage = self._node, self._node.storage
        plan = storage.planning.plan
        warmups = ShardWarmups(node.content.warmups, plan, node.jobs, node.threads)
        reports = NodeReports(
            ReportSources(
                instance=node.instance,
                membership=self._membership,
                catalog=node.catalog,
                jobs=node.jobs,
                plan=plan,
                residency=node.residency,
                warmups=warmups,
                threads=node.threads,
                usage=storage.usage,
                traffic=self._traffic_totals,
                reads=node.mount_reads,
            )
        )
        context = CommandContext(
            node.catalog,
            node.content.pins,
            node.content.quotas,
            storage,
            node.threads,
            warmups,
            self._draining.drain_this_node,
        )
        ObserverEndpoint(self._sharing.shared.endpoint, self._membership, reports, CommandExecutor(context))
        self._background_work.append(reports.run)

    def open_servers(self, index: Path, tiers: dict[str, Path], adopt: AdoptConnection) -> None:
        fetch_for_peer = self._fetches_for_peers.request
        self._plane.open_servers(index, tiers, lambda link: adopt(link, fetch_for_peer))

    # --- start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._warmups.restore()
        await self._membership.start()
        await self._sharing.start()
        await self._plane.start()

    async def leave(self) -> None:
        await self._sharing.stop()
        await self._membership.stop()
        await self._plane.stop()

    async def close(self) -> None:
        await self._membership.stop()
        await self._plane.stop()
        await self.placement.close()

    # --- status -------------------------------------------------------------------------------------------------------

    def status(self) -> ClusterStatus:
        return self._status({})

    async def full_status(self) -> ClusterStatus:
        status = self._status(await self._sharing.counters())
        conflicts = self._sharing.shared.identity_conflicts.remarks(time.monotonic())
        warmups = [one for one in self._warmups.progress() if one.state in (WarmupState.WAITING, WarmupState.RUNNING)]
        return msgspec.structs.replace(status, remarks=[*status.remarks, *conflicts], warmups=warmups)

    def _status(self, counters: dict[str, NodeCounters]) -> ClusterStatus:
        status = cluster_status(self._membership.view, self._section, self._plane.traffic, counters)
        return msgspec.structs.replace(status, hot=self.placement.hot_datasets())

    def brief(self) -> ClusterBrief:
        brief = cluster_brief(self._membership.view, self._section)
        return msgspec.structs.replace(brief, hot=self.placement.hot_datasets())

    async def drain(self, node: str, *, undo: bool) -> DrainStatus:
        return await self._draining.drain(node, undo=undo)

    async def scale_inputs(self) -> tuple[Sequence[ScaleNode], Sequence[SnapshotDemand]] | None:
        if self.placement.cooperation is None:
            return None
        nodes = scaled_nodes(self._membership.view, await self._sharing.counters())
        return nodes, self.placement.cooperation.demands_of_snapshots()

    def peer_counts(self) -> PeerCounts:
        fetches, servers = self._node.fetcher.in_flight_fetches, self._plane.servers
        served = list(servers.served_totals().values()) if servers is not None else []
        return PeerCounts(
            blocks=fetches.peer_blocks,
            bytes=fetches.peer_bytes,
            served_blocks=sum(one.blocks for one in served),
            served_bytes=sum(one.bytes for one in served),
            served_fetched=sum(one.fetched for one in served),
            filled=self._rebalance.fetched_blocks,
            second_copies=self._rebalance.second_copies,
            cards=self._plane.client.received_by_card(),
            rails_down=self._plane.client.rails_down,
            **asdict(self._source.counts),
        )

    def away_nodes(self, now: float) -> Iterator[AwayNode]:
        silent = self._source.silent_nodes()
        for record in self._membership.view.others:
            if reason := self._plane.client.silence_reason(record.id):
                yield AwayNode(record.name, reason)
            elif record.id in silent:
                since = time.time() - (now - silent[record.id])
                yield AwayNode(record.name, "it sends no heartbeats", since)
            elif record.state == "away":
                yield AwayNode(record.name, "it is away from the cluster")

    def _traffic_totals(self) -> tuple[int, int, int]:
        """Return bytes since the start: from origins, from other nodes, to other nodes."""
        counts = self.peer_counts()
        return self._node.fetcher.fetched_bytes, counts.bytes, counts.served_bytes

    async def _own_counters(self) -> NodeCounters:
        node = self._node
        usage = await node.threads.run(node.storage.usage)
        counters = counters_of(
            node.started,
            [TierUse(tier.name, tier.limit, tier.used) for tier in usage],
            node.jobs,
            (node.fetcher.fetched_blocks, node.fetcher.fetched_bytes),
            self._sharing.problems(),
            {record.id: self._plane.traffic(record.id).bytes_in for record in self._membership.view.others},
        )
        return msgspec.structs.replace(counters, replicas=self._section.replicas, grace=self._section.grace)
