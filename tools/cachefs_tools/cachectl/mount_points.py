"""cachectl mount, umount and info: mount points of this node, and the files and directories below them."""

import os
import subprocess
import sys
import sysconfig
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click
from rich.console import RenderableType

from cachefs.errors import Busy, CachefsError, ConfigError, NotFound
from cachefs.messages import Empty, FileInfo, FilePath, MountView
from cachefs.mount import kernel
from cachefs.mount.mount_use import describe_users
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import MountPoint, find_mount_point, mount_points
from cachefs.rpc import DATASET_LIST, FILE_SHOW, STATUS
from cachefs.socket_path import SOCKET_VARIABLE
from cachefs_tools.cachectl import completion
from cachefs_tools.cachectl.command_session import CommandSession, exit_with_error, with_session
from cachefs_tools.cachectl.display import labelled_lines, size
from cachefs_tools.escaped_names import escape_name

# Seconds for a mount to respond. A hanging mount must not hang cachectl.
PROBE_SECONDS: Final = 5.0
# Exit status of the child that finds a mount dead.
DEAD_STATUS: Final = 3
# A mount with published jobs briefly uses its own files, to see which pages the kernel has. So a busy mount is retried
# for BUSY_SECONDS, with PAUSE between attempts.
BUSY_SECONDS: Final = 2.0
PAUSE: Final = 0.05
# Seconds in which the process of an unmounted mount ends, and of a detached one that is not in use.
END_SECONDS: Final = 10.0
LAZY_SECONDS: Final = 2.0
STATUS_SECONDS: Final = 5.0
# Deadline in seconds of the search for processes that use a mount: a machine may have thousands.
USERS_SECONDS: Final = 5.0
NO_USER_FOUND: Final = (
    " (no process that uses it was found among those of this user; something may be mounted below it)"
)
STILL_RUNNING: Final = "but its process has not ended yet, so `cachectl mounts` still shows it"


@click.command()
@click.argument("path")
@with_session
def info(session: CommandSession, path: str) -> None:
    """Show details of PATH, a file or directory below a mount.

    Its dataset and snapshot, its version at the origin, and in which tier each of its blocks is.
    """
    point, inside = find_mount(path)
    spec = MountSpec.parse(point.spec).resolve_url(session.call(DATASET_LIST, Empty()).datasets)
    mounts = session.call(STATUS, Empty()).mounts
    found = session.call(FILE_SHOW, requested_file(point, spec, inside, mounts))
    session.print_result(found, *info_lines(found))


def find_mount(path: str) -> tuple[MountPoint, bytes]:
    """Return the mount of *path*, and the path within the mount. Accesses no mount unless *path* has symbolic links.
    Raises NotFound."""
    for candidate in (os.path.abspath(path), os.path.realpath(path)):
        for point in sorted(mount_points(), key=lambda point: len(point.path.parts), reverse=True):
            if Path(candidate).is_relative_to(point.path):
                return point, os.fsencode(os.path.normpath(f"{point.root}/{Path(candidate).relative_to(point.path)}"))
    raise NotFound(f"{escape_name(path)} is in no mount of cachefs; `cachectl mounts` lists the mounts")


def requested_file(point: MountPoint, spec: MountSpec, inside: bytes, mounts: list[MountView]) -> FilePath:
    """Return the file at the path *inside* of the mount *point* of *spec*. mounts: those that the daemon knows. Raises
    NotFound."""
    relative = inside.strip(b"/")
    if spec.is_single:
        (part,) = spec.datasets
        living = [one for one in mounts if one.alive and MountSpec.parse(one.spec).has_named(part.name)]
        here = [one for one in living if one.mountpoint == str(point.path)] or living
        return FilePath(dataset=part.name, path=relative, snapshot=part.digits or (here[0].snapshot if here else ""))
    dataset, _, path = relative.partition(b"/")
    if not dataset:
        raise NotFound(f"{point.path} is a mount of several datasets; name one, or something in it")
    digits = next((part.digits for part in spec.datasets if part.name == os.fsdecode(dataset)), "")
    return FilePath(dataset=os.fsdecode(dataset), path=path, snapshot=digits or "")


def info_lines(found: FileInfo) -> list[RenderableType]:
    """Return the lines of `info`."""
    rows = [
        ("dataset", f"{found.dataset}@{found.snapshot}"),
        ("path", escape_name(found.path) + "/" * found.directory if found.path else "/"),
    ]
    if not found.directory:
        rows += [
            ("size", f"{size(found.size)} ({found.size:,} bytes)"),
            ("modified", datetime.fromtimestamp(found.mtime_ns / 1e9, UTC).astimezone().isoformat(" ", "seconds")),
            ("etag", escape_name(found.etag)),
            ("tiers", found.tiers or "no blocks"),
        ]
    return [labelled_lines(rows)]


