"""Messages between mounts, cachectl and the daemon; cachefs.rpc sends them.

Messages are msgspec structs and not protobuf: they are typed, need no generated code, and ignore unknown fields. A
newer and an older side understand each other, if every new field has a default.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, UnsetType

# Maximum number of datasets in one call for their cached bytes.
MAX_DATASET_NAMES: Final = 64


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
    # Number of files and directories (without the root) in the snapshot, and the bytes of all files.
    files: int
    directories: int
    bytes: int
    # When the snapshot was made: unix time in nanoseconds.
    created_ns: int
    # Keys of the origin that are missing from the snapshot.
    problems: int = 0
    # Files that were archived when they were listed, and cannot be read before they are restored.
    archived: int = 0
    # Part of each tier that the dataset may use.
    share: float = 1.0
    # Seconds that blocks stay after their last read; 0 for no limit.
    ttl: float = 0.0
    # Bytes of each tier that the dataset may use; 0 for no limit.
    most: int = 0
    # Ids of the dataset's other snapshots on this node, which mounts may still show.
    others: list[str] = msgspec.field(default_factory=list)
    # Short description of the origin: the endpoint or account and other options; "" for the defaults.
    reached: str = ""


class Stall(Message, frozen=True, array_like=True):
    """One read that waited."""

    # Key of the block.
    key: bytes
    seconds: float
    # What the read waited for: `origin`, `ssd`, `daemon`, or `peer NAME`.
    source: str


# A worker of a mount reports at once after reading this share of the tiers' bytes, but not within this number of
# seconds after its last report. Without the report, blocks that a reader has passed would stay in the tiers.
REPORT_SHARE: Final = 1 / 64
MIN_REPORT_SECONDS: Final = 0.02


class MountReport(Message, frozen=True):
    """The report of a mount's worker: at the start, ten times a second while anything changes, up to 50 times during
    heavy reading, at least every 10 s, and at the end."""

    # Id of the mount, which is new for each mounting.
    id: str
    mountpoint: str
    # The SPEC of the mount (cachefs.mount_spec).
    spec: str
    # Number of the process that lives as long as the mount.
    pid: int
    # Counters since the worker's process started, by name (see cachefs.mount.reads.block_reader).
    counters: dict[str, int] = {}
    # Keys of the blocks that were read from a tier since the last report, oldest first.
    accessed: list[bytes] = []
    # The worker ends.
    closing: bool = False
    # Reads that have waited since the last report.
    stalls: list[Stall] = []
    # Number of the worker among the mount's workers.
    worker: int = 0
    # Number of the worker's process. A process that replaces the worker has counters of its own.
    worker_pid: int = 0
    # Instance of the daemon that has answered this worker's last report (NodeView.instance); "" without an answer.
    heard_from: str = ""
    # Id of the snapshot where one dataset is mounted; else "".
    snapshot: str = ""
    # Version of cachefs; "" for a mount before 0.2.
    version: str = ""
    # Whether a signal has asked the mount to end: it waits until no program uses it, for its grace at most.
    ending: bool = False
    # Ids of the snapshots whose files were read since the last report; None for a mount of an earlier release.
    snapshots_read: list[str] | None = None
    # The kernel's number of the FUSE connection; 0 before mounting, and for a mount of an earlier release.
    connection: int = 0


class RemoteMount(Message, frozen=True):
    """A mount of another node of the cluster."""

    # Name of the node.
    node: str
    mountpoint: str
    # Id of the snapshot that the mount keeps showing.
    snapshot: str


class NodeView(Message, frozen=True):
    """The facts about a node that its mounts need."""

    # Identifies this run of the daemon; changes with each start.
    instance: str
    # Path of the LMDB index.
    index: str
    # Tier name -> directory of its segments.
    tiers: dict[str, str]
    # All datasets.
    datasets: list[DatasetView]
    # Bytes that all tiers together may hold, and bytes that they hold.
    capacity: int
    used: int
    # Maximum seconds that a read may wait.
    read_deadline: float
    # Ids of users who want to know which process reads which file (cachefs.read_messages).
    asking: list[int] = []


class BlockRef(Message, frozen=True, array_like=True):
    """A block of a file."""

    # Id of the snapshot.
    snapshot: str
    # Number of the file in the snapshot.
    entry: int
    # Number of the block in the file.
    number: int
    # The packed Location whose bytes failed verification, or could not be read; empty without a failure.
    failed_location: bytes = b""
    # The range of the block that the reader needs, returned where no tier can hold the block; none with a size of 0.
    start: int = 0
    size: int = 0
    # Whether the tier at *bad* does not answer: take the bytes from the origin, without waiting for the tier.
    is_tier_slow: bool = False


class FetchRequest(Message, frozen=True):
    """A request to fetch blocks to the node (sent by cachefs.fetch_frames)."""

    blocks: list[BlockRef]
    # No reader waits for the blocks: fetch them after blocks that readers wait for, and send an empty reply at once.
    ahead: bool = False
    # Seconds from now within which the reply is needed.
    deadline: float = 60.0
    # Id of the requesting node, set only by the daemon's own peer servers; whether no reader there waits for the blocks
    # yet; and whether the node would fetch them from the origin itself.
    peer: str = ""
    unhurried: bool = False
    may_take: bool = False
    # Whether the request waits for a snapshot that is being sent to this node.
    await_snapshot: bool = True
    # The job that reads the blocks on the requesting node (empty for readers that have published nothing), and seconds
    # until it needs them urgently, where no reader waits for them.
    job: str = ""
    urgent_after: float = 0.0


class FetchedBlock(Message, frozen=True, array_like=True):
    """The result of the fetch of one block."""

    # The packed Location; empty where the fetch has failed, and where no tier can hold the block.
    location: bytes
    # Why the fetch has failed: errno for the reader, and one line of text.
    errno: int = 0
    message: str = ""
    # Where no tier holds the block, or not yet: the whole pieces around the bytes that the reader waits for, and the
    # checksums of all pieces of the block.
    data: memoryview = memoryview(b"")
    checksums: bytes = b""
    # For a requesting node: fetch the block from the origin itself; or ask others, as the block is not here.
    must_fetch_itself: bool = False
    is_missing: bool = False
    # Source of a block that was just fetched: `peer NAME`, or "" for its origin.
    source: str = ""
    # For a requesting node: it is to ask the next node, since this one does not have the snapshot.
    lacks_snapshot: bool = False


# --- cachectl <-> daemon ------------------------------------------------------------------------------------------


class Empty(Message, frozen=True):
    """A message without content."""


class SettingChange(Message, frozen=True):
    """A setting that was changed in the configuration file."""

    # Section and name, as in `memory.budget`.
    key: str
    # Values as texts; `none` where there is none.
    before: str
    now: str


class ReloadResult(Message, frozen=True):
    """The result of reloading the configuration."""

    # Changes that have taken effect, and changes that need a restart.
    applied: list[SettingChange]
    restart: list[SettingChange]


class LogLevel(Message, frozen=True):
    """A level of the daemon's log: debug, info, warning or error; in a request, "" to leave the level as it is."""

    level: str


