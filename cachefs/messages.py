"""Messages between mounts, cachectl and the daemon; cachefs.rpc sends them.

Messages are msgspec structs and not protobuf: they are typed, need no generated code, and ignore unknown fields. So a
newer and an older side understand each other, if every new field has a default.
"""

from enum import StrEnum
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

# Datasets of which one call asks what is cached.
MOST_NAMES: Final = 64


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""


# --- mount <-> daemon ---------------------------------------------------------------------------------------------


class DatasetView(Message, frozen=True):
    """A dataset at its current snapshot."""

    name: str
    url: str
    # Id of the snapshot: 32 hex digits.
    snapshot: str
    # Path of the snapshot file on this node.
    path: str
    # How many files and directories (without the root) are in the snapshot, and the bytes of all files.
    files: int
    directories: int
    bytes: int
    # When the snapshot was made: unix time in nanoseconds.
    created_ns: int
    # Keys of the origin that are not in the snapshot.
    problems: int = 0
    # Files that could not be read when they were listed, before they are restored from an archive.
    archived: int = 0
    # Part of each tier that the dataset may take.
    share: float = 1.0
    # Seconds that blocks stay after their last read; 0 for no limit.
    ttl: float = 0.0
    # Bytes of each tier that the dataset may take; 0 for no limit.
    most: int = 0
    # Ids of its other snapshots on this node, which mounts may still show.
    others: list[str] = msgspec.field(default_factory=list)
    # Where its origin is, in few words: the endpoint or account and whatever else it was given; empty for the defaults.
    reached: str = ""


class Stall(Message, frozen=True, array_like=True):
    """One read that waited."""

    # Key of the block.
    key: bytes
    seconds: float
    # What it waited for: `origin`, `ssd`, `daemon`, or `peer NAME`.
    source: str


# A worker of a mount reports at once where it has read such a share of what the tiers hold, but no sooner than so many
# seconds after its last report. Blocks stay in the tiers that a reader has passed unseen.
REPORT_SHARE: Final = 1 / 64
SHORTEST_REPORT_SECONDS: Final = 0.02


class MountReport(Message, frozen=True):
    """What a worker of a mount reports: at the start, ten times a second while anything changes, up to 50 times where
    much is read, at least every 10 s, and at the end."""

    # Id of the mount, a different one each time that something is mounted.
    id: str
    mountpoint: str
    # What is mounted (cachefs.mount_spec).
    spec: str
    # Number of the process that lives as long as the mount.
    pid: int
    # What the worker has counted since its process started, by name (see cachefs.mount.counters).
    counters: dict[str, int] = {}
    # Keys of the blocks that were read from a tier since the last report, oldest first.
    accessed: list[bytes] = []
    # The worker ends.
    closing: bool = False
    # Reads that have waited since the last report.
    stalls: list[Stall] = []
    # Number of the worker among the mount's workers.
    worker: int = 0
    # The worker's process. Another process in the place of this worker has counters of its own.
    worker_pid: int = 0
    # The daemon that has answered this worker's last report (NodeView.instance); empty where none has.
    heard_from: str = ""
    # Id of the snapshot that is shown where one dataset is mounted; else empty.
    snapshot: str = ""
    # Of cachefs; empty: of a mount before 0.2.
    version: str = ""
    # A signal has asked the mount to end: it waits until no program uses it, for its grace at most.
    ending: bool = False
    # Ids of the snapshots of which files were read since the last report; None of a mount of an earlier release.
    snapshots_read: list[str] | None = None
    # The kernel's number of the FUSE connection; 0 before it is mounted, and of a mount of an earlier release.
    connection: int = 0


class MountElsewhere(Message, frozen=True):
    """A mount of another node of the cluster."""

    # Name of the node.
    node: str
    mountpoint: str
    # Id of the snapshot that the mount stays at.
    snapshot: str


class NodeView(Message, frozen=True):
    """What a mount must know of its node."""

    # Names this run of the daemon: another text for each start.
    instance: str
    # Path of the LMDB index.
    index: str
    # Name of a tier -> directory of its segments.
    tiers: dict[str, str]
    # All datasets.
    datasets: list[DatasetView]
    # Bytes of all tiers together: what they may take, and what they take.
    capacity: int
    used: int
    # Seconds that a read may wait in all.
    read_deadline: float
    # Ids of users who ask which process reads which file (cachefs.read_messages).
    asking: list[int] = []