@click.command()
@click.argument("spec", shell_complete=completion.datasets)
@click.argument("directory", shell_complete=completion.directories)
@click.option("-o", "options", multiple=True, metavar="OPTIONS", help="Mount options, separated by commas.")
@click.option(
    "--follow", is_flag=True, help="Show the new snapshot after each refresh; as -o follow, and SPEC NAME@latest."
)
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground.")
@with_session
def mount(  # one for each option
    session: CommandSession, spec: str, directory: str, options: tuple[str, ...], follow: bool, foreground: bool
) -> None:
    """Mount SPEC at DIRECTORY, as mount.cachefs does.

    SPEC is a dataset, several datasets with commas between them, or all.
    """
    helper = Path(sysconfig.get_path("scripts")) / "mount.cachefs"
    command = [str(helper), *(["-f"] if foreground else [])]
    if joined_options := ",".join((*options, *(["follow"] if follow else []))):
        command += ["-o", joined_options]
    command += ["--", spec, directory]
    environment = {**os.environ, SOCKET_VARIABLE: str(session.socket)}
    if not session.as_json:
        os.execve(helper, command, environment)
    # A background mount closes stderr once it is ready. A foreground mount logs to it.
    stderr = None if foreground else subprocess.PIPE
    done = subprocess.run(
        command, env=environment, stdout=sys.stderr, stderr=stderr, text=True, errors="replace", check=False
    )
    if done.returncode:
        *before, reason = (done.stderr or "").splitlines() or [f"mount.cachefs failed with status {done.returncode}"]
        click.echo("".join(f"{line}\n" for line in before), err=True, nl=False)
        exit_with_error(session, CachefsError.__name__, reason.removeprefix("mount.cachefs: "), done.returncode)
    click.echo(done.stderr or "", err=True, nl=False)
    session.print_result({"spec": spec, "mountpoint": os.path.abspath(directory)})


@click.command()
@click.argument("directory", shell_complete=completion.mount_points)
@click.option("--lazy", is_flag=True, help="Detach it now, even while files are open.")
@with_session
def umount(session: CommandSession, directory: str, lazy: bool) -> None:
    """Unmount DIRECTORY.

    This also recovers the mount point of a mount process that died.
    """
    path = resolved_mount_point(directory)
    if not any(point.path == path for point in mount_points()):
        raise NotFound(f"no cachefs is mounted at {escape_name(directory)}; `cachectl mounts` shows where there is one")
    if find_mount_point(path) is None:
        raise Busy(f"something else is mounted over the mount at {escape_name(directory)}; unmount that first")
    recovered = not lazy and is_dead_mount(path)
    known = living_mounts(session, path)
    # After detaching, no path of an open file leads to the mount any more.
    users = describe_users(path, USERS_SECONDS) if lazy else ""
    try:
        unmount(path, lazy=lazy or recovered)
    except Busy as error:
        users = describe_users(path, USERS_SECONDS)  # now, since the user may be another one
        by = f", by {users}" if users else NO_USER_FOUND
        raise Busy(f"{error}{by}; end what uses it, or detach it with --lazy") from None
    done = "recovered from a dead mount" if recovered else "unmounted"
    ended = wait_for_mount_end(session, path, known, LAZY_SECONDS if lazy or recovered else END_SECONDS)
    if not ended:
        by = f", which are open in {users}" if users else ""
        done = (
            f"detached; its process continues until all its files are closed{by}"
            if lazy
            else f"{done}; {STILL_RUNNING}"
        )
    session.print_result(
        {"mountpoint": path, "recovered": recovered, "ended": ended}, f"{escape_name(directory)}: {done}"
    )


def living_mounts(session: CommandSession, path: Path) -> set[str]:
    """Return the ids of the mounts on *path* that the daemon considers alive; none if no daemon answers."""
    try:
        mounts = session.call(STATUS, Empty(), STATUS_SECONDS).mounts
    except CachefsError:
        return set()
    return {mount.id for mount in mounts if mount.alive and mount.mountpoint == str(path)}


def wait_for_mount_end(session: CommandSession, path: Path, known: set[str], seconds: float) -> bool:
    """Wait until the daemon knows that the mounts *known* have ended, so that their datasets can be removed. Return
    False after *seconds*."""
    deadline = time.monotonic() + seconds
    while known & living_mounts(session, path):
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE)
    return True


def unmount(path: Path, *, lazy: bool) -> None:
    """Unmount, retrying while the mount is busy. Raises Busy if it stays busy, and other CachefsErrors."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return kernel.unmount(path, lazy=lazy)
        except Busy:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE)


def resolved_mount_point(directory: str) -> Path:
    """Return the absolute path of a mount point without accessing the mount. Raises CachefsError."""
    if not directory:
        raise ConfigError("the directory is empty; name a mount point, as `cachectl mounts` shows them")
    return kernel.resolve_mount_point(Path(os.path.abspath(directory)))


def is_dead_mount(path: Path) -> bool:
    """Return whether the mount's process is gone or does not respond. A child checks, since the check may hang."""
    probe = (
        "import pathlib, sys, cachefs.mount.kernel;"
        f"sys.exit({DEAD_STATUS} if cachefs.mount.kernel.is_dead(pathlib.Path(sys.argv[1])) else 0)"
    )
    child = subprocess.Popen([sys.executable, "-c", probe, path], start_new_session=True)
    try:
        return child.wait(PROBE_SECONDS) == DEAD_STATUS
    except subprocess.TimeoutExpired:
        child.kill()
        return True
