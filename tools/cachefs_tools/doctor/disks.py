"""Checks the file systems of the tiers and of the daemon's state."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachefs.mount_table import file_system_kinds
from cachefs.sizes import format_size
from cachefs_tools.doctor.finding import Finding, note, ok, problem, warning

MEMORY: Final = "memory"
SSD: Final = "ssd"
STATE: Final = "state"
IN_MEMORY: Final = ("tmpfs", "ramfs")
_NETWORK_KINDS: Final = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "9p",
    "virtiofs",
    "afs",
    "glusterfs",
)
# Room for the daemon's state apart from snapshots: the index of 10^7 blocks.
_STATE_ROOM: Final = 2 << 30
# A tier reserves a small part of its budget.
_USABLE_SHARE: Final = 0.95


class DaemonDirectory(msgspec.Struct, frozen=True):
    """A directory of the daemon."""

    # `memory`, `ssd` or `state`.
    name: str
    directory: str
    # The tier's budget, its present bytes, and the bytes it leaves free (None: unknown); 0 for the state.
    budget: int = 0
    used: int = 0
    min_free: int | None = 0


class DiskFacts(msgspec.Struct, frozen=True):
    """Facts about a directory's file system."""

    target: DaemonDirectory
    # The directory, or its nearest existing parent.
    nearest: str
    # Kind of file system, such as `ext4`; `?`: unknown.
    kind: str
    # Size in bytes, and bytes free for ordinary users.
    size: int
    free: int
    # Identifies the file system.
    device: int
    is_root_disk: bool
    is_read_only: bool
    # A mount point of /etc/fstab above the directory that is not mounted; empty: none.
    missing_mount: str = ""
    # Why the directory cannot be examined; empty if it can.
    error: str = ""


def gather(argument: object) -> DiskFacts:
    """Gather facts. argument: a Place."""
    target = msgspec.convert(argument, DaemonDirectory)
    directory = Path(target.directory)
    try:
        nearest = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
        device = nearest.stat().st_dev
        room, mode = shutil.disk_usage(nearest), os.statvfs(nearest).f_flag
    except OSError as error:
        return DiskFacts(target, str(directory), "?", 0, 0, 0, False, False, error=error.strerror or str(error))
    kind = file_system_kinds().get(f"{os.major(device)}:{os.minor(device)}", "?")
    return DiskFacts(
        target,
        str(nearest),
        kind,
        room.total,
        room.free,
        device,
        is_root_disk=device == Path("/").stat().st_dev,
        is_read_only=bool(mode & os.ST_RDONLY),
        missing_mount=_missing_mount(directory),
    )


def findings(facts: DiskFacts) -> Iterator[Finding]:
    target = facts.target
    name = f"disks.{target.name}"
    if facts.error:
        yield note(name, f"{target.directory}: {facts.error}", "nothing is known of it", "run doctor as root")
        return
    found = list(_directory_findings(facts, name))
    yield from found
    if not found:
        yield ok(name, f"{target.directory}: {facts.kind} of {format_size(facts.size)}, {format_size(facts.free)} free")


def shared_findings(facts: Sequence[DiskFacts]) -> Iterator[Finding]:
    """Yield findings about directories that share a file system."""
    found = {each.target.name: each for each in facts if not each.error}
    state, ssd = found.get(STATE), found.get(SSD)
    if state is None or ssd is None or state.device != ssd.device:
        return
    text = "state_dir is on the file system of the ssd tier"
    if ssd.target.min_free is None:
        yield note(
            "disks.shared",
            text,
            "ssd.min_free keeps room for the index; it is in the configuration file",
            "name the file with --config",
        )
    elif ssd.target.min_free == 0:
        yield warning(
            "disks.shared",
            f"{text}, of which the tier leaves nothing free",
            "where the tier has filled it, the index cannot grow and the daemon does not start",
            "set ssd.min_free to 5% or more, or put state_dir on another disk",
        )
    else:
        yield ok("disks.shared", f"{text}; ssd.min_free keeps {format_size(ssd.target.min_free)} for it")