class TierStatus(Message, frozen=True):
    """The state of one tier."""

    name: str
    directory: str
    # Bytes that the tier may hold by its budget; *limit* is the part that control groups and free space allow now.
    budget: int
    limit: int
    # Bytes that the tier holds.
    used: int
    blocks: int
    segments: int
    # Reads answered from the tier, and their bytes.
    hits: int
    hit_bytes: int
    # Blocks evicted from the tier since the daemon started.
    evicted: int
    policy: str
    # Why the tier cannot be used, or not fully; "" without a problem.
    problem: str = ""

    @property
    def is_cut_short(self) -> bool:
        """Whether the disk or the control group is too full for the budget, of which a tier keeps a little back."""
        return self.limit < 0.95 * self.budget


class MountView(Message, frozen=True):
    """A mount, as described by its reports."""

    id: str
    mountpoint: str
    spec: str
    pid: int
    alive: bool
    seconds_since_report: float
    counters: dict[str, int]
    # Whether the mount was detached, and serves only processes that still have its files open.
    detached: bool = False
    # Id of the snapshot, where one dataset is mounted and the mount has reported it; else "".
    snapshot: str = ""
    # Whether the mount keeps showing its snapshot although the dataset has a newer one.
    behind: bool = False
    # Version of cachefs; "" where the mount has not reported since the daemon started.
    version: str = ""
    # Whether a signal has asked the mount to end: it waits until no program uses it, for its grace at most.
    ending: bool = False


