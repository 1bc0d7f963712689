"""Checks that the mounts of this machine respond, and that the daemon knows them."""

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from cachefs.messages import MountView
from cachefs.mount_table import mount_points
from cachefs_tools.doctor.finding import Finding, note, ok, problem, warning
from cachefs_tools.escaped_names import escape_name

# Seconds for all mounts to respond, and most mounts that are tested.
RESPONSE_SECONDS: Final = 4.0
MAX_MOUNTS: Final = 256
RESPONDS: Final = "answers"
DEAD: Final = "dead"
HANGS: Final = "hangs"
# Findings of one kind that are listed; the rest is counted.
_LISTED: Final = 8


class MountFacts(msgspec.Struct, frozen=True):
    """A mount in the kernel's table."""

    path: str
    spec: str
    # `answers`, `dead`, `hangs`, or the kernel's error.
    state: str


def gather(_: object) -> list[MountFacts]:
    points = mount_points()[:MAX_MOUNTS]
    states = dict.fromkeys((str(point.path) for point in points), HANGS)

    def look(path: str) -> None:
        try:
            os.statvfs(path)
            states[path] = RESPONDS
        except OSError as error:
            states[path] = DEAD if error.errno == errno.ENOTCONN else error.strerror or str(error)

    threads = [threading.Thread(target=look, args=(path,), daemon=True) for path in states]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RESPONSE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [MountFacts(str(point.path), point.spec, states[str(point.path)]) for point in points]


def findings(found: Sequence[MountFacts], known: Sequence[MountView] | None, version: str) -> Iterator[Finding]:
    """Yield findings. known: the daemon's mounts; None: no daemon answers. version: of cachectl."""
    yield from _limit_findings([finding for each in found for finding in _mount_findings(each)])
    living = sum(each.state == RESPONDS for each in found)
    if living:
        yield ok("mounts.alive", f"{living} mount{'s answer' if living > 1 else ' answers'}")
    elif not found:
        yield note("mounts.none", "nothing is mounted here")
    if known is not None:
        yield from _limit_findings([finding for each in known for finding in _daemon_view_findings(each, version)])
        yield from _unknown_mount_findings(found, known)


def _mount_findings(each: MountFacts) -> Iterator[Finding]:
    if each.state == RESPONDS:
        return
    remedy = f"cachectl umount {escape_name(each.path)}, then mount again"
    if each.state == DEAD:
        yield problem(
            "mounts.dead",
            f"{escape_name(each.path)}: its process is gone",
            "everything there fails (Transport endpoint is not connected)",
            remedy,
        )
    elif each.state == HANGS:
        yield problem(
            "mounts.hangs",
            f"{escape_name(each.path)} has not answered within {RESPONSE_SECONDS:.0f} s",
            "programs that read there wait; the mount's process is stopped, or stuck",
            remedy,
        )
    else:
        yield note(
            "mounts.error",
            f"{escape_name(each.path)}: {each.state}",
            "files there cannot be read by this user",
            "look at the rights of the directories above, and at allow_other",
        )


def _daemon_view_findings(each: MountView, version: str) -> Iterator[Finding]:
    path = escape_name(each.mountpoint)
    if each.detached and each.alive:
        yield note(
            "mounts.detached",
            f"{path} was unmounted while files were open (process {each.pid})",
            "the mount serves programs with open files, and ends with the last of them",
        )
    if each.alive and each.version and each.version != version:
        yield warning(
            "mounts.version",
            f"the mount at {path} is of version {each.version}, cachectl of {version}",
            "mounts, daemon and commands of two versions are not tested together",
            f"when no program reads there: cachectl umount {path}, then mount again",
        )


def _unknown_mount_findings(found: Sequence[MountFacts], known: Sequence[MountView]) -> Iterator[Finding]:
    known_paths = {each.mountpoint for each in known}
    others = [escape_name(each.path) for each in found if each.state == RESPONDS and each.path not in known_paths]
    if others:
        more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
        yield note("mounts.unknown", f"{others[0]}{more}: of another daemon, or just mounted")


def _limit_findings(found: Sequence[Finding]) -> Iterator[Finding]:
    yield from found[:_LISTED]
    if len(found) > _LISTED:
        last = found[_LISTED]
        yield msgspec.structs.replace(last, found=f"… and {len(found) - _LISTED:,} more mounts like these")
