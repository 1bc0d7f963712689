"""A simulated node: a machine with a disk that stays, and a daemon that may be killed and started again.

The daemon's parts are the product's, connected as `cachefs_daemon.node` connects them.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cachefs.block import block_count, block_key, block_length, content_id
from cachefs.errors import NotFound
from cachefs.messages import BlockRef
from cachefs_cluster.membership.identity import NodeIdentity, make_own_record
from cachefs_cluster.membership.shared import SharedMembership
from cachefs_cluster.peers.plane import DataPlane
from cachefs_cluster.search.fetches_for_peers import AwaitedSnapshots, FetchesForPeers
from cachefs_cluster.search.home_routes import HomeRoutes
from cachefs_cluster.search.missing_snapshots import MissingSnapshots
from cachefs_cluster.search.peer_source import PeerSource
from cachefs_cluster.section import ClusterSection
from cachefs_daemon.api.fetch_channel import FetchChannelServer
from cachefs_daemon.api.identity import CallerRights
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetch_parts import FetchParts, SourceLookups
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.origin.base import ObjectRange
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from tests.simulation.disk import Disk, any_store
from tests.simulation.etcd import Etcd, NodeStore
from tests.simulation.loop import Process
from tests.simulation.origin import ObjectStore, SimulatedOrigin
from tests.simulation.system import Machine

PORT: Final = 7380
BLOCK_SIZE: Final = 1 << 16
CLUSTER: Final = "simulated"
# Seconds that a read waits for an origin.
READ_DEADLINE: Final = 20.0


@dataclass(frozen=True)
class File:
    """A file of a snapshot."""

    key: bytes
    version: bytes
    size: int


@dataclass(frozen=True)
class SimulatedSnapshot:
    """A listing of the store at one moment."""

    id: str
    files: tuple[File, ...]

    def refs(self) -> list[BlockRef]:
        """Return all blocks, each to be read as a whole."""
        return [
            BlockRef(self.id, entry, number, b"", 0, block_length(file.size, BLOCK_SIZE, number))
            for entry, file in enumerate(self.files)
            for number in range(block_count(file.size, BLOCK_SIZE))
        ]

    def key(self, ref: BlockRef) -> bytes:
        file = self.files[ref.entry]
        return block_key(content_id(b"set/" + file.key, file.version, file.size, BLOCK_SIZE), ref.number)


@dataclass
class Limits:
    """What a node may use."""

    connections: int = 8
    bytes_in_flight: int = 1 << 20
    replicas: int = 1
    grace: float = 10.0


@dataclass
class Daemon:
    """The parts of a daemon that runs."""

    process: Process
    membership: SharedMembership
    plane: DataPlane
    slots: ConcurrencyLimiter
    fetcher: Fetcher
    elsewhere: PeerSource
    routes: HomeRoutes
    channel: FetchChannelServer
    awaited: AwaitedSnapshots
    threads: Threads
    errors: ErrorLog


@dataclass
class SimulatedNode:
    """See the module."""

    number: int
    loop: Machine
    store: ObjectStore
    etcd: Etcd
    disk: Disk
    limits: Limits
    clock_offset: float = 0.0
    # By id, those that the node has.
    snapshots: dict[str, SimulatedSnapshot] = field(default_factory=dict)
    process: Process | None = None
    daemon: Daemon | None = None
    is_draining: bool = False
    _starts: int = 0

    @property
    def host(self) -> str:
        return f"10.0.0.{self.number}"

    @property
    def id(self) -> str:
        return f"{self.number:016x}"

    @property
    def is_up(self) -> bool:
        """Does its daemon serve?"""
        return self.daemon is not None and self.daemon.process.is_alive

    def start(self) -> "asyncio.Task[None]":
        """Start its daemon."""
        self._starts += 1
        self.is_draining = False
        self.process = Process(self.loop, self.host, clock_offset=self.clock_offset)
        return self.process.start(self._run(self.process))

    def kill(self) -> None:
        """Kill its daemon."""
        if self.process is not None:
            self.process.kill()
        self.daemon = None

    async def _run(self, process: Process) -> None:
        daemon = self._made(process)
        await daemon.membership.start()
        await daemon.plane.start()
        await daemon.membership.announce("active")
        self.daemon = daemon

    def _made(self, process: Process) -> Daemon:
        """Make the parts, as `Node` does."""
        limits = self.limits
        section = ClusterSection(
            membership="etcd", cluster=CLUSTER, name=f"n{self.number}", listen=f"{self.host}:{PORT}",
            insecure_peers=True, etcd=("http://etcd:2379",), replicas=limits.replicas, grace=limits.grace,
        )  # fmt: skip
        errors, threads = ErrorLog(), Threads()
        identity = NodeIdentity(self.id, f"{self.number * 1000 + self._starts:016x}")
        record = make_own_record(section, identity, self.disk.budget, 0)
        membership = SharedMembership(NodeStore(self.etcd), record, section.grace, Path(f"/simulated/{self.number}"))
        plane = DataPlane(section, membership, errors, None)
        slots = ConcurrencyLimiter(limits.connections, limits.bytes_in_flight)
        origin = SimulatedOrigin(self.store)

        def source(ref: BlockRef) -> BlockSource:
            return self.source(ref, origin)

        lacks = MissingSnapshots()
        routes = HomeRoutes(membership, lacks, limits.replicas)
        elsewhere = PeerSource(plane.client, routes.find_route, membership, slots, lacks)
        membership.add_listener(elsewhere.on_view)
        parts = FetchParts(
            any_store(self.disk), SourceLookups(source), threads, slots, errors, READ_DEADLINE, peers=elsewhere
        )
        fetcher = Fetcher(parts)
        awaited = AwaitedSnapshots(lambda one: one in self.snapshots, lambda _: False)
        serving = FetchesForPeers(fetcher, awaited, lacks)
        channel = FetchChannelServer(Path(f"/simulated/{self.number}.ch"), CallerRights(0), fetcher, errors)

        async def adopt(link: Any) -> None:
            await channel.adopt_connection(link, serving.request)

        plane.open_servers(Path("index"), {}, adopt)
        return Daemon(process, membership, plane, slots, fetcher, elsewhere, routes, channel, awaited, threads, errors)

    def source(self, ref: BlockRef, origin: SimulatedOrigin) -> BlockSource:
        """Return where a block comes from. Raises NotFound."""
        snapshot = self.snapshots.get(ref.snapshot)
        if snapshot is None:
            raise NotFound(f"snapshot {ref.snapshot} is not on this node")
        file = snapshot.files[ref.entry]
        wanted = ObjectRange(
            file.key, file.version, file.size, ref.number * BLOCK_SIZE, block_length(file.size, BLOCK_SIZE, ref.number)
        )
        return BlockSource(snapshot.key(ref), origin, wanted, ref.snapshot, ref.entry, ref.number)

    def learn(self, snapshot: SimulatedSnapshot) -> None:
        """Have a snapshot from now on."""
        self.snapshots[snapshot.id] = snapshot
        if self.daemon is not None and self.daemon.process.is_alive:
            self.daemon.process.run(self.daemon.awaited.resume_requests, snapshot.id)

    async def stop(self, daemon: Daemon) -> None:
        """End the daemon as a signal does: everything under way ends."""
        await daemon.membership.stop()
        await daemon.plane.stop()
        await daemon.channel.stop(0)
        await daemon.fetcher.close()
        daemon.threads.close()