class ErrorView(Message, frozen=True):
    """A failure that users should know of."""

    # When the failure happened last: unix time in seconds.
    when: float
    # How often the failure has happened.
    count: int
    # What failed, such as an object, and what went wrong.
    subject: str
    message: str
    # When the failure happened first: unix time in seconds; 0 where unknown.
    first: float = 0.0


class ErrorCause(Message, frozen=True):
    """Failures with one cause."""

    # When the first and the last one happened: unix time in seconds.
    first: float
    last: float
    count: int
    # Common prefix of the names of all that failed, such as a bucket; or the name of the only one.
    where: str
    # What went wrong, with … in place of the parts that differ.
    message: str
    # What failed last.
    example: str


class Trouble(Message, frozen=True):
    """A problem that keeps reads waiting, makes them fail, or leaves the node with less than it should have.

    cachefs.trouble_texts has the texts for users.
    """

    # One of cachefs.trouble_texts.Cause.
    cause: str
    # The affected server, dataset, node or tier, by its name for users.
    subject: str
    # When the trouble began, and when it was last seen: unix time in seconds.
    since: float
    last: float
    # The error message.
    reason: str = ""
    # Blocks that reads wait for now because of the trouble, and seconds that the first of these reads has waited.
    waiting: int = 0
    longest: float = 0.0
    # Blocks that reads have waited for and that could not be fetched.
    failed: int = 0
    # In the trouble of a job: how many of the failed blocks may be another job's, since their reader is unknown.
    unattributed: int = 0
    # Ids of the snapshots whose reads are affected; empty for all.
    snapshots: list[str] = []


class EndpointStatus(Message, frozen=True):
    """The state of one server that has datasets."""

    name: str
    # Concurrent requests allowed now, and at most.
    width: int
    most: int
    # Requests that the server refused as too many.
    throttled: int
    # Requests per second that the server takes, where it limits them, for the prefix with the lowest limit; else 0.
    rate: float
    # Requests that were sent a second time since they were late, and second ones that were answered first.
    hedged: int
    hedges_won: int
    # Bytes from which on larger requests are hardly faster; 0 while unknown.
    request_size: int
    # Seconds without an answer although the server was asked; 0 where it answers. Without answers also: seconds since
    # the last request, and why that failed.
    silent: float = 0.0
    last_asked: float = 0.0
    reason: str = ""


class FetchProcessStatus(Message, frozen=True):
    """A process that fetches blocks for the daemon."""

    pid: int
    # Blocks that the process has written since its start, and blocks that it is fetching now.
    blocks: int
    in_flight: int


class ReadaheadCounts(Message, frozen=True):
    """Counts of readahead without a published sequence."""

    # Blocks since the daemon started: all, those read since, and those not read.
    blocks: int = 0
    right: int = 0
    wrong: int = 0
    # Bytes of all, of those read since, and of those not read.
    bytes: int = 0
    right_bytes: int = 0
    wrong_bytes: int = 0


class ClusterBrief(Message, frozen=True):
    """A summary of the cluster."""

    # Name of the cluster; its source is none, static, etcd or kubernetes.
    name: str = ""
    source: str = "none"
    epoch: int = 0
    # Nodes by state.
    states: dict[str, int] = {}
    problem: str = ""
    # Names of the datasets that have second copies now.
    hot: list[str] = []


