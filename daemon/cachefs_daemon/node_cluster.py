"""The cluster as one object of the node: its ports, its work in the background, and its status.

The command line passes it to `Node`: the implementation of `cachefs_cluster` where the configuration has a cluster, and
NO_CLUSTER where it has none.
"""

import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from cachefs.cluster_messages import ClusterStatus, DrainStatus, ScaleNode
from cachefs.errors import ConfigError
from cachefs.messages import ClusterBrief, PeerCounts
from cachefs.planning.cluster.scale import SnapshotDemand
from cachefs_daemon.content.content_parts import ContentParts
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.fetch.fetcher import Fetcher, FetchForPeer
from cachefs_daemon.fetch.origin_shares import OriginShares
from cachefs_daemon.jobs.epoch_loader import EpochLoader
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.local_reads import LocalReads
from cachefs_daemon.mounts.registry import MountReadCounts
from cachefs_daemon.ports import (
    LOCAL_DIRECTORY,
    LOCAL_PLACEMENT,
    NO_PEERS,
    NO_SHARED_WARMUPS,
    AwayNode,
    BlockPeers,
    Directory,
    Placement,
    SharedWarmups,
)
from cachefs_daemon.reporting.residency import Residency
from cachefs_daemon.runtime.background import BackgroundWork
from cachefs_daemon.runtime.error_log import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage

# Serves one connection of the fetch channel, to a peer server, whose requests the given function answers.
AdoptConnection = Callable[[socket.socket, FetchForPeer], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The parts of a node that its cluster uses."""

    # Changes with every start of the daemon; and the monotonic time of its start.
    instance: str
    started: float
    storage: Storage
    threads: Threads
    errors: ErrorLog
    catalog: Catalog
    snapshots: OpenSnapshots
    content: ContentParts
    fetcher: Fetcher
    jobs: JobRegistry
    shares: OriginShares
    loader: EpochLoader
    residency: Residency
    reads: LocalReads
    # By id of each mount: its spec and its reads.
    mount_reads: Callable[[], dict[str, MountReadCounts]]
    # Seconds ahead of readers within which blocks held by other nodes are fetched.
    copy_window: Callable[[], float]
    # Whether blocks are fetched before they are read.
    fetches_ahead: bool


class Cluster(Protocol):
    """The other nodes. Used on the event loop."""

    @property
    def name(self) -> str:
        """The name of this node."""

    @property
    def directory(self) -> Directory:
        """Datasets and their readers on other nodes."""

    @property
    def placement(self) -> Placement:
        """The share of the cluster's blocks that this node keeps."""

    @property
    def warmups(self) -> SharedWarmups:
        """The warmups of the whole cluster. Use them after `attach`."""

    def make_block_peers(self, limiter: ConcurrencyLimiter) -> BlockPeers:
        """Return the other nodes as a source of blocks. limiter: limits the reads from origins. Call once, before
        `attach`."""

    def attach(self, parts: NodeParts) -> None:
        """Create what needs the parts of the node. Call once, before `start`."""

    def open_servers(self, index: Path, tiers: dict[str, Path], adopt: AdoptConnection) -> None:
        """Listen for other nodes. index, tiers: the index, and the tiers' directories by name, from which blocks are
        served. Call before `start`. Raises ConfigError."""

    async def start(self) -> None:
        """Raises CachefsError."""

    async def leave(self) -> None:
        """End all exchange with other nodes. May be called again."""

    async def close(self) -> None:
        """End what is left, after the background work has ended. May be called again."""

    @property
    def background_work(self) -> Sequence[BackgroundWork]:
        """Work that runs as long as the daemon."""

    @property
    def upkeep(self) -> Sequence[Callable[[], None]]:
        """Steps to be repeated every few seconds, each in a thread."""

    def status(self) -> ClusterStatus:
        """Return the status as far as this node knows it."""

    async def full_status(self) -> ClusterStatus:
        """Return the status with the counters of the other nodes, which are asked."""

    def brief(self) -> ClusterBrief:
        """Return a summary of the status."""

    async def drain(self, node: str, *, undo: bool) -> DrainStatus:
        """Drain a node, by its name or id; empty: this one. undo: cancel the drain. Raises CachefsError."""

    async def scale_inputs(self) -> tuple[Sequence[ScaleNode], Sequence[SnapshotDemand]] | None:
        """Return the nodes that count for placement, and the demands of all their jobs; None where this node knows of
        its own jobs only."""

    def peer_counts(self) -> PeerCounts:
        """Return counters of the blocks exchanged with other nodes."""

    def away_nodes(self, now: float) -> Iterable[AwayNode]:
        """Return the nodes that are not asked, or send no heartbeat. now: loop time."""


class NoCluster:
    """The cluster of a node that is alone. Opens no port and starts nothing."""

    directory: Final[Directory] = LOCAL_DIRECTORY
    placement: Final[Placement] = LOCAL_PLACEMENT
    warmups: Final[SharedWarmups] = NO_SHARED_WARMUPS
    background_work: Final[Sequence[BackgroundWork]] = ()
    upkeep: Final[Sequence[Callable[[], None]]] = ()

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def name(self) -> str:
        return socket.gethostname()

    def make_block_peers(self, limiter: ConcurrencyLimiter) -> BlockPeers:
        return NO_PEERS

    def attach(self, parts: NodeParts) -> None: ...

    def open_servers(self, index: Path, tiers: dict[str, Path], adopt: AdoptConnection) -> None: ...

    async def start(self) -> None: ...

    async def leave(self) -> None: ...

    async def close(self) -> None: ...

    def status(self) -> ClusterStatus:
        age = time.monotonic() - self._began
        return ClusterStatus(name="", source="none", me="", epoch=0, age=age, problem="")

    async def full_status(self) -> ClusterStatus:
        return self.status()

    def brief(self) -> ClusterBrief:
        return ClusterBrief()

    async def drain(self, node: str, *, undo: bool) -> DrainStatus:
        raise ConfigError("this node is in no cluster; see [cluster] in its configuration")

    async def scale_inputs(self) -> None:
        """Return None: this node is alone."""

    def peer_counts(self) -> PeerCounts:
        return PeerCounts()

    def away_nodes(self, now: float) -> Iterable[AwayNode]:
        return ()


NO_CLUSTER: Final[Cluster] = NoCluster()
