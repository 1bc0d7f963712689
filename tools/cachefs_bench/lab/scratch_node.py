"""A temporary node: an S3 server and a daemon as child processes, and a directory for the memory tier.

Each is a context manager, and the end of the block stops the process (cachefs_tools.child_programs, which mounts too).

`configuration_text` writes the configuration of a node's daemon. `run_directory_node` runs a daemon whose dataset is a
local directory, for benchmarks that need no S3 server.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cachefs.messages import DatasetAddRequest, Empty, OriginOptions
from cachefs.rpc import DATASET_ADD, STATUS, DaemonClient
from cachefs_tools.child_programs import START_SECONDS, run_program, wait_until

_SHARED_MEMORY: Final = Path("/dev/shm")
# In a directory's name: the creator holds a lock on the directory while it is in use, at the latest LOCK_SECONDS
# seconds after its creation.
_LOCK_MARK: Final = "locked-"
LOCK_SECONDS: Final = 60.0
# Name of the dataset in all benchmarks.
DATASET: Final = "bench"


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings of one tier."""

    budget: int  # bytes; 0: there is no such tier (SSD only)
    segment_size: int = 0  # bytes of a segment file; 0: the daemon's default


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings of a daemon, except for the paths of its files."""

    memory: TierSettings
    ssd: TierSettings
    block_size: int = 0  # bytes; 0: the daemon's default
    policy: str = ""  # eviction policy; empty: the daemon's default
    read_deadline: float = 0  # seconds; 0: the daemon's default
    guess: bool = True  # whether it reads ahead for programs that have published nothing
    max_connections: int = 0  # to the origin; 0: the daemon's default
    # Keys of [cluster]; empty: no cluster.
    cluster: Mapping[str, object] = field(default_factory=dict)


def configuration_text(work: Path, memory: Path, settings: NodeSettings) -> str:
    """Return the text of the file. The memory tier is in the directory *memory*, everything else in *work*."""
    daemon = {"socket": str(work / "cachefsd.sock"), "state_dir": str(work / "state")}
    sections: dict[str, Mapping[str, object]] = {
        "daemon": {
            **daemon, "block_size": settings.block_size, "policy": settings.policy,
            "read_deadline": settings.read_deadline,
        },
        "memory": {"dir": str(memory), **_tier(settings.memory)},
        "ssd": {"dir": str(work / "ssd"), "min_free": 0, **_tier(settings.ssd)},
    }  # fmt: skip
    if not settings.guess:
        sections["prefetch"] = {"guess": False}
    if settings.max_connections:
        sections["origin"] = {"max_connections": settings.max_connections}
    if settings.cluster:
        sections["cluster"] = dict(settings.cluster)
    return "\n".join(_section(name, values) for name, values in sections.items())


def _tier(settings: TierSettings) -> dict[str, int]:
    return {"budget": settings.budget, "segment_size": settings.segment_size}


def _section(name: str, values: Mapping[str, object]) -> str:
    """Return one table of the file, without settings left to the daemon."""
    settings = {key: value for key, value in values.items() if value or key in ("budget", "min_free", "guess")}
    return f"[{name}]\n" + "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in settings.items()
    )


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """Credentials of an S3 server."""

    access_key: str
    secret_key: str


# The account of S3 servers started here.
SCRATCH_CREDENTIALS: Final = S3Credentials("scratch", "scratch-secret")


@dataclass(frozen=True, slots=True)
class ScratchNode:
    """A running daemon, whose files are in one directory."""

    client: DaemonClient
    directory: Path  # holds the daemon's socket, state, SSD tier, configuration and log

    @property
    def socket(self) -> Path:
        return self.directory / "cachefsd.sock"

    @property
    def ssd(self) -> Path:
        """The directory of the SSD tier; missing if the node has no such tier."""
        return self.directory / "ssd"


@contextmanager
def run_s3_server(buckets: Path, log: Path) -> Iterator[str]:
    """Run rclone's S3 server over the directory *buckets*, whose subdirectories are the buckets. Yields its URL."""
    announcement = "Starting s3 server on ["
    command = ["rclone", "serve", "s3", "--config", "/dev/null", "--addr", "127.0.0.1:0", "--auth-key",
               f"{SCRATCH_CREDENTIALS.access_key},{SCRATCH_CREDENTIALS.secret_key}", str(buckets)]  # fmt: skip
    with run_program(command, log) as process:
        wait_until(lambda: announcement in log.read_text(), process, log)
        yield log.read_text().partition(announcement)[2].partition("/]")[0]


@contextmanager
def memory_directory(prefix: str) -> Iterator[Path]:
    """Create a directory in /dev/shm for a memory tier, removed at the end. Directories left by killed processes are
    removed first, since they use memory."""
    prefix += _LOCK_MARK
    remove_unused_directories(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=_SHARED_MEMORY, ignore_cleanup_errors=True) as directory:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            inner = Path(directory, "memory")  # cachefsd locks the inner one
            inner.mkdir()
            yield inner
        finally:
            os.close(lock)


def remove_unused_directories(prefix: str) -> None:
    """Remove this user's directories without a lock. A new one may not be locked yet."""
    for directory in _SHARED_MEMORY.glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, locked, or being removed
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.fstat(lock)
                if found.st_uid == os.geteuid() and time.time() - found.st_ctime > LOCK_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory)
            finally:
                os.close(lock)


@contextmanager
def run_daemon(
    work: Path, memory: Path, settings: NodeSettings, account: S3Credentials = SCRATCH_CREDENTIALS
) -> Iterator[ScratchNode]:
    """Run cachefsd with only the account's credentials. Its memory tier is in *memory*, everything else in *work*."""
    config, log = work / "cachefsd.toml", work / "cachefsd.log"
    config.write_text(configuration_text(work, memory, settings))
    with run_program(["cachefsd", "--config", str(config)], log, environment_with(account)) as process:
        socket = work / "cachefsd.sock"
        wait_until(socket.exists, process, log)
        node = ScratchNode(DaemonClient(socket), work)
        try:
            node.client.call(STATUS, Empty(), timeout=START_SECONDS)
            yield node
        finally:
            node.client.close()


def environment_with(account: S3Credentials) -> dict[str, str]:
    """Return this process's variables, with only the account's credentials."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {
        **own, "AWS_ACCESS_KEY_ID": account.access_key, "AWS_SECRET_ACCESS_KEY": account.secret_key,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }  # fmt: skip


@contextmanager
def run_directory_node(work: Path, source: Path, settings: NodeSettings) -> Iterator[ScratchNode]:
    """Run a node with the directory *source* listed as the dataset DATASET."""
    with memory_directory("cachefs-bench-") as memory, run_daemon(work, memory, settings) as node:
        list_dataset(node.client, f"file://{source}")
        yield node


def list_dataset(client: DaemonClient, url: str, options: OriginOptions | None = None) -> None:
    """List *url* as the dataset DATASET. Returns when the listing is complete."""
    request = DatasetAddRequest(name=DATASET, url=url, options=options or OriginOptions())
    for _ in client.stream_responses(DATASET_ADD, request):
        pass
