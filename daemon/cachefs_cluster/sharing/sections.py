"""The sections of the shared state: a kind of value for each, with limits per node.

Values of other nodes are trusted no more than input of users: a value that fails its section's check is dropped.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from cachefs.errors import CachefsError
from cachefs.job_messages import MAX_JOB_NAME
from cachefs.messages import OriginOptions
from cachefs.planning.cluster.schedule import MAX_GROUPS, MAX_LENGTH, MAX_SCHEDULES, MIN_LENGTH, Announcement
from cachefs.planning.requests.shares import MAX_WEIGHT, MIN_WEIGHT
from cachefs.planning.sequences.sampler_spec import MAX_EPOCHS, MAX_SAMPLES, SamplerSpec
from cachefs_cluster.membership.view import is_id
from cachefs_daemon.consumer_checks import (
    MAX_LOADER,
    MAX_OWNER,
    check_consumer,
    consumer_name,
    is_consumer_name,
    require,
)
from cachefs_daemon.datasets.origin_access import MAX_URL, check_lengths
from cachefs_daemon.datasets.stamps import MAX_ADDS, MAX_CLOCK, MAX_REMOVALS, NO_STAMP, ChangeStamp
from cachefs_daemon.jobs.job_files import JobPriority

# Orders in a consumer's facts, the nearest epochs first. About N/4 to N/2 epochs ahead suffice for N nodes.
MAX_ORDERS: Final = 256
MAX_SIZE: Final = 1 << 60
# Origins of which a node publishes what one job wants and gets.
MAX_SHARED_ORIGINS: Final = 8
# Bytes of the paths that a warmup of the cluster names, and characters of its message or of a reason.
MAX_WARMUP_PATHS: Final = 32 << 10
MAX_WARMUP_TEXT: Final = 300
# Unix seconds: the year 5138.
MAX_UNIX_TIME: Final = 1e11

_DIGITS: Final = re.compile(r"[0-9a-f]{32}")
_WARMUP: Final = re.compile(r"[1-9][0-9]{6}")
_DATASET: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")

Value = TypeVar("Value", bound=msgspec.Struct)


class SharedDataset(msgspec.Struct, frozen=True):
    """A node's knowledge of a dataset name: the dataset that has it, and those that were removed."""

    # When removed datasets of this name were added; in order.
    gone: list[ChangeStamp] = []
    # When the dataset was added: several times, if the same one (URL and options) was added on several nodes. In order;
    # empty if no dataset has the name now, and then all fields below are empty too.
    added: list[ChangeStamp] = []
    url: str = ""
    options: OriginOptions = OriginOptions()
    # When the current snapshot was made, and by which node (id); the snapshot's id, and bytes of its file and blocks.
    listed: ChangeStamp = NO_STAMP
    snapshot: str = ""
    file_size: int = 0
    block_size: int = 0
    # See DatasetRecord; and when they were set.
    share: float = 1.0
    ttl: float = 0.0
    most: int = 0
    limited: ChangeStamp = NO_STAMP
    # See DatasetRecord; and when the options were changed.
    named: bytes = b""
    reached: ChangeStamp = NO_STAMP


class MountedDataset(msgspec.Struct, frozen=True):
    """A dataset that a mount of the node names."""

    mountpoint: str


class UsedSnapshot(msgspec.Struct, frozen=True):
    """A snapshot that a mount or a job of the node reads."""

    dataset: str
    # When the dataset was added: see SharedDataset.
    added: list[ChangeStamp]
    # Bytes of the snapshot's file, and of its blocks.
    file_size: int
    block_size: int
    # The mount that stays at this snapshot after a refresh although it names none; "" without one.
    mountpoint: str = ""
    # How to reach the origin, if the dataset was removed from the cluster.
    url: str = ""
    options: OriginOptions = OriginOptions()
    named: bytes = b""


class OrderRef(msgspec.Struct, frozen=True, array_like=True):
    """The order of one epoch, as a blob of the node."""

    epoch: int
    digest: str
    # Number of samples of the epoch.
    samples: int


class ConsumerFacts(msgspec.Struct, frozen=True):
    """The published facts of one consumer of a job, without their large parts."""

    job: str  # the full name, with its owner
    consumer: str
    dataset: str
    snapshot: str  # id
    rank: int = 0
    world_size: int = 1
    # None: only *orders* are known.
    spec: SamplerSpec | None = None
    # Published orders of its current and later epochs, by epoch.
    orders: list[OrderRef] = []
    # Its sample map, as a blob of the node; "": the samples are all files of the snapshot (kind `tree`).
    map: str = ""
    map_size: int = 0  # bytes of that blob
    # How the loader reads: see JobPublication.
    workers: int = 0
    batch_size: int = 1
    prefetch: int = 2