class BlockRef(Message, frozen=True, array_like=True):
    """A block of a file."""

    # Id of the snapshot.
    snapshot: str
    # Number of the file in the snapshot.
    entry: int
    # Number of the block in the file.
    number: int
    # The packed Location whose bytes failed verification, or could not be had; empty where none has failed.
    bad: bytes = b""
    # The bytes of the block that the reader waits for: it takes them out of the reply where no tier can hold the block.
    # With a size of 0 it does not.
    start: int = 0
    size: int = 0
    # The tier at *bad* does not answer: take the bytes from the origin, and do not wait for it either.
    slow: bool = False


class Fetch(Message, frozen=True):
    """Bring blocks to the node (cachefs.fetch_frames sends it)."""

    blocks: list[BlockRef]
    # Nobody waits for these blocks. They come after blocks that a reader waits for, and the reply comes at once, empty.
    ahead: bool = False
    # Seconds from now within which the reply is needed.
    deadline: float = 60.0
    # Id of the node that asks: only the daemon's own peer servers ask for others. And whether nobody there waits for
    # the blocks yet; whether it would take them from the origin itself.
    peer: str = ""
    unhurried: bool = False
    may_take: bool = False
    # Whether the request waits for a snapshot that is on its way here.
    await_snapshot: bool = True


class FetchedBlock(Message, frozen=True, array_like=True):
    """What came of a block."""

    # The packed Location; empty where the fetch has failed, and where no tier can hold the block.
    location: bytes
    # Why it has failed: for the reader, and as one line of text.
    errno: int = 0
    message: str = ""
    # Where no tier has the block, or has it yet: the whole pieces around the bytes that the reader waits for, and the
    # checksums of all pieces of the block.
    data: memoryview = memoryview(b"")
    checksums: bytes = b""
    # For a node that asks: it is to take the block from the origin itself; or to ask others, as it is not here.
    take_it: bool = False
    not_here: bool = False
    # Where it came from, if that was just now: `peer NAME`, or empty for its origin.
    source: str = ""
    # For a node that asks: the next node is to bring it, since this one does not have the snapshot.
    lacks_snapshot: bool = False


# --- cachectl <-> daemon ------------------------------------------------------------------------------------------


class Empty(Message, frozen=True):
    """Nothing needs to be said."""


class SettingChange(Message, frozen=True):
    """A setting that was changed in the configuration file."""

    # Section and name, as in `memory.budget`.
    key: str
    # Its values as texts; `none` where it has none.
    before: str
    now: str


class Reloaded(Message, frozen=True):
    """What came of reading the configuration again."""

    # What has taken effect, and what takes a restart.
    applied: list[SettingChange]
    restart: list[SettingChange]


class LogLevel(Message, frozen=True):
    """A level of the daemon's log: debug, info, warning or error; in a request, empty to ask for it only."""

    level: str


class TierStatus(Message, frozen=True):
    """One tier."""

    name: str
    directory: str
    # Bytes that it may take; *limit* is the part of it that control groups and free space allow now.
    budget: int
    limit: int
    # Bytes that it takes.
    used: int
    blocks: int
    segments: int
    # Reads that were answered from it, and their bytes.
    hits: int
    hit_bytes: int
    # Blocks that were evicted from it since the daemon started.
    evicted: int
    policy: str
    # Why it cannot be used, or not fully; empty where nothing is wrong.
    problem: str = ""

    @property
    def is_cut_short(self) -> bool:
        """Is the disk or the control group too full for its budget? A tier keeps a little of its budget back."""
        return self.limit < 0.95 * self.budget


class MountView(Message, frozen=True):
    """A mount, as its reports describe it."""

    id: str
    mountpoint: str
    spec: str
    pid: int
    alive: bool
    seconds_since_report: float
    counters: dict[str, int]
    # It is mounted nowhere any more, and serves those who still have files of it open.
    detached: bool = False
    # Id of the snapshot that it shows, where one dataset is mounted and the mount has said so; else empty.
    snapshot: str = ""
    # It stays at that snapshot, and the dataset has a newer one.
    behind: bool = False
    # Of cachefs; empty where it has not reported since the daemon started.
    version: str = ""
    # A signal has asked it to end: it waits until no program uses it, for its grace at most.
    ending: bool = False


class ErrorView(Message, frozen=True):
    """A failure that somebody should know of."""

    # When it happened last: unix time in seconds.
    when: float
    # How often the failure has happened.
    count: int
    # To what it happened, such as an object, and what went wrong.
    subject: str
    message: str
    # When it happened first, in the same unit; 0 where that is unknown.
    first: float = 0.0