class PeerCounts(Message, frozen=True):
    """Blocks exchanged between this node and others of its cluster since the daemon started."""

    # Blocks and bytes received from other nodes, which count for no origin.
    blocks: int = 0
    bytes: int = 0
    # Blocks and bytes sent to other nodes; of these blocks, those that were fetched from the origin for them.
    served_blocks: int = 0
    served_bytes: int = 0
    served_fetched: int = 0
    # Requests to other nodes for one block each; those answered without the block; those that failed.
    asked: int = 0
    not_here: int = 0
    failed: int = 0
    # Requests to a second node, and reads of an origin, that were made because a node was late.
    hedged: int = 0
    # Requests made because a node sent no heartbeat.
    silent: int = 0
    # Blocks that this node has fetched from the origin for a home that was behind; and that others have for this one.
    taken: int = 0
    given: int = 0
    # Blocks fetched to bring this node up to its share, without a present reader.
    filled: int = 0
    # Second copies of blocks of hot datasets, fetched from other nodes.
    second_copies: int = 0
    # Bytes received from other nodes by network card of this node.
    cards: dict[str, int] = msgspec.field(default_factory=dict)
    # Addresses that do not answer, of nodes that answer at another address.
    rails_down: int = 0


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
    # Reads that had to wait for a fetch. All counts are since the daemon started.
    misses: int
    # Blocks and bytes from origins.
    fetched_blocks: int
    fetched_bytes: int
    # Requests for bytes of objects, of all datasets, including removed ones; and failed requests.
    origin_requests: int
    origin_errors: int
    in_flight_blocks: int
    in_flight_bytes: int
    # Blocks dropped because their bytes were wrong.
    repairs: int
    mounts: list[MountView]
    # Warmups that run.
    warmups: int
    index_blocks: int
    errors: list[ErrorView] = []
    # The same failures by cause, the latest first.
    causes: list[ErrorCause] = []
    # Blocks that bypassed the tiers, as none had room for them.
    passed_blocks: int = 0
    # Reads of origins that took a slower way than usual (S3: through aiobotocore).
    origin_detours: int = 0
    # All servers that have datasets.
    endpoints: list[EndpointStatus] = []
    guessed: ReadaheadCounts = ReadaheadCounts()
    fetch_processes: list[FetchProcessStatus] = []
    peers: PeerCounts = PeerCounts()
    cluster: ClusterBrief = ClusterBrief()
    # Present troubles, the worst first.
    troubles: list[Trouble] = []
    # The first of the warmups that run, without the parts of single nodes.
    running_warmups: list["WarmupProgress"] = []


class OriginOptions(Message, frozen=True):
    """Options for an origin beside the daemon's defaults. Credentials come from the daemon's environment.

    A field is an option of `cachectl dataset add` and `set`, with its description as help. `metavar` stands for the
    value in the help; `choices` are all values.
    """

    endpoint_url: Annotated[
        str | None,
        msgspec.Meta(
            description="URL of the server, where it is not AWS, Google's, Azure's or the hub.",
            extra={"metavar": "URL"},
        ),
    ] = None
    account: Annotated[
        str | None,
        msgspec.Meta(
            description="Storage account of az://.  [default: the daemon's AZURE_STORAGE_ACCOUNT]",
            extra={"metavar": "NAME"},
        ),
    ] = None
    region: Annotated[str | None, msgspec.Meta(description="Region of the bucket (S3).", extra={"metavar": "NAME"})] = (
        None
    )
    addressing_style: Annotated[
        str | None,
        msgspec.Meta(description="How URLs name the bucket (S3).", extra={"choices": ("auto", "path", "virtual")}),
    ] = None
    profile: Annotated[
        str | None,
        msgspec.Meta(description="Profile in the AWS configuration of the daemon.", extra={"metavar": "NAME"}),
    ] = None
    anonymous: Annotated[
        bool, msgspec.Meta(description="Send no credentials. Public buckets and datasets need none.")
    ] = False
    mtime_only: Annotated[
        bool,
        msgspec.Meta(
            description="Tell versions of files apart by size and mtime only, not by ctime and inode. For file servers "
            "of a farm that show different ctimes or inodes, and for trees whose modes and owners change."
        ),
    ] = False
    requester_pays: Annotated[
        bool,
        msgspec.Meta(
            description="Send the header of requester-pays buckets with each request: the daemon's account pays (S3)."
        ),
    ] = False
    user_project: Annotated[
        str | None,
        msgspec.Meta(description="Google project that pays for requests (gs://).", extra={"metavar": "PROJECT"}),
    ] = None


class DatasetAddRequest(Message, frozen=True):
    """A request to list an origin, and add it as the dataset *name*."""

    name: str
    url: str
    options: OriginOptions = OriginOptions()


