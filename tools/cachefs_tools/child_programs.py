"""Runs programs of this Python environment as child processes, and mounts datasets with one of them.

Each is a context manager. However the block ends (an error, Ctrl-C, SIGTERM), the mount point is detached and the
processes are stopped. If this process itself is killed, the kernel kills its children.
"""

import os
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs.mount import kernel
from cachefs.mount_table import mount_points

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 10.0
# A foreground mount prints this once it serves.
MOUNTED_LINE: Final = b"mounted on "
Child = subprocess.Popen[bytes]
# Words before a command that let the kernel kill the process when its parent ends. With a preexec_fn, the fork handlers
# of Python and gRPC would run, and a KeyboardInterrupt raised in one of them is lost.
KILL_WITH_PARENT: Final = ("setpriv", "--pdeathsig=KILL")


def require_fuse() -> None:
    """Raise CachefsError if FUSE is not usable."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CachefsError("/dev/fuse cannot be used here; in a container, start it with --device /dev/fuse")


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
        raise CachefsError(f"{found} is missing; install its package into this Python environment")
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
