"""The ports of a node: what a node asks of the other nodes of its cluster, and the null implementation of each port for
a node that is in no cluster.

`cachefs_cluster` implements the ports, and the command line plugs the implementations in.
"""

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from cachefs.errors import ConfigError
from cachefs.messages import RemoteMount, WarmupForecast, WarmupProgress, WarmupRequest
from cachefs.planning.blocks.space import BlockSpace
from cachefs_daemon.datasets.stamps import SharedChanges, UnsharedChanges

if TYPE_CHECKING:
    from cachefs_daemon.fetch.block_fetch import BlockFetch


@dataclass(frozen=True, slots=True, eq=False)
class FoundBlock:
    """A whole, verified block that another node gave."""

    # Release the view soon: its memory belongs to a connection, which reuses it once no view is left.
    data: memoryview
    # Checksums of all pieces, 8 bytes each.
    checksums: bytes
    # Id and name of the node that gave it.
    node_id: str
    node_name: str
    # Loop time of the request.
    requested_at: float


# Called with the block; or, at most once and before that, with None: ask the origin too. A node may still give the
# block afterwards.
FoundCallback = Callable[[FoundBlock | None], None]


class BlockSearch(Protocol):
    """The search for one block among other nodes, until its deadline."""

    @property
    def requested_nodes(self) -> tuple[str, ...]:
        """Names of the nodes with requests in flight."""

    def start(self) -> None:
        """Start the search. It may call its callback at once."""

    def raise_priority(self) -> None:
        """Raise the priority: a reader waits from now on."""

    def forbid_delegation(self) -> None:
        """Stop other nodes from fetching the block: one of them may be waiting for this node to fetch it."""

    def cancel(self) -> None:
        """End the search: the block has arrived, or is no longer wanted."""


class PeerRoute(Protocol):
    """The other nodes that may have a block, or can fetch it."""

    @property
    def is_kept_here(self) -> bool:
        """Whether this node keeps the block; otherwise it holds a mere copy."""

    def search(self, on_result: FoundCallback, /) -> BlockSearch | None:
        """Return a search, not started yet; None if none of the nodes can be asked."""


class BlockPeers(Protocol):
    """Port: the other nodes as a source of blocks. Used on the event loop."""

    @property
    def has_nodes(self) -> bool:
        """Whether this node is in a cluster."""

    @property
    def queued_ahead(self) -> int:
        """Searches without a waiting reader that wait for their turn."""

    def find_route(self, fetch: "BlockFetch", /) -> PeerRoute | None:
        """Return the route of a block that is not on this node; None if only the origin is left."""

    def search_all(self, fetch: "BlockFetch", on_result: FoundCallback, /) -> BlockSearch | None:
        """Return a search among all nodes, not started yet, for a block that this node cannot get from its origin. None
        if no node can be asked."""

    def can_delegate(self, node_id: str, seconds: float, /, *, ahead: bool) -> bool:
        """Return whether a requesting node may fetch a block for this one, whose reads from the origin wait *seconds*
        for their turn. ahead: no reader waits for the block yet."""

    def search_delegated(self, fetch: "BlockFetch", node_id: str, on_result: FoundCallback, /) -> BlockSearch | None:
        """Return a search, not started yet, for a block that this node hands to a requesting node to fetch. None if the
        node cannot be asked any more."""


class NoPeers:
    """A node in no cluster: only origins have blocks."""

    has_nodes: Final = False
    queued_ahead: Final = 0

    def find_route(self, _: "BlockFetch") -> None:
        """Return None: no other node may have the block."""

    def search_all(self, _: "BlockFetch", __: FoundCallback) -> None:
        """Return None: no other node can be asked."""

    def can_delegate(self, _: str, __: float, *, ahead: bool) -> bool:
        """Return False: no other node requests blocks."""
        return False

    def search_delegated(self, _: "BlockFetch", __: str, ___: FoundCallback) -> None:
        """Return None: no other node requests blocks."""


NO_PEERS: Final = NoPeers()


@dataclass(frozen=True, slots=True)
class AwayNode:
    """A node of the cluster that is not asked, or sends no heartbeat."""

    name: str
    reason: str
    # Unix time in seconds; 0: not known.
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalRead:
    """The snapshots of a dataset that a mount, job or warmup of this node reads."""

    dataset: str
    # Ids of snapshots.
    snapshots: Sequence[str]
    # Mountpoint, if it is a mount; and whether it stays at its snapshot after a refresh without having been pinned to
    # it.
    mountpoint: str = ""
    stays_after_refresh: bool = False