class ConsumerProgress(msgspec.Struct, frozen=True, array_like=True):
    """The position of a consumer."""

    epoch: int
    # Samples of the epoch read so far.
    position: int
    # Samples per second.
    rate: float


class HoldersFacts(msgspec.Struct, frozen=True, array_like=True):
    """This node's knowledge of the holders of a snapshot's blocks, for comparison by other nodes."""

    # See cachefs_cluster.placement.holders.HolderState.
    count: int
    job: str
    epoch: int
    # Digest of the holders and of the nodes that they are among.
    digest: str


class SharedAnnouncement(msgspec.Struct, frozen=True, array_like=True):
    """The announcement that this node follows for a snapshot: which group leads the decisions about its copies, and by
    which schedules they are made."""

    announcement: Announcement


class RebalanceFacts(msgspec.Struct, frozen=True, array_like=True):
    """The blocks that a node has still to fetch from others, since the members that count for placement changed."""

    # Digest of these members' ids.
    ring: str
    blocks: int
    bytes: int


class WarmupTotals(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a warmup of the cluster, or of one node's part of it."""

    # Blocks and bytes that are there, of all.
    blocks: int = 0
    blocks_total: int = 0
    bytes: int = 0
    bytes_total: int = 0
    # Blocks that found no room, and blocks that could not be fetched.
    skipped: int = 0
    failed: int = 0


class WarmupFacts(msgspec.Struct, frozen=True):
    """A warmup of the cluster. Fields up to `holds` never change."""

    dataset: str
    # Id of the node on which it was requested, and the Unix time.
    author: str
    begun: float
    # See cachefs.messages.WarmupRequest.
    paths: list[bytes] = []
    fraction: float = 1.0
    leave_out_missing: bool = False
    at: float = 0.0
    before: str = ""
    # See cachefs.messages.WarmupProgress.
    holds: int = -1
    # Unix time at which it started to fetch; 0: it waits for its time or its job.
    started: float = 0.0
    # Unix time of its end, and how it ended: done, failed or cancelled; 0 and "" before.
    ended: float = 0.0
    state: str = ""
    message: str = ""
    totals: WarmupTotals = WarmupTotals()


class WarmupPart(msgspec.Struct, frozen=True):
    """One node's part of a warmup of the cluster."""

    # waiting, planning, running or done.
    state: str
    # Digest of the members among which the blocks are divided, and the snapshot; "" before they are known.
    ring: str = ""
    snapshot: str = ""
    totals: WarmupTotals = WarmupTotals()
    # Why the node is behind or lacks blocks; "" for no known reason.
    reason: str = ""


# Bytes a second that a job wants and gets, and the part of the time in which its urgent reads wait (OriginUse).
OriginFigures = tuple[float, float, float]


class OriginUses(msgspec.Struct, frozen=True, array_like=True):
    """The demand of a job at origins through one node, and what it gets."""

    # By name of the origin's server.
    origins: dict[str, OriginFigures] = {}


@dataclass(frozen=True)
class StateSection(Generic[Value]):
    """One kind of values, with its limits and check."""

    name: str
    kind: type[Value]
    # Most values of one node, and most bytes of one value.
    max_values: int
    max_bytes: int
    # Raises ValueError, or a CachefsError, for an invalid name or value.
    check: Callable[[str, Any], None]

    def encode(self, value: Value) -> bytes:
        return msgspec.msgpack.encode(value)

    def decode(self, name: str, raw: bytes) -> Value:
        """Decode and check a value. Raises ValueError, in words."""
        if len(raw) > self.max_bytes:
            raise ValueError(f"{len(raw):,} bytes; at most {self.max_bytes:,} are accepted")
        try:
            value = msgspec.msgpack.decode(raw, type=self.kind)
            self.check(name, value)
        except (msgspec.MsgspecError, CachefsError) as error:
            raise ValueError(str(error)) from None
        return value


def is_digest(text: str) -> bool:
    """Return whether *text* has the form of a blob's digest or a snapshot's id."""
    return _DIGITS.fullmatch(text) is not None


def _check_stamps(stamps: list[ChangeStamp], most: int) -> None:
    require(len(stamps) <= most and stamps == sorted(set(stamps)), "stamps out of order")
    for stamp in stamps:
        require(0 <= stamp.clock < MAX_CLOCK and (not stamp.node or is_id(stamp.node)), "an invalid stamp")


def _check_dataset(name: str, value: SharedDataset) -> None:
    require(_DATASET.fullmatch(name) is not None, "an invalid dataset name")
    _check_stamps(value.gone, MAX_REMOVALS)
    _check_stamps(value.added, MAX_ADDS)
    _check_stamps([value.listed], 1)
    _check_stamps([value.limited], 1)
    _check_stamps([value.reached], 1)
    if not value.added:
        return
    require(bool(value.url), "a dataset without a URL")
    check_lengths(value.url, value.options)
    require(is_digest(value.snapshot), "an invalid snapshot id")
    require(0 < value.file_size <= MAX_SIZE and 0 < value.block_size <= MAX_SIZE, "invalid sizes")
    require(0 < value.share <= 1 and 0 <= value.ttl < math.inf, "invalid limits")
    require(0 <= value.most <= MAX_SIZE, "invalid limits")
    require(len(value.named) <= 2 * MAX_URL, "invalid object names")


def _check_used(name: str, value: UsedSnapshot) -> None:
    require(is_digest(name), "an invalid snapshot id")
    require(_DATASET.fullmatch(value.dataset) is not None, "an invalid dataset name")
    require(bool(value.added), "a dataset that was never added")
    _check_stamps(value.added, MAX_ADDS)
    require(0 < value.file_size <= MAX_SIZE and 0 < value.block_size <= MAX_SIZE, "invalid sizes")
    require(value.mountpoint.isprintable(), "an unprintable path")
    check_lengths(value.url, value.options)
    require(len(value.named) <= 2 * MAX_URL, "invalid object names")


def _check_mounted(name: str, value: MountedDataset) -> None:
    require(_DATASET.fullmatch(name) is not None, "an invalid dataset name")
    require(value.mountpoint.isprintable(), "an unprintable path")


def _check_consumer(name: str, value: ConsumerFacts) -> None:
    require(name == consumer_name(value.job, value.consumer), "an invalid consumer name")
    check_consumer(value)
    require(_DATASET.fullmatch(value.dataset) is not None, "an invalid dataset name")
    require(is_digest(value.snapshot), "an invalid snapshot id")
    epochs = [order.epoch for order in value.orders]
    require(len(epochs) <= MAX_ORDERS and epochs == sorted(set(epochs)), "orders that are not sorted by epoch")
    for order in value.orders:
        require(0 <= order.epoch < MAX_EPOCHS and 0 <= order.samples <= MAX_SAMPLES, "an invalid order")
        require(is_digest(order.digest), "an invalid digest of an order")
    require(not value.map or (is_digest(value.map) and value.map_size > 0), "an invalid digest of a map")
    require(0 <= value.map_size < MAX_LOADER, f"a sample map of {value.map_size} bytes")


def _check_progress(name: str, value: ConsumerProgress) -> None:
    require(is_consumer_name(name), "an invalid consumer name")
    require(0 <= value.epoch < MAX_EPOCHS and 0 <= value.position <= MAX_SAMPLES, "an invalid position")
    require(0 <= value.rate < math.inf, "an invalid rate")


def _check_holders(name: str, value: HoldersFacts) -> None:
    require(is_digest(name) and is_digest(value.digest), "an invalid snapshot id, or no digest")
    require(0 <= value.count <= MAX_CLOCK and 0 <= value.epoch < MAX_EPOCHS, "invalid numbers")
    require(len(value.job) <= MAX_JOB_NAME + MAX_OWNER and value.job.isprintable(), "an invalid job name")


def _check_announcement(name: str, value: SharedAnnouncement) -> None:
    one = value.announcement
    require(is_digest(name) and is_id(one.issuer), "an invalid snapshot id or issuer")
    require(0 < one.serial <= MAX_CLOCK and 0 <= one.term <= MAX_CLOCK, "invalid numbers")
    require(len(one.leader) <= MAX_JOB_NAME + MAX_OWNER and one.leader.isprintable(), "an invalid job name")
    require(0 <= one.first_epoch < MAX_EPOCHS and 0 <= one.left_at <= MAX_EPOCHS, "invalid epochs")
    require(len(one.schedules) <= MAX_SCHEDULES, "too many schedules")
    for schedule in one.schedules:
        require(0 <= schedule.number <= MAX_EPOCHS and 0 <= schedule.since <= 1, "an invalid schedule")
        require(0 < len(schedule.groups) <= MAX_GROUPS, "a schedule without groups, or with too many")
        for timing in schedule.groups:
            digests = timing.group + timing.readers
            require(is_digest(digests), "an invalid digest of a group")
            require(0 <= timing.epoch <= MAX_EPOCHS and 0 <= timing.known <= MAX_EPOCHS, "invalid epochs of a group")
            require(abs(timing.begin) <= MAX_LENGTH * MAX_EPOCHS, "an invalid begin")
            lengths = MIN_LENGTH <= timing.length <= timing.interval <= MAX_LENGTH
            require(lengths, "an invalid length of an epoch")


def _check_rebalance(name: str, value: RebalanceFacts) -> None:
    require(name == REBALANCE_NAME and is_digest(value.ring), "an invalid digest of a ring")
    require(0 <= value.blocks <= MAX_CLOCK and 0 <= value.bytes <= MAX_CLOCK, "invalid numbers")


def _check_priority(name: str, value: JobPriority) -> None:
    require(len(name) <= MAX_JOB_NAME + MAX_OWNER and name.isprintable(), "an invalid job name")
    require(MIN_WEIGHT <= value.weight <= MAX_WEIGHT, "an invalid weight")
    require(0 <= value.change.clock < MAX_CLOCK and 0 <= value.change.nonce < MAX_CLOCK, "an invalid stamp")


def _check_uses(name: str, value: OriginUses) -> None:
    require(len(name) <= MAX_JOB_NAME + MAX_OWNER and name.isprintable(), "an invalid job name")
    require(len(value.origins) <= MAX_SHARED_ORIGINS, "too many origins")
    require(all(len(origin) <= MAX_URL and origin.isprintable() for origin in value.origins), "an invalid origin")
    figures = [figure for each in value.origins.values() for figure in each]
    require(all(0 <= figure < MAX_SIZE for figure in figures), "invalid figures")


def _check_totals(totals: WarmupTotals) -> None:
    require(all(0 <= number <= MAX_CLOCK for number in msgspec.structs.astuple(totals)), "invalid numbers")


def _check_warmup(name: str, value: WarmupFacts) -> None:
    require(_WARMUP.fullmatch(name) is not None, "an invalid number of a warmup")
    require(_DATASET.fullmatch(value.dataset) is not None, "an invalid dataset name")
    require(is_id(value.author), "an invalid id of a node")
    require(0 < value.fraction <= 1, "an invalid fraction")
    times = (value.begun, value.at, value.started, value.ended)
    require(all(0 <= time < MAX_UNIX_TIME for time in times) and value.begun > 0, "an invalid time")
    require(len(value.before) <= MAX_JOB_NAME + MAX_OWNER and value.before.isprintable(), "an invalid job name")
    require(sum(map(len, value.paths)) <= MAX_WARMUP_PATHS, "too many paths")
    require(value.state in ("done", "failed", "cancelled") if value.ended else not value.state, "an invalid state")
    require(len(value.message) <= MAX_WARMUP_TEXT and value.message.isprintable(), "an invalid message")
    require(-1 <= value.holds <= MAX_CLOCK, "invalid numbers")
    _check_totals(value.totals)


def _check_warmup_part(name: str, value: WarmupPart) -> None:
    require(_WARMUP.fullmatch(name) is not None, "an invalid number of a warmup")
    require(value.state in ("waiting", "planning", "running", "done"), "an invalid state")
    require(not value.ring or is_digest(value.ring), "an invalid digest of a ring")
    require(not value.snapshot or is_digest(value.snapshot), "an invalid snapshot id")
    require(len(value.reason) <= MAX_WARMUP_TEXT and value.reason.isprintable(), "an invalid reason")
    _check_totals(value.totals)


# A node with 1,000 datasets publishes those that it was the last to add or refresh, which may be all of them.
DATASETS: Final = StateSection("datasets", SharedDataset, 8192, 16 << 10, _check_dataset)
MOUNTED: Final = StateSection("mounted", MountedDataset, 4096, 8 << 10, _check_mounted)
USED: Final = StateSection("used", UsedSnapshot, 1024, 16 << 10, _check_used)
CONSUMERS: Final = StateSection("consumers", ConsumerFacts, 8192, 64 << 10, _check_consumer)
# Progress changes all the time, so it is sent only to nodes that follow it: see `cachefs_cluster.sharing.state`.
PROGRESS: Final = StateSection("progress", ConsumerProgress, 8192, 256, _check_progress)

REBALANCE_NAME: Final = "filling"
REBALANCE: Final = StateSection("filling", RebalanceFacts, 1, 256, _check_rebalance)
HOLDERS: Final = StateSection("holders", HoldersFacts, 8192, 512, _check_holders)
ANNOUNCEMENTS: Final = StateSection("announcements", SharedAnnouncement, 8192, 16 << 10, _check_announcement)
WARMUPS: Final = StateSection("warmups", WarmupFacts, 512, 48 << 10, _check_warmup)
WARMUP_PARTS: Final = StateSection("warmup parts", WarmupPart, 512, 2 << 10, _check_warmup_part)
PRIORITIES: Final = StateSection("priorities", JobPriority, 1024, 256, _check_priority)
ORIGIN_USES: Final = StateSection("origin uses", OriginUses, 1024, 4 << 10, _check_uses)

SECTIONS: Final[dict[str, StateSection[Any]]] = {
    one.name: one
    for one in (
        DATASETS,
        MOUNTED,
        USED,
        CONSUMERS,
        PROGRESS,
        HOLDERS,
        ANNOUNCEMENTS,
        REBALANCE,
        WARMUPS,
        WARMUP_PARTS,
        PRIORITIES,
        ORIGIN_USES,
    )
}