class ErrorCause(Message, frozen=True):
    """Failures that have one cause."""

    # When the first and the last one happened: unix time in seconds.
    first: float
    last: float
    count: int
    # What the names of all that failed begin with, such as a bucket; or the thing, where only one has failed.
    where: str
    # What went wrong, with … in place of what differs.
    message: str
    # To what it happened last.
    example: str


class Trouble(Message, frozen=True):
    """Something that keeps reads waiting, makes them fail, or leaves the node with less than it is to have.

    cachefs.troubles puts it into words, the same ones everywhere.
    """

    # One of cachefs.troubles.Cause.
    cause: str
    # What is in trouble, as people call it: a server, a dataset, a node, a tier.
    subject: str
    # When it began, and when it was last seen: unix time in seconds.
    since: float
    last: float
    # What was said of it, or by it.
    reason: str = ""
    # Blocks that reads wait for because of it now, and seconds that the first of these reads has waited.
    waiting: int = 0
    longest: float = 0.0
    # Blocks that reads have waited for and that could not be had.
    failed: int = 0
    # Where it is shown as a job's: how many of these may be of another job, since it is not known which one has read.
    unattributed: int = 0
    # Ids of the snapshots whose reads it concerns; empty: those of all.
    snapshots: list[str] = []


class EndpointStatus(Message, frozen=True):
    """What was learned of one server that has datasets."""

    name: str
    # Requests that may be under way at once now, and at most.
    width: int
    most: int
    # Requests refused since there were too many.
    throttled: int
    # Requests per second that the server takes, where it limits them, of the prefix that may have the fewest; else 0.
    rate: float
    # Requests that were sent a second time since they were late, and those of them that answered first.
    hedged: int
    hedges_won: int
    # Bytes from which on larger requests are hardly quicker; 0 until that is known.
    request_size: int
    # Seconds that it has not answered although it was asked; 0 where it answers. Then also: seconds since it was last
    # asked, and why that has failed.
    silent: float = 0.0
    last_asked: float = 0.0
    reason: str = ""


class FetchProcessStatus(Message, frozen=True):
    """A process that brings blocks for the daemon."""

    pid: int
    # That it has written since its start, and that it is bringing now.
    blocks: int
    in_flight: int


class GuessCounts(Message, frozen=True):
    """What was fetched since readers seemed to come to it, although nobody had published that."""

    # Blocks since the daemon started: all of them, those that were read since, those that were not.
    blocks: int = 0
    right: int = 0
    wrong: int = 0
    # Bytes of each of these.
    bytes: int = 0
    right_bytes: int = 0
    wrong_bytes: int = 0


class ClusterBrief(Message, frozen=True):
    """The cluster in a line."""

    # Of the cluster; none, static, etcd or kubernetes.
    name: str = ""
    source: str = "none"
    epoch: int = 0
    # Nodes by state.
    states: dict[str, int] = {}
    problem: str = ""


class PeerCounts(Message, frozen=True):
    """What this node and the others of its cluster have given each other since the daemon started."""

    # Blocks and bytes that came from other nodes. They count for no origin.
    blocks: int = 0
    bytes: int = 0
    # Blocks and bytes that others were given; of these blocks, those that were brought from the origin for them.
    served_blocks: int = 0
    served_bytes: int = 0
    served_fetched: int = 0
    # Questions to other nodes for one block each; those that were answered without the block; those that failed.
    asked: int = 0
    not_here: int = 0
    failed: int = 0
    # Questions to a second node, and reads of an origin, that came beside a node that was late.
    hedged: int = 0
    # The same beside a node that gave no sign of life.
    silent: int = 0
    # Blocks that this node has brought from the origin in place of a home that was behind; and that others have brought
    # for this one.
    taken: int = 0
    given: int = 0
    # Blocks that came to fill this node up, and for nobody who reads them now.
    filled: int = 0


