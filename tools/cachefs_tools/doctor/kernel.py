"""Checks the kernel's support for FUSE mounts."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachefs.extras import install_command
from cachefs_tools.doctor.finding import Finding, Level, note, ok, problem, warning

_SYS_ADMIN: Final = 21  # CAP_SYS_ADMIN (linux/capability.h)
_CONNECTIONS: Final = Path("/sys/fs/fuse/connections")
_PARAMETERS: Final = Path("/sys/module/fuse/parameters")
# By kernel version: the feature that older kernels lack, and the consequence.
_FEATURES: Final[tuple[tuple[tuple[int, int], str, str, str], ...]] = (
    (
        (5, 1),
        "zero_open",
        "zero-open of files and directories",
        "each open is a request to the mount, so reads of cached files are several times slower",
    ),
    (
        (6, 5),
        "page_cache",
        "cachestat and overlays of one layer",
        "mounts have no shield, and pushers cannot see which pages are cached: cached files open more slowly",
    ),
    ((6, 9), "resend", "FUSE_NOTIFY_RESEND", "when a worker of a mount dies, reads that it had in hand fail"),
)
# Background requests of a mount, as in cachefs.mount.processes.session.
_WANTED_BACKGROUND: Final = 2048


class KernelFacts(msgspec.Struct, frozen=True):
    """Facts about the kernel."""

    # As printed by `uname -r`.
    release: str
    # State of /dev/fuse: `ok`, `missing` or `denied`.
    device: str
    # The file systems among fuse, fusectl and overlay that the kernel has loaded.
    known: Sequence[str]
    # Whether the control files of FUSE connections are mounted, and whether this process may mount them.
    has_control: bool
    may_mount: bool
    is_root: bool
    # Path of fusermount3; empty if it is not installed.
    fusermount: str = ""
    user_allow_other: bool = False
    # Most background requests of mounts of ordinary users; 0: unknown.
    most_background: int = 0
    # The missing Python part of mounts; empty if there is none.
    lacking: str = ""


def gather(_: object) -> KernelFacts:
    device = Path("/dev/fuse")
    usable = "ok" if os.access(device, os.R_OK | os.W_OK) else "denied"
    known = {line.split()[-1] for line in _text(Path("/proc/filesystems")).splitlines() if line.split()}
    fuse_conf = _text(Path("/etc/fuse.conf")).splitlines()
    return KernelFacts(
        release=os.uname().release,
        device=usable if device.exists() else "missing",
        known=sorted(known & {"fuse", "fusectl", "overlay"}),
        has_control=os.path.ismount(_CONNECTIONS),
        may_mount=_has_capability(_text(Path("/proc/self/status")), _SYS_ADMIN),
        is_root=os.geteuid() == 0,
        fusermount=shutil.which("fusermount3") or "",
        user_allow_other=any(line.strip() == "user_allow_other" for line in fuse_conf),
        most_background=int(_text(_PARAMETERS / "max_user_bgreq").strip() or 0),
        lacking=_missing_python_part(),
    )


def findings(facts: KernelFacts) -> Iterator[Finding]:
    yield from _device(facts)
    yield from _features(facts)
    yield _control(facts)
    yield from _overlay(facts)
    yield from _ordinary_user(facts)
    if facts.lacking:
        yield warning(
            "fuse.python",
            facts.lacking,
            "without zero-open, each open is a request to the mount; without pyfuse3, nothing can be mounted here",
            f"with a C compiler, pkg-config and libfuse3-dev: {install_command('mount')}",
        )


def release_version(release: str) -> tuple[int, int]:
    """Return the first two numbers of a release; (0, 0) if there are none."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _device(facts: KernelFacts) -> Iterator[Finding]:
    nothing = "nothing can be mounted here; the daemon, and jobs that read mounts of others, do not need it"
    if facts.device == "missing":
        yield problem(
            "fuse.device",
            "/dev/fuse does not exist",
            nothing,
            "load the module (modprobe fuse), or start the container with --device /dev/fuse",
        )
    elif facts.device == "denied" and facts.is_root:
        yield problem("fuse.device", "/dev/fuse cannot be used", nothing, "give the container device and CAP_SYS_ADMIN")
    elif facts.device == "denied":
        yield note("fuse.device", "this user may not use /dev/fuse", nothing, "as root: chmod 666 /dev/fuse")
    else:
        yield ok("fuse.device", "/dev/fuse can be used")


def _features(facts: KernelFacts) -> Iterator[Finding]:
    now = release_version(facts.release)
    missing = [feature for feature in _FEATURES if now < feature[0]]
    for (major, minor), name, what, consequence in missing:
        yield warning(
            f"kernel.{name}",
            f"Linux {facts.release} has no {what}",
            consequence,
            f"Linux {major}.{minor} or newer has it",
        )
    if not missing:
        yield ok("kernel.version", f"Linux {facts.release}: zero-open, cachestat, FUSE_NOTIFY_RESEND")


def _control(facts: KernelFacts) -> Finding:
    if facts.has_control:
        return ok("fuse.control", "the control files of FUSE connections are there (fusectl)")
    if facts.may_mount and release_version(facts.release) >= (5, 2):
        return ok("fuse.control", "fusectl is not mounted; mounts by root reach it on their own")
    return Finding(
        "fuse.control",
        Level.WARNING if facts.is_root else Level.NOTE,
        "the control files of FUSE connections cannot be reached",
        "a mount of this user that hangs cannot be aborted, and has no shield",
        "as root: mount -t fusectl fusectl /sys/fs/fuse/connections",
    )


def _overlay(facts: KernelFacts) -> Iterator[Finding]:
    if "overlay" in facts.known:
        yield ok("kernel.overlay", "overlayfs is there, for the shield of mounts")
    else:
        yield note(
            "kernel.overlay",
            "overlayfs is not loaded",
            "mounts have a shield only once it is: without one, "
            "open() of Python before 3.14 asks the mount about each file",
            "modprobe overlay",
        )


def _ordinary_user(facts: KernelFacts) -> Iterator[Finding]:
    if facts.is_root:
        return
    if not facts.fusermount:
        yield problem(
            "fuse.fusermount",
            "fusermount3 is not installed",
            "users other than root cannot mount",
            "install the package fuse3",
        )
    elif not facts.user_allow_other:
        yield note(
            "fuse.allow_other",
            "/etc/fuse.conf has no line user_allow_other",
            "a mount of this user is for this user alone",
            "as root: echo user_allow_other >> /etc/fuse.conf",
        )
    if 0 < facts.most_background < _WANTED_BACKGROUND:
        yield note(
            "fuse.background",
            f"mounts of ordinary users may have {facts.most_background} requests of readahead under way",
            "many readers at once wait for each other on such a mount",
            f"as root: echo {_WANTED_BACKGROUND} > {_PARAMETERS}/max_user_bgreq",
        )


def _missing_python_part() -> str:
    from cachefs.mount.zero_open import ZeroOpenUnavailable, load_interposer

    try:
        load_interposer()
        import pyfuse3  # noqa: F401
    except ZeroOpenUnavailable as error:
        return str(error)
    except ImportError as error:
        return f"{error.name or 'pyfuse3'} is not installed for this Python"
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _has_capability(status: str, number: int) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(found and int(found[1], 16) >> number & 1)