class RemoteReaders(Protocol):
    """The readers of snapshots on other nodes. Used on the event loop."""

    def is_used(self, snapshot_id: str) -> bool:
        """Return whether another node reads the snapshot, or did a while ago."""

    def keep_if_read(self, snapshot_id: str) -> bool:
        """Return whether another node reads the snapshot, even a current one. If so, this node keeps it."""

    def note_reads_changed(self) -> None:
        """Publish soon what this node reads: a mount has begun or ended."""

    def outdated_mounts(self, name: str, current: str) -> Sequence[RemoteMount]:
        """Return the mounts of other nodes that stay at a snapshot of the dataset other than *current*."""

    def check_not_mounted_elsewhere(self, name: str) -> None:
        """Raise Busy if another node has mounted the dataset."""


class Directory(SharedChanges, RemoteReaders, Protocol):
    """Datasets and their readers on other nodes. Used on the event loop."""

    async def catch_up(self, seconds: float) -> None:
        """Wait for the state that other nodes have published by now, for *seconds* seconds at most."""


class LocalDirectory(UnsharedChanges):
    """The directory of a node that is alone: all readers are its own."""

    def is_used(self, snapshot_id: str) -> bool:
        return False

    def keep_if_read(self, snapshot_id: str) -> bool:
        return False

    def note_reads_changed(self) -> None: ...

    def outdated_mounts(self, name: str, current: str) -> Sequence[RemoteMount]:
        return ()

    def check_not_mounted_elsewhere(self, name: str) -> None: ...

    async def catch_up(self, seconds: float) -> None: ...


class SharedWarmups(Protocol):
    """The warmups of the whole cluster. Used on the event loop."""

    def __contains__(self, number: int, /) -> bool:
        """Return whether there is a warmup with this id."""

    async def begin(self, request: WarmupRequest, /) -> WarmupProgress:
        """Begin a warmup on all nodes, or schedule it. Raises CachefsError."""

    async def forecast(self, request: WarmupRequest, /) -> WarmupForecast:
        """Forecast a warmup. Raises CachefsError."""

    def progress(self) -> list[WarmupProgress]:
        """Return the progress of all warmups, oldest first."""

    def watch(self, number: int, /) -> AsyncGenerator[WarmupProgress, None]:
        """Yield the progress of a warmup until its end, which does not depend on the caller. Raises NotFound."""

    async def cancel(self, number: int, /) -> WarmupProgress:
        """Cancel a warmup on all nodes; fetched blocks stay. Raises NotFound."""


class NoSharedWarmups:
    """A node that is alone has no warmups but its own."""

    def __contains__(self, number: int) -> bool:
        return False

    async def begin(self, _: WarmupRequest) -> WarmupProgress:
        raise ConfigError("this node is in no cluster, so --cluster and its options do not apply; leave them out")

    async def forecast(self, request: WarmupRequest) -> WarmupForecast:
        await self.begin(request)
        raise AssertionError

    def progress(self) -> list[WarmupProgress]:
        return []

    async def watch(self, number: int) -> AsyncGenerator[WarmupProgress, None]:
        """Yield nothing."""
        for progress in self.progress():
            yield progress

    async def cancel(self, number: int) -> WarmupProgress:
        raise ConfigError("this node is in no cluster")


class Placement(Protocol):
    """The share of the cluster's blocks that this node keeps. Used on the event loop."""

    @property
    def first_rate(self) -> float:
        """The rate in reads per second that plans assume until a consumer has begun; 0: the plan's own."""

    async def place_snapshot(self, space: BlockSpace) -> None:
        """Decide which blocks of a snapshot this node keeps, before anything is planned with it."""

    def used_snapshots(self) -> Collection[str]:
        """Return the ids of the snapshots whose plans placement needs."""

    def margins(self) -> Mapping[str, float]:
        """Return, by consumer, the seconds by which other nodes may ask for blocks before the plan expects them."""


class LocalPlacement:
    """The placement of a node that is alone: every block is kept here."""

    first_rate: Final = 0.0

    async def place_snapshot(self, space: BlockSpace) -> None: ...

    def used_snapshots(self) -> Collection[str]:
        return ()

    def margins(self) -> Mapping[str, float]:
        return {}


LOCAL_DIRECTORY: Final[Directory] = LocalDirectory()
LOCAL_PLACEMENT: Final[Placement] = LocalPlacement()
NO_SHARED_WARMUPS: Final[SharedWarmups] = NoSharedWarmups()