class Status(Message, frozen=True):
    """The state of a node."""

    instance: str
    version: str
    pid: int
    # Seconds since the daemon started.
    uptime: float
    state_dir: str
    tiers: list[TierStatus]
    datasets: int
    # All counts are of the time since the daemon started. Reads that had to wait for a fetch.
    misses: int
    # That came from origins.
    fetched_blocks: int
    fetched_bytes: int
    # Requests for bytes of objects, of all datasets, those that are gone included; and those that failed.
    origin_requests: int
    origin_errors: int
    in_flight_blocks: int
    in_flight_bytes: int
    # Blocks whose bytes were found wrong, and which were dropped.
    repairs: int
    mounts: list[MountView]
    warmups: int
    index_blocks: int
    errors: list[ErrorView] = []
    # The same failures by their causes, those that happened last first.
    causes: list[ErrorCause] = []
    # Blocks that no tier had room for, and that went straight to their readers.
    passed_blocks: int = 0
    # Reads of origins that took a slower way than they usually do (S3: through aiobotocore).
    origin_detours: int = 0
    # Of all servers that have datasets.
    endpoints: list[EndpointStatus] = []
    guessed: GuessCounts = GuessCounts()
    fetch_processes: list[FetchProcessStatus] = []
    peers: PeerCounts = PeerCounts()
    cluster: ClusterBrief = ClusterBrief()
    # What is wrong now, the worst first.
    troubles: list[Trouble] = []


class OriginOptions(Message, frozen=True):
    """How to reach an origin where the daemon's defaults do not fit. Credentials come from the daemon's environment."""

    endpoint_url: str | None = None
    # Of Azure storage.
    account: str | None = None
    region: str | None = None
    addressing_style: str | None = None
    profile: str | None = None
    anonymous: bool = False
    # Tell versions of files apart by size and mtime only, not by ctime and inode.
    mtime_only: bool = False
    # Say in each request that who sends it pays for it (S3).
    requester_pays: bool = False
    # Project that pays for requests (Google).
    user_project: str | None = None


class DatasetAdd(Message, frozen=True):
    """List an origin, and call it *name*."""

    name: str
    url: str
    options: OriginOptions = OriginOptions()


class OriginChange(Message, frozen=True):
    """Options to change: as OriginOptions, and what is UNSET stays as it was."""

    endpoint_url: str | UnsetType | None = UNSET
    account: str | UnsetType | None = UNSET
    region: str | UnsetType | None = UNSET
    addressing_style: str | UnsetType | None = UNSET
    profile: str | UnsetType | None = UNSET
    anonymous: bool | UnsetType = UNSET
    mtime_only: bool | UnsetType = UNSET
    requester_pays: bool | UnsetType = UNSET
    user_project: str | UnsetType | None = UNSET


class DatasetSet(Message, frozen=True):
    """Reach the origin of a dataset in another way."""

    name: str
    change: OriginChange
    # Also where nothing of what is there now is as it was listed, or where nobody can tell.
    unchecked: bool = False


class DatasetReached(Message, frozen=True):
    """How a dataset is reached from now on."""

    dataset: DatasetView
    before: OriginOptions
    now: OriginOptions
    # Objects that were looked at in the new way, and those of them that are as they were listed.
    looked_at: int = 0
    alike: int = 0


class DatasetName(Message, frozen=True):
    """A dataset."""

    name: str


class DatasetLimit(Message, frozen=True):
    """Limit what a dataset may take. A field that is None stays as it was."""

    name: str
    # Part of each tier; 1 for no limit.
    share: float | None = None
    # Seconds that blocks stay after their last read; 0 for no limit.
    ttl: float | None = None
    # Bytes of each tier; 0 for no limit.
    most: int | None = None


class DatasetList(Message, frozen=True):
    """All datasets of the node."""

    datasets: list[DatasetView]


class DatasetNames(Message, frozen=True):
    """Some datasets: MOST_NAMES at most."""

    names: list[str]


class DatasetCached(Message, frozen=True):
    """About how much of a dataset's current snapshot is on this node."""

    name: str
    # Of the snapshot, and of it in each tier.
    bytes: int
    memory: int
    ssd: int
    # Only a sample of the blocks was looked at.
    is_estimate: bool


class DatasetsCached(Message, frozen=True):
    """Of those that were asked for and are there."""

    datasets: list[DatasetCached]


class SnapshotDiff(Message, frozen=True):
    """File counts between two snapshots of a dataset."""

    added: int
    changed: int
    removed: int
    unchanged: int


class Problem(Message, frozen=True, array_like=True):
    """A key of the origin that cannot be a file, and why."""

    key: bytes
    reason: str


class DatasetDetail(Message, frozen=True):
    """All about a dataset."""

    dataset: DatasetView
    block_size: int
    options: OriginOptions
    # Name of a tier -> bytes of the current snapshot in it.
    cached: dict[str, int]
    # Paths that are pinned, relative to the dataset.
    pinned: list[bytes]
    problems: list[Problem]
    # Ids of the snapshots that are still on disk, newest first.
    snapshots: list[str]


