"""A temporary node: an S3 server and a daemon as child processes, and a directory for the memory tier.

Each is a context manager, and the end of the block stops the process (cachefs_tools.child_programs, which mounts too).
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs_tools.child_programs import START_SECONDS, run_program, wait_until

from cachefs.messages import Empty
from cachefs.rpc import STATUS, DaemonClient
from cachefs_bench.lab.scratch_config import NodeSettings, configuration_text

_SHARED_MEMORY: Final = Path("/dev/shm")
# In a directory's name: the creator holds a lock on the directory while it is in use, at the latest LOCK_SECONDS
# seconds after its creation.
_LOCK_MARK: Final = "locked-"
LOCK_SECONDS: Final = 60.0


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
