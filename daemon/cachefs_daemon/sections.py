"""The tables of a node's configuration: each key, its default and its description.

A key stands here only: docs/site/generated.py makes cachefsd.toml and the tables of docs/configuration.md from the
fields. `cachefs_daemon.section` explains how a description is written.
`cachefs_cluster.section` has the keys of [cluster].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from cachefs.planning.eviction.policies import POLICIES
from cachefs.planning.eviction.policies.clairvoyant import Clairvoyant
from cachefs.planning.eviction.policies.lru import Lru
from cachefs.sizes import SizeSetting
from cachefs.socket_path import DEFAULT_SOCKET
from cachefs_daemon.local_listen import LocalListen
from cachefs_daemon.runtime.logs import LogFormat
from cachefs_daemon.section import (
    AbsolutePath,
    Amount,
    Count,
    DefaultText,
    LiveEffect,
    OptionalPath,
    Seconds,
    Section,
    Size,
)

# `prefetch.processes` of a file that leaves the number to the daemon.
AUTO: Final = -1
MAX_PROCESSES: Final = 64


# Policies that 0.3 removed: the policy that runs in place of each. Release 0.4 is to refuse their names.
REMOVED_POLICIES: Final[Mapping[str, str]] = {"refcount": Clairvoyant.name, "lfu": Lru.name, "fifo": Lru.name}


def _parse_policy(value: object) -> str:
    if not isinstance(value, str) or value not in (*POLICIES, *REMOVED_POLICIES):
        raise ValueError(f"expected one of {', '.join(POLICIES)}")
    return str(value)


def _parse_processes(value: object) -> int:
    if value == "auto":
        return AUTO
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_PROCESSES:
        raise ValueError(f'expected "auto" or a number from 0 to {MAX_PROCESSES}')
    return value


Processes = Annotated[int, BeforeValidator(_parse_processes)]


class DaemonSection(Section):
    """[daemon]: the daemon as a whole."""

    socket: AbsolutePath = Field(
        default=DEFAULT_SOCKET,
        description="unix socket for mounts, jobs and cachectl, for every local user; at most 104 bytes.\n\n"
        "Beside it are `<socket>.id` and `<socket>.ch`, see [the files](operations.md#files)",
    )
    socket_group: str = Field(default="", description="members of this group may mount without being root")
    state_dir: AbsolutePath = Field(
        default=Path("/var/lib/cachefs"),
        description="index, snapshots, list of datasets; one daemon per directory. Put it on a reliable disk, such as "
        "that of the system: while the disk hangs, daemon and mounts hang too",
    )
    block_size: Size = Field(
        default=4 << 20,
        description="unit of caching, a multiple of 128 KiB from 128 KiB to 64 MiB. A file up to this size is one "
        "block, a larger one is several. Datasets use a new size from their next refresh on, and cannot be read before "
        "it if the new size is smaller",
    )
    policy: Annotated[str, BeforeValidator(_parse_policy)] = Field(
        default=Clairvoyant.name,
        description="which blocks stay when a tier is full: "
        + "; ".join(f"`{name}` {policy.description}" for name, policy in POLICIES.items())
        + ".\n\n`refcount`, `lfu` and `fifo` are gone: see below",
    )
    read_deadline: Seconds = Field(
        default=60.0,
        description="seconds that a read waits for an origin that does not answer, at most 3600. Then the read fails "
        "with EIO.\n\n"
        "A `read(2)` of several blocks may wait so long for each late block, and fails at the first block that does "
        "not come",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], LiveEffect.LOGGING] = Field(
        default="info", description="`debug`, `info`, `warning` or `error`; `--log-level` overrides it"
    )
    log_format: Annotated[LogFormat, LiveEffect.LOGGING] = Field(
        default=LogFormat.TEXT,
        description="`text` or `json`: one object in a line, with `time`, `level`, `logger`, `message`, and "
        "`exception` if there is one",
    )

    @property
    def eviction_policy(self) -> str:
        """The policy of the tiers: `policy`, or the one in place of a removed policy."""
        return REMOVED_POLICIES.get(self.policy, self.policy)


class MemorySection(Section):
    """[memory]: the memory tier."""

    dir: AbsolutePath = Field(
        default=Path("/dev/shm/cachefs"),
        description="a directory on tmpfs; its file system must be at least as large as the budget. In a container "
        "`/dev/shm` often has only 64 MB: start the container with `--shm-size`",
    )
    budget: Annotated[Amount, LiveEffect.TIER_SIZES] = Field(
        default=SizeSetting(percent=25), description="bytes that the tier may take, as `du` counts them"
    )
    min_free: Annotated[Amount, LiveEffect.TIER_SIZES] = Field(
        default=SizeSetting(percent=5),
        description="bytes that the tier leaves free, whatever its budget: of the tier's file system (a DataLoader's "
        "workers use `/dev/shm` too), and of the machine's memory. A percentage is one of the file system",
    )
    segment_size: Size = Field(default=64 << 20, description="size of one segment file")


class SsdSection(Section):
    """[ssd]: the SSD tier, on a local disk. The node has one where the file has this table with a budget above 0."""

    dir: AbsolutePath = Field(
        default=Path("/var/lib/cachefs/ssd"),
        description="a directory on a file system that can punch holes: ext4, xfs, btrfs",
    )
    budget: Annotated[Amount, LiveEffect.TIER_SIZES] = Field(
        default=SizeSetting(percent=50), description="bytes that the tier may take, as `du` counts them"
    )
    min_free: Annotated[Amount, LiveEffect.TIER_SIZES] = Field(
        default=SizeSetting(percent=10),
        description="free space the tier leaves on that file system, whatever its budget",
    )
    segment_size: Size = Field(default=256 << 20, description="size of one segment file")
    require_mount: OptionalPath = Field(
        default=None,
        description="a mount point, such as `/mnt/nvme`: the daemon starts only while something is mounted there. "
        "A mount point that `/etc/fstab` names above `dir` must be mounted in any case",
    )


class OriginSection(Section):
    """[origin]: limits for reading from origins."""

    max_connections: Count = Field(
        default=64,
        description="reads from all origins together that may be under way at once, up to 1024. A server that "
        "throttles or becomes slow gets fewer",
    )
    max_bytes_in_flight: Size = Field(
        default=512 << 20, description="bytes that these reads may bring; at least `block_size`"
    )
    connect_timeout: Annotated[Seconds, DefaultText("5, at most half of `read_deadline`")] = Field(
        default=5.0,
        description="seconds until a connection is made, per attempt. An attempt that fails for a reason that may pass "
        "is repeated until `read_deadline`",
    )
    read_timeout: Annotated[Seconds, DefaultText("20, at most half of `read_deadline`")] = Field(
        default=20.0, description="seconds without a byte, per attempt"
    )
    hedged: Annotated[float, Field(ge=0, le=0.1, allow_inf_nan=False)] = Field(
        default=0.02,
        description="of the requests for objects, the share that may be sent a second time since they are late, up to "
        "0.1; 0: none",
    )
    max_request: Size = Field(
        default=16 << 20,
        description="neighbouring blocks of one object that wait for a connection are asked for together, in requests "
        "of at most so many bytes; 0: one by one",
    )
    max_listing: Size = Field(
        default=16 << 30,
        description="bytes that an index of a web server (packed and unpacked), or a listing of `gs://`, `az://` and "
        "`hf://`, may have; at least 1 MiB.\n\n"
        "The daemon refuses a larger listing, so that an endless one fills no disk. It keeps an index below "
        "`state_dir` while it reads the index",
    )
    max_pages: Annotated[int, Field(ge=1)] = Field(
        default=100_000,
        description="pages that such a listing, or one of S3, may have: 10⁸ keys with most servers",
    )


class PrefetchSection(Section):
    """[prefetch]: fetching, and copying between tiers, before a read."""

    enabled: bool = Field(
        default=True, description="fetch the blocks that jobs have published before the jobs read them"
    )
    safety: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = Field(
        default=2.0,
        description="a factor: if other blocks must be evicted for a fetched block, the daemon fetches the block this "
        "many times the origin's latency ahead of its readers. A larger factor hides more of a slow origin's latency, "
        "a smaller one keeps more blocks that are read later; 1 to 100",
    )
    stall_worth: Size = Field(
        default=1 << 30,
        description="bytes from the origin that a second of stall is worth; 0: never widen the window.\n\n"
        "If more than one read in 500 comes late although the origin could deliver more, the daemon widens the window "
        "within which it evicts other blocks for fetched ones, as long as the widening costs less than this; 20 s "
        "later the window begins to narrow again",
    )
    memory_ahead: Size = Field(
        default=256 << 20,
        description="bytes that are read ahead at once from the SSD tier into the kernel's page cache",
    )
    guess: bool = Field(
        default=True,
        description="readahead: fetch ahead of programs that have published nothing, both those that read in an order, "
        "such as `cp -r`, and those that read a file or a directory in any order.\n\n"
        "[How](how-it-works.md#readahead). Has no effect if `enabled` is false",
    )
    processes: Annotated[
        Processes, DefaultText('`"auto"`: one for each 8 processors, up to 4; none on a smaller machine', '"auto"')
    ] = Field(
        default=AUTO,
        description="[fetch processes](how-it-works.md#fetch-processes), which get, check and write whole objects of "
        "S3 that no reader waits for yet, beside the daemon; 0 to 64. 0: the daemon does all by itself. None run if "
        "`enabled` is false",
    )


class SecuritySection(Section):
    """[security]: administrators, and the directories that datasets may expose."""

    admin_group: str = Field(
        default="",
        description="members of this group may administer the node as root may: datasets, warmups, pins, limits, other "
        "users' jobs",
    )
    file_roots: Annotated[tuple[AbsolutePath, ...], DefaultText("any directory")] = Field(
        default=(),
        description="directories, one of which must have a `file://` dataset in it, links resolved",
    )
    follow_symlinks: bool = Field(
        default=False,
        description="follow symbolic links that lead out of a `file://` dataset. A user who may write to its "
        "directory can then show all readers any file that the daemon may read. With `file_roots`, the targets must be "
        "in one of those",
    )


class MetricsSection(Section):
    """[metrics]: what the daemon counts, for Prometheus."""

    listen: LocalListen = Field(
        default="",
        description="where Prometheus, or a collector, reads `/metrics`: a port on loopback, such as `127.0.0.1:9568`, "
        "or `unix:/run/cachefs/metrics.sock`. Every user who can connect sees names of datasets.\n\n"
        "[How to use it](monitoring.md)",
    )
    datasets: Annotated[int, Field(ge=0, le=200)] = Field(
        default=20, description="datasets that have series of their own, the busiest ones; at most 200"
    )


class WebSection(Section):
    """[web]: the web page of the node."""

    listen: LocalListen = Field(
        default="",
        description="where browsers see the node's web page: a port on loopback, such as `127.0.0.1:9568`, or "
        "`unix:/run/cachefs/web.sock`; it may be the one of `[metrics]`. The page changes nothing, and shows what "
        "every user of the machine may see by cachectl.\n\n"
        "[What is there](monitoring.md#the-web-page)",
    )
