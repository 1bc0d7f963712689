"""Real mounts for tests, in processes of their own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from cachefs.messages import Empty, MountView
from cachefs.mount import kernel
from cachefs.rpc import STATUS, DaemonClient
from tests.waiting import until
from tests.warm_python import warm

COMMAND = [sys.executable, str(Path(sys.executable).with_name("mount.cachefs"))]
# What a mount imports, but pyfuse3: that may be there only when the library that comes before it is loaded.
MODULES = (
    "cachefs.mount.cli",
    "cachefs.mount.reads.block_reader",
    "cachefs.mount.control.control_directory",
    "cachefs.mount.push.pusher",
    "importlib.metadata",
    "importlib.resources",
    "trio",
)


def run_mount(
    socket: Path, spec: str, directory: Path, *options: str, patch: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `mount.cachefs SPEC DIRECTORY -o ...`. It may fail. *patch* is Python code that runs before its own.

    The process is forked from one that has imported some modules (MODULES, tests/warm_python.py). So what these have
    imported by name is patched there, and not where it comes from.
    """
    arguments = [spec, str(directory), "-o", ",".join((f"socket={socket}", *options))]
    patched = [sys.executable, "-c", f"{patch}\nfrom cachefs.mount.cli import main\nmain()"]
    return warm(*MODULES).run([*(patched if patch else COMMAND), *arguments], timeout=60)


def mount_again(socket: Path, spec: str, directory: Path, *options: str) -> None:
    """Mount on *directory* as a user would who is told that the old mount there is busy: again."""
    until(
        lambda: run_mount(socket, spec, directory, f"log={directory}.log", *options),
        is_right=lambda done: done.returncode == 0,
    )


@contextlib.contextmanager
def mounted(socket: Path, spec: str, directory: Path, *options: str, patch: str = "") -> Iterator[Path]:
    """The directory with *spec* mounted on it. It is unmounted in the end, whatever has happened."""
    directory.mkdir(exist_ok=True)
    done = run_mount(socket, spec, directory, f"log={directory}.log", *options, patch=patch)
    assert done.returncode == 0, done.stderr
    try:
        yield directory
    finally:
        with contextlib.suppress(Exception):
            kernel.unmount(directory, lazy=True)


def counters(client: DaemonClient, directory: Path) -> dict[str, int]:
    """The counters of a mount, once two reports in a row agree.

    Each look asks for the size of the file system (statfs), until a report counts that: so a report is never waited for
    that an idle mount does not send, and the second report was made after the call. These requests are not counted.
    """

    def reported() -> dict[str, int]:
        return next((mount.counters for mount in mounts_at(client, directory)), {})

    def later(than: dict[str, int]) -> dict[str, int]:
        def look() -> dict[str, int]:
            os.statvfs(directory)
            return reported()

        return until(look, is_right=lambda now: now.get("statfs", 0) > than.get("statfs", 0))

    seen, now = {}, later(reported())
    while (counted := _without_statfs(now)) != seen:
        seen, now = counted, later(now)
    return seen


def _without_statfs(counted: dict[str, int]) -> dict[str, int]:
    return {**counted, "requests": counted["requests"] - counted["statfs"], "statfs": 0}


def mount_pid(client: DaemonClient, directory: Path) -> int:
    """The process id of a mount's supervisor."""
    return next(mount.pid for mount in mounts_at(client, directory))


def mounts_at(client: DaemonClient, directory: Path) -> Iterator[MountView]:
    """Yield the mount that serves *directory*, as the daemon shows it.

    The daemon may know others, which were unmounted there and live on: a process in another mount namespace, such as a
    test beside this one makes, holds every mount that was there when the namespace was made.
    """
    for mount in client.call(STATUS, Empty()).mounts:
        if mount.mountpoint == str(directory) and mount.alive and not mount.detached:
            yield mount


@contextlib.contextmanager
def frozen(client: DaemonClient, directory: Path) -> Iterator[None]:
    """Nobody serves the mount while the block runs: its supervisor and all its workers are suspended."""
    supervisor = psutil.Process(mount_pid(client, directory))
    stopped = [supervisor, *supervisor.children()]
    for process in stopped:  # the supervisor is first, since it would replace a worker that does not work
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def drop_pages(directory: Path) -> None:
    """Make the kernel forget the content of every file. It then asks the mount again."""
    for parent, _, names in os.walk(directory):
        for name in names:
            fd = os.open(os.path.join(parent, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def read_tree(directory: Path) -> dict[bytes, bytes | None]:
    """The path of everything below *directory* -> its content, or None for a directory. Paths are relative."""
    top = os.fsencode(directory)
    found: dict[bytes, bytes | None] = {}
    for parent, directories, names in os.walk(top):
        for name in directories:
            found[os.path.relpath(os.path.join(parent, name), top)] = None
        for name in names:
            path = os.path.join(parent, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, top)] = file.read()
    return found