class OriginChange(Message, frozen=True):
    """Options to change, as in OriginOptions. An option that is UNSET stays as it was."""

    endpoint_url: str | UnsetType | None = UNSET
    account: str | UnsetType | None = UNSET
    region: str | UnsetType | None = UNSET
    addressing_style: str | UnsetType | None = UNSET
    profile: str | UnsetType | None = UNSET
    anonymous: bool | UnsetType = UNSET
    mtime_only: bool | UnsetType = UNSET
    requester_pays: bool | UnsetType = UNSET
    user_project: str | UnsetType | None = UNSET


class DatasetSetRequest(Message, frozen=True):
    """A request to change the options of a dataset's origin."""

    name: str
    change: OriginChange
    # Make the change even where no object is as it was listed, or where this is unknown.
    unchecked: bool = False


class DatasetSetResult(Message, frozen=True):
    """The response to DatasetSetRequest."""

    dataset: DatasetView
    before: OriginOptions
    now: OriginOptions
    # Objects examined with the new options, and those of them that are as they were listed.
    looked_at: int = 0
    alike: int = 0


class DatasetName(Message, frozen=True):
    """A dataset."""

    name: str


class DatasetLimit(Message, frozen=True):
    """A request to limit the room of a dataset. A field that is None stays as it was."""

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
    """The names of up to MAX_DATASET_NAMES datasets."""

    names: list[str]


class CachedDataset(Message, frozen=True):
    """The approximate part of a dataset's current snapshot that is on this node."""

    name: str
    # Bytes of the snapshot, and its bytes in each tier.
    bytes: int
    memory: int
    ssd: int
    # Whether only a sample of the blocks was looked up.
    is_estimate: bool


class CachedDatasets(Message, frozen=True):
    """The cached parts of the requested datasets that exist."""

    datasets: list[CachedDataset]


class SnapshotDiff(Message, frozen=True):
    """File counts between two snapshots of a dataset."""

    added: int
    changed: int
    removed: int
    unchanged: int


class UnusableKey(Message, frozen=True, array_like=True):
    """A key of the origin that cannot be a file, and why."""

    key: bytes
    reason: str


class DatasetDetail(Message, frozen=True):
    """All facts about a dataset."""

    dataset: DatasetView
    block_size: int
    options: OriginOptions
    # Tier name -> bytes of the current snapshot in the tier.
    cached: dict[str, int]
    # Pinned paths, relative to the dataset.
    pinned: list[bytes]
    problems: list[UnusableKey]
    # Ids of the snapshots still on disk, newest first.
    snapshots: list[str]


class ListingPhase(StrEnum):
    """A phase of a listing."""

    LISTING = "listing"  # lists the origin's objects
    BUILDING = "building"  # writes the snapshot


class ListingProgress(Message, frozen=True):
    """The progress of a listing."""

    phase: ListingPhase
    objects: int
    bytes: int
    # How many of these came from an interrupted listing that this one continues.
    resumed: int = 0
    # Expected number of objects, that of the previous snapshot; 0 where unknown.
    expected: int = 0
    # The dataset with its new snapshot, and the changes: only in the last message, *diff* only after a refresh.
    dataset: DatasetView | None = None
    diff: SnapshotDiff | None = None
    # Mounts of other nodes that keep an older snapshot: only in the last message of a refresh.
    behind_elsewhere: list[RemoteMount] = []


class Selection(Message, frozen=True):
    """Files of a dataset: those at or below any of the paths, or all where there are no paths."""

    dataset: str
    paths: list[bytes] = []


class DirectoryPath(Message, frozen=True):
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
    """One page of a stream: entries sorted by the bytes of their names."""

    entries: list[DirectoryEntry]


class FilePath(Message, frozen=True):
    """A file or directory of a dataset."""

    dataset: str
    # Relative to the dataset's root, which is b"".
    path: bytes = b""
    # The first digits of a snapshot's id; "" for the current one.
    snapshot: str = ""


class FileInfo(Message, frozen=True):
    """The daemon's facts about a file or directory."""

    dataset: str
    snapshot: str
    path: bytes
    directory: bool
    size: int
    # Modification time: unix time in nanoseconds.
    mtime_ns: int
    # The version that the snapshot lists, such as an ETag; empty for a directory.
    etag: bytes
    # The tier of each block (cachefs.block.describe_tiers); "" for a directory and for an empty file.
    tiers: str