class ListingPhase(StrEnum):
    """What a listing does now."""

    LISTING = "listing"  # asks the origin what there is
    BUILDING = "building"  # writes the snapshot


class ListingProgress(Message, frozen=True):
    """How far a listing is."""

    phase: ListingPhase
    objects: int
    bytes: int
    # Of these, those that an interrupted listing had found, with which this one goes on.
    resumed: int = 0
    # How many objects there may be in all: those of the snapshot before; 0 where nobody knows.
    expected: int = 0
    # The dataset as it is now, and what has changed: both only in the last message, *diff* only after a refresh.
    dataset: DatasetView | None = None
    diff: SnapshotDiff | None = None
    # The mounts of other nodes that go on with an older snapshot: only in the last message of a refresh.
    behind_elsewhere: list[MountElsewhere] = []


class Selection(Message, frozen=True):
    """Files of a dataset: those at or below any of the paths, or all where there are no paths."""

    dataset: str
    paths: list[bytes] = []


class Directory(Message, frozen=True):
    """A directory of a dataset, or a file."""

    dataset: str
    # Relative to the dataset's root, which is b"".
    path: bytes = b""


class DirectoryEntry(Message, frozen=True, array_like=True):
    """A file or directory in a directory."""

    name: bytes
    directory: bool
    # Bytes of the file; 0 for a directory.
    size: int


class DirectoryEntries(Message, frozen=True):
    """One page of a stream: entries in the order of their names' bytes."""

    entries: list[DirectoryEntry]


class FilePath(Message, frozen=True):
    """A file or directory of a dataset."""

    dataset: str
    # Relative to the dataset's root, which is b"".
    path: bytes = b""
    # The first digits of a snapshot's id; none: the current one.
    snapshot: str = ""


class FileInfo(Message, frozen=True):
    """What the daemon knows of a file or directory."""

    dataset: str
    snapshot: str
    path: bytes
    directory: bool
    size: int
    # Modification time, as nanoseconds of unix time.
    mtime_ns: int
    # The version that the snapshot lists, such as an ETag; empty of a directory.
    etag: bytes
    # In which tier each block is (cachefs.block.describe_tiers); empty of a directory and of an empty file.
    tiers: str


class Warmup(Message, frozen=True):
    """Fetch files of a dataset, selected as in Selection."""

    dataset: str
    paths: list[bytes] = []
    # The part of the selected files to fetch: the first ones, in the order of their paths.
    fraction: float = 1.0
    # Stream progress until all is done.
    wait: bool = True
    # Leave out paths that are not in the snapshot, where at least one is there.
    leave_out_missing: bool = False


class WarmupProgress(Message, frozen=True):
    """How far a warmup is."""

    id: int
    state: str
    blocks: int
    blocks_total: int
    bytes: int
    bytes_total: int
    # Blocks that the policy did not admit.
    skipped: int = 0
    # Blocks that could not be fetched.
    failed: int = 0
    message: str = ""
    dataset: str = ""
    # Paths that were asked for and are not in the snapshot, and the first of them.
    missing: int = 0
    first_missing: str = ""


class WarmupId(Message, frozen=True):
    """A warmup."""

    id: int


class WarmupList(Message, frozen=True):
    """The warmups that run, and the last ones that have ended; oldest first."""

    warmups: list[WarmupProgress]


class Freed(Message, frozen=True):
    """What was evicted."""

    blocks: int
    bytes: int


class Held(Message, frozen=True):
    """Something of a dataset: whole files, and blocks and bytes, of which some may be parts of other files."""

    files: int
    blocks: int
    bytes: int


class WarmupForecast(Message, frozen=True):
    """What a warmup would do."""

    # All that was asked for, and what of it is on the node already.
    wanted: Held
    here: Held
    # Bytes that the tiers can take without evicting anything.
    free: int


class EvictForecast(Message, frozen=True):
    """What an eviction would free, and what of that is pinned."""

    here: Held
    pinned: Held


class Pinned(Message, frozen=True):
    """What was pinned, or is not any more."""

    files: int
    bytes: int


class CachedFile(Message, frozen=True, array_like=True):
    """How much of a file is on this node."""

    path: bytes
    size: int
    # Bytes in each tier, in the order of cachefs.block.TIER_NAMES.
    cached: list[int]
    pinned: bool


class CachedFiles(Message, frozen=True):
    """One page of a stream."""

    files: list[CachedFile]


class VerifyProgress(Message, frozen=True):
    """How far a verification of all blocks is."""

    blocks: int
    blocks_total: int
    bytes: int
    repaired: int
    done: bool = False