def _directory_findings(facts: DiskFacts, name: str) -> Iterator[Finding]:
    target = facts.target
    if facts.missing_mount:
        yield problem(
            name,
            f"{target.directory}: nothing is mounted on {facts.missing_mount}, which /etc/fstab names",
            "the daemon refuses to start, or would fill the disk below",
            f"mount {facts.missing_mount}",
        )
        return
    if facts.is_read_only:
        yield problem(
            name,
            f"{target.directory} is on a file system that is mounted read-only",
            "nothing can be kept there",
            "see dmesg for errors of the disk; mount -o remount,rw",
        )
    if target.name == STATE:
        yield from _state_findings(facts, name)
        return
    yield from _kind_findings(facts, name)
    yield from _room_findings(facts, name)


def _state_findings(facts: DiskFacts, name: str) -> Iterator[Finding]:
    if facts.kind in _NETWORK_KINDS:
        yield problem(
            name,
            f"state_dir {facts.target.directory} is on {facts.kind}",
            "the index is mapped into memory from there: a server that hangs stops the daemon and all mounts",
            "set state_dir to a directory on a local disk",
        )
    elif facts.kind in IN_MEMORY:
        yield warning(
            name,
            f"state_dir {facts.target.directory} is in memory ({facts.kind})",
            "a restart of the machine loses datasets, pins and the index of cached blocks",
            "set state_dir to a directory on a local disk",
        )
    elif facts.free < _STATE_ROOM:
        yield warning(
            name,
            f"state_dir {facts.target.directory} has {format_size(facts.free)} free",
            "a listing or the index may find no room, and the daemon does not start on a full disk",
            "free some, or move state_dir",
        )


def _kind_findings(facts: DiskFacts, name: str) -> Iterator[Finding]:
    target = facts.target
    where = f"the {target.name} tier's directory {target.directory} is on {facts.kind}"
    if facts.kind in _NETWORK_KINDS or facts.kind.startswith("fuse"):
        yield problem(
            name,
            where,
            "blocks there are no faster to read than from the origin, and reads hang with the file server",
            f"set {target.name}.dir to a local file system",
        )
    elif target.name == MEMORY and facts.kind not in (*IN_MEMORY, "?"):
        yield warning(
            name,
            where,
            "the memory tier is as slow as that disk, and wears it",
            "set memory.dir to a directory of a tmpfs, such as /dev/shm/cachefs",
        )
    elif target.name == SSD and facts.kind in IN_MEMORY:
        yield warning(
            name,
            where,
            "the tier takes memory, and is empty after a restart of the machine",
            "set ssd.dir to a directory on a local disk",
        )
    elif target.name == SSD and facts.kind == "overlay":
        yield warning(
            name,
            f"{where}, the root of a container",
            "cached blocks are lost with the container",
            "mount a volume of the host there",
        )
    elif target.name == SSD and facts.is_root_disk:
        yield note(
            name,
            f"{where}, on the disk of /",
            "system and cache share the room and the speed of one disk",
            "mount an SSD of its own there, and set ssd.require_mount to its mount point",
        )


def _room_findings(facts: DiskFacts, name: str) -> Iterator[Finding]:
    target = facts.target
    if not target.budget:
        return
    shown = f"the {target.name} tier may take {format_size(target.budget)}"
    more = "mount -o remount,size=…, or --shm-size for a container" if facts.kind in IN_MEMORY else "free some"
    if facts.size < target.budget:
        yield problem(
            name,
            f"{shown}, and {target.directory} is on a file system of {format_size(facts.size)}",
            "the tier is smaller than it seems; on a full tmpfs nothing is kept in memory",
            f"{more}, or lower {target.name}.budget",
        )
    elif facts.free - (target.min_free or 0) + target.used < _USABLE_SHARE * target.budget:
        room = max(0, facts.free - (target.min_free or 0) + target.used)
        yield warning(
            name,
            f"{shown}, and there is room for {format_size(room)} (others fill the file system)",
            "less is cached, and more is fetched again",
            f"{more}, or lower {target.name}.budget",
        )


def _missing_mount(directory: Path) -> str:
    from cachefs_daemon.store.owned_directory import missing_mount

    return str(missing_mount(directory) or "")
