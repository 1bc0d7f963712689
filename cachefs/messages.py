"""What mounts, cachectl and the daemon say to each other (see cachefs.rpc for how).

Messages are msgspec structs and not protobuf: they are typed, need no generated code, and ignore unknown fields, so
a newer and an older side understand each other. Give every new field a default.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""


# --- mount <-> daemon ---------------------------------------------------------------------------------------------


class DatasetView(Message, frozen=True):
    """A dataset as it stands now. snapshot: 32 hex digits; path: of the snapshot file on this node; share: of each tier
    that it may take; ttl: seconds that its blocks stay after their last read, 0 where nothing limits that."""

    name: str
    url: str
    snapshot: str
    path: str
    files: int
    directories: int
    bytes: int
    created_ns: int
    problems: int = 0
    share: float = 1.0
    ttl: float = 0.0


class Stall(Message, frozen=True, array_like=True):
    """One read that waited. source: `origin`, `ssd` or `daemon`."""

    key: bytes
    seconds: float
    source: str


class MountReport(Message, frozen=True):
    """What a mount says of itself: at start, ten times a second while anything changed, at least every 10 s, and
    at the end.

    counters: cumulative since the mount started (see cachefs.mount.counters); accessed: keys of the blocks read from a
    tier since the last report, oldest first; stalls: reads that waited since then; closing: the mount ends.
    pid: of the process that is there as long as the mount is. Requests are served by workers, each of which reports for
    itself: worker: its place among them; worker_pid: its process, after which its counters begin anew.
    """

    id: str
    mountpoint: str
    spec: str
    pid: int
    counters: dict[str, int] = {}
    accessed: list[bytes] = []
    closing: bool = False
    stalls: list[Stall] = []
    worker: int = 0
    worker_pid: int = 0


class NodeView(Message, frozen=True):
    """What a mount must know of its node. instance: changes with every start of the daemon.

    index: path of the LMDB index; tiers: tier name -> directory of its segments; datasets: all, with their current
    snapshots; capacity/used: bytes over all tiers; read_deadline: seconds a read may wait in all.
    """

    instance: str
    index: str
    tiers: dict[str, str]
    datasets: list[DatasetView]
    capacity: int
    used: int
    read_deadline: float


class BlockRef(Message, frozen=True, array_like=True):
    """Block *number* of entry *entry* of a snapshot; bad: the packed Location whose bytes failed verification."""

    snapshot: str
    entry: int
    number: int
    bad: bytes = b""


class Fetch(Message, frozen=True):
    """Make blocks resident. ahead: nobody waits for them, so they yield to those somebody waits for.

    The reply to an `ahead` request comes at once and is empty.
    """

    blocks: list[BlockRef]
    ahead: bool = False
    deadline: float = 60.0


class FetchedBlock(Message, frozen=True, array_like=True):
    """location: packed Location, or empty where it failed with *errno* for the reason *message*."""

    location: bytes
    errno: int = 0
    message: str = ""


class Fetched(Message, frozen=True):
    """One per asked block, in the same order."""

    blocks: list[FetchedBlock]


# --- cachectl <-> daemon ------------------------------------------------------------------------------------------


class Empty(Message, frozen=True):
    pass


class TierStatus(Message, frozen=True):
    """One tier, in bytes and blocks. limit: the budget after cgroup and free-space limits; hits: reads it served."""

    name: str
    directory: str
    budget: int
    limit: int
    used: int
    blocks: int
    segments: int
    hits: int
    hit_bytes: int
    evicted: int
    policy: str
    problem: str = ""


class MountView(Message, frozen=True):
    id: str
    mountpoint: str
    spec: str
    pid: int
    alive: bool
    seconds_since_report: float
    counters: dict[str, int]


class ErrorView(Message, frozen=True):
    """A failure somebody should know of: when (unix seconds), how often since, where, what."""

    when: float
    count: int
    subject: str
    message: str


class Status(Message, frozen=True):
    """misses: reads that had to wait for a fetch; repairs: blocks whose bytes were found wrong and were dropped."""

    instance: str
    version: str
    pid: int
    uptime: float
    state_dir: str
    tiers: list[TierStatus]
    datasets: int
    misses: int
    fetched_blocks: int
    fetched_bytes: int
    origin_requests: int
    origin_errors: int
    in_flight_blocks: int
    in_flight_bytes: int
    repairs: int
    mounts: list[MountView]
    warmups: int
    index_blocks: int
    errors: list[ErrorView] = []


class OriginOptions(Message, frozen=True):
    """How to reach an origin where the daemon's defaults do not fit. Credentials come from the standard AWS chain."""

    endpoint_url: str | None = None
    region: str | None = None
    addressing_style: str | None = None
    profile: str | None = None
    anonymous: bool = False


class DatasetAdd(Message, frozen=True):
    name: str
    url: str
    options: OriginOptions = OriginOptions()


class DatasetName(Message, frozen=True):
    name: str


class DatasetLimit(Message, frozen=True):
    """share: of each tier, 1 for no limit; ttl: seconds after a block's last read, 0 for no limit; None: as it was."""

    name: str
    share: float | None = None
    ttl: float | None = None


class DatasetList(Message, frozen=True):
    datasets: list[DatasetView]


class SnapshotDiff(Message, frozen=True):
    """File counts between two snapshots of a dataset."""

    added: int
    changed: int
    removed: int
    unchanged: int


class Problem(Message, frozen=True, array_like=True):
    """A key that cannot be a file, and why."""

    key: bytes
    reason: str


class DatasetDetail(Message, frozen=True):
    """cached: tier name -> bytes of the current snapshot in it; snapshots: those still on disk, newest first."""

    dataset: DatasetView
    block_size: int
    options: OriginOptions
    cached: dict[str, int]
    pinned: list[bytes]
    problems: list[Problem]
    snapshots: list[str]


class ListingProgress(Message, frozen=True):
    """phase: `listing` or `building`; the stream's last message carries the dataset (and, on refresh, the diff)."""

    phase: str
    objects: int
    bytes: int
    dataset: DatasetView | None = None
    diff: SnapshotDiff | None = None


class Selection(Message, frozen=True):
    """Files of a dataset: those at or below the paths (all, where there are none)."""

    dataset: str
    paths: list[bytes] = []


class Warmup(Message, frozen=True):
    """fraction: of the selected files, in path order; wait: stream progress until done."""

    dataset: str
    paths: list[bytes] = []
    fraction: float = 1.0
    wait: bool = True


class WarmupProgress(Message, frozen=True):
    """Blocks and bytes so far; skipped: the policy did not admit them; failed: they could not be fetched."""

    id: int
    state: str
    blocks: int
    blocks_total: int
    bytes: int
    bytes_total: int
    skipped: int = 0
    failed: int = 0
    message: str = ""


class Freed(Message, frozen=True):
    blocks: int
    bytes: int


class Pinned(Message, frozen=True):
    files: int
    bytes: int


class CachedFile(Message, frozen=True, array_like=True):
    """cached: bytes per tier, in the order of cachefs.block.TIER_NAMES."""

    path: bytes
    size: int
    cached: list[int]
    pinned: bool


class CachedFiles(Message, frozen=True):
    """One page of a stream."""

    files: list[CachedFile]


class VerifyProgress(Message, frozen=True):
    blocks: int
    blocks_total: int
    bytes: int
    repaired: int
    done: bool = False
