"""A complete temporary node: an S3 server, a daemon and a mount, as child processes.

Each is a context manager. However the block ends (an error, Ctrl-C, SIGTERM), the mount point is detached and the
processes are stopped. If this process itself is killed, the kernel kills its children.
"""

import fcntl
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs.extras import install_command
from cachefs.messages import Empty
from cachefs.mount import kernel
from cachefs.mount_table import mount_points
from cachefs.rpc import STATUS, DaemonClient
from cachefs_tools.scratch_config import NodeSettings, configuration_text

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 10.0
_SHARED_MEMORY: Final = Path("/dev/shm")
# In a directory's name: the creator holds a lock on the directory while it is in use, at the latest LOCK_SECONDS
# seconds after its creation.
_LOCK_MARK: Final = "locked-"
LOCK_SECONDS: Final = 60.0
# A foreground mount prints this once it serves.
MOUNTED_LINE: Final = b"mounted on "
Child = subprocess.Popen[bytes]
# Words before a command that let the kernel kill the process when its parent ends. With a preexec_fn, the fork handlers
# of Python and gRPC would run, and a KeyboardInterrupt raised in one of them is lost.
KILL_WITH_PARENT: Final = ("setpriv", "--pdeathsig=KILL")


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


def require_fuse() -> None:
    """Raise CachefsError if FUSE is not usable."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CachefsError("/dev/fuse cannot be used here; in a container, start it with --device /dev/fuse")


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
def mount_dataset(
    dataset: str,
    directory: Path,
    socket: Path,
    log: Path,
    options: Sequence[str] = (),
    prefix: Sequence[str] = (),
) -> Iterator[None]:
    """Mount the dataset at the new *directory*. options: of `mount.cachefs -o`. prefix: words before the command."""
    directory.mkdir()
    command = ["mount.cachefs", dataset, str(directory), "-f", "-o", ",".join((f"socket={socket}", *options))]
    prefix = ("setpriv", "--pdeathsig=TERM", *prefix)  # so that it unmounts
    with run_program(command, log, prefix=prefix) as process:
        try:
            # A mount in the mount table may still lack its shield.
            wait_until(lambda: MOUNTED_LINE in log.read_bytes(), process, log)
            yield
        finally:
            # A mount process that receives SIGTERM would wait for this process, if this process has read the mount.
            if is_mounted(directory):
                kernel.unmount(directory, lazy=True)


def is_mounted(directory: Path) -> bool:
    return any(point.path == directory.resolve() for point in mount_points())


@contextmanager
def run_program(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = KILL_WITH_PARENT,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of this Python environment, and stop it at the end. prefix: words before the command, which end the
    child if this process is killed.

    The child has a session of its own, so the terminal's Ctrl-C does not reach it, and it lives until the mount is
    gone.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*prefix, program_path(command[0]), *command[1:]], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env=env, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        wait_or_kill(process)


def program_path(name: str) -> str:
    """Return the path of a program of this Python environment. Raises CachefsError if it is not installed."""
    found = Path(sysconfig.get_path("scripts"), name)
    if not found.exists():
        raise CachefsError(f"{found} is missing; install it with: {install_command('demo')}")
    return str(found)


def wait_or_kill(process: Child) -> None:
    """Wait for the end of a process that was asked to end, and kill it after STOP_SECONDS."""
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], bool], process: Child, log: Path) -> None:
    """Wait until the child is ready. Raises CachefsError with the end of its log if it dies, or is not ready after
    START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            state = "is not ready in time" if process.returncode is None else f"ended with status {process.returncode}"
            last_words = log.read_text(errors="replace")[-1000:].strip()
            raise CachefsError(f"{log.stem} {state}; its log ends: {last_words or '(empty)'}")
        time.sleep(0.01)