class WarmupRequest(Message, frozen=True):
    """A request to fetch files of a dataset, selected as in Selection."""

    dataset: str
    paths: list[bytes] = []
    # The part of the selected files to fetch: the first ones, sorted by path.
    fraction: float = 1.0
    # Stream progress until all is done.
    wait: bool = True
    # Ignore paths that are not in the snapshot, if at least one is.
    leave_out_missing: bool = False
    # Have each node of the cluster fetch the blocks that it keeps.
    cluster: bool = False
    # Only with `cluster`: the Unix time at which to begin (0: now), and the job whose publication to await ("": none).
    at: float = 0.0
    before: str = ""


class WarmupNode(Message, frozen=True):
    """One node's part of a warmup of the cluster."""

    name: str
    # waiting, planning, running, done, or missing: nothing is known of its part.
    state: str
    # Blocks and bytes that are there, of those that the node keeps.
    blocks: int = 0
    blocks_total: int = 0
    bytes: int = 0
    bytes_total: int = 0
    # Blocks that found no room, and blocks that could not be fetched.
    skipped: int = 0
    failed: int = 0
    # Why the node is behind; "" where it is not.
    reason: str = ""


class WarmupProgress(Message, frozen=True):
    """The progress of a warmup."""

    id: int
    # waiting (for a time or a job), running, done, failed or cancelled.
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
    # Number of requested paths that are not in the snapshot, and the first of them.
    missing: int = 0
    first_missing: str = ""
    # Whether it is a warmup of the cluster: its id is the same on all nodes, and the numbers are sums over nodes.
    cluster: bool = False
    # See WarmupRequest.
    at: float = 0.0
    before: str = ""
    # Bytes of `bytes_total` that the tiers of the nodes can hold; -1: all, or not known.
    holds: int = -1
    # What it waits for, or which node is behind and why; "" where there is nothing to tell.
    reason: str = ""
    nodes: list[WarmupNode] = []


class WarmupId(Message, frozen=True):
    id: int


class WarmupList(Message, frozen=True):
    """The running warmups, and the last ones that have ended; oldest first."""

    warmups: list[WarmupProgress]


class EvictedAmount(Message, frozen=True):
    """The amount that was evicted."""

    blocks: int
    bytes: int


class DatasetAmount(Message, frozen=True):
    """An amount of a dataset: whole files; blocks and bytes, which may include parts of other files."""

    files: int
    blocks: int
    bytes: int


class WarmupNodeForecast(Message, frozen=True):
    """The part of a warmup of the cluster that one node keeps."""

    name: str
    bytes: int
    # Bytes of its tiers, and bytes of the part that they can hold.
    capacity: int
    holds: int


class WarmupForecast(Message, frozen=True):
    """The forecast of a warmup."""

    # Everything requested, and the part that is on the node already.
    wanted: DatasetAmount
    here: DatasetAmount
    # Bytes that the tiers can take without evicting anything.
    free: int
    # For the cluster (`here` is then empty): bytes of `wanted` that the tiers of the nodes can hold, with all copies,
    # and each node's part. -1: for this node only.
    holds: int = -1
    nodes: list[WarmupNodeForecast] = []


class EvictForecast(Message, frozen=True):
    """The forecast of an eviction: the amount it would free, and the part of it that is pinned."""

    here: DatasetAmount
    pinned: DatasetAmount


class PinnedAmount(Message, frozen=True):
    """The amount that was pinned or unpinned."""

    files: int
    bytes: int


class CachedFile(Message, frozen=True, array_like=True):
    """The part of a file that is on this node."""

    path: bytes
    size: int
    # Bytes in each tier, in the order of cachefs.block.TIER_NAMES.
    cached: list[int]
    pinned: bool


class CachedFiles(Message, frozen=True):
    """One page of a stream."""

    files: list[CachedFile]


class VerifyProgress(Message, frozen=True):
    """The progress of a verification of all blocks."""

    blocks: int
    blocks_total: int
    bytes: int
    repaired: int
    done: bool = False
