"""Options of `mount.cachefs ... -o a,b=c`, as written by a user, mount(8) and fstab."""

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from cachefs.errors import ConfigError
from cachefs.sizes import parse_share
from cachefs.socket_path import socket_path

# Options that mount(8) adds or interprets itself. A cachefs mount is read-only in any case.
_GENERIC = {"defaults", "rw", "ro", "auto", "noauto", "user", "nouser", "users", "_netdev", "nofail", "async", "sync"}
_TIMES = {"atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime", "strictatime", "lazytime"}
IGNORED: Final = frozenset(_GENERIC | _TIMES)
# Options that are passed on to the kernel.
KERNEL_FLAGS: Final = frozenset(["dev", "nodev", "suid", "nosuid", "exec", "noexec"])
# Most workers of a mount.
MAX_WORKERS: Final = 64
# The largest 32-bit number would mean "none" to chown(2).
_MAX_ID: Final = (1 << 32) - 2


class ShieldChoice(StrEnum):
    """Whether a mount gets a shield (cachefs.mount.shield)."""

    AUTO = "auto"  # where possible
    ON = "on"  # the mount fails where a shield is not possible
    OFF = "off"


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options of one mount."""

    # Path of the daemon's socket.
    socket: Path
    # Owner of every file and directory of the mount.
    uid: int
    gid: int
    # Bits removed from the modes 0644 and 0755.
    umask: int = 0
    # True to let other users in; the default is True where root mounts.
    allow_other: bool = False
    # True to let the kernel open files by itself.
    zero_open: bool = True
    # The kernel's readahead for the mount, in KiB; 0 leaves the kernel's default.
    readahead: int = 1024
    # Seconds to wait for a daemon that has not started yet.
    daemon_wait: float = 10.0
    # Seconds that a mount waits after a signal to end for programs that use it.
    grace: float = 30.0
    # File for messages; None: syslog.
    log: Path | None = None
    # Processes that serve requests; 0: by the number of processors.
    workers: int = 0
    # True to fill the page cache ahead of readers whose order is known.
    push: bool = True
    # Most memory of pushed pages: a size, or a share of the memory available at the start.
    page_cache_budget: str = "25%"
    # Whether the kernel answers ioctls in place of the mount.
    shield: ShieldChoice = ShieldChoice.AUTO
    # True to show the new snapshot after a refresh, where one dataset is mounted.
    follow: bool = False
    # True to keep extended attributes (`user.cachefs.*`) in the tree.
    xattr: bool = False
    # Flags that are passed on to the kernel.
    kernel: tuple[str, ...] = ()


def _octal(text: str) -> int:
    value = int(text, 8)
    if not 0 <= value <= 0o777:
        raise ValueError
    return value


def _natural_number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _number_up_to(most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = _natural_number(text)
        if value > most:
            raise ValueError
        return value

    return convert


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 86400:
        raise ValueError
    return value


def _amount(text: str) -> str:
    parse_share(text)
    return text


VALUES: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "socket": (Path, "a path"),
    "uid": (_number_up_to(_MAX_ID), "a user number"),
    "gid": (_number_up_to(_MAX_ID), "a group number"),
    "umask": (_octal, "an octal mode such as 022"),
    "readahead": (_natural_number, "a number of KiB"),
    "daemon_wait": (_seconds, "a number of seconds"),
    "grace": (_seconds, "a number of seconds"),
    "log": (Path, "a path"),
    "workers": (_number_up_to(MAX_WORKERS), f"a number up to {MAX_WORKERS}, 0 for a choice by processors"),
    "page_cache_budget": (_amount, "a size such as 8GiB, or a share such as 25%"),
    "shield": (ShieldChoice, "auto, on or off"),
}
SWITCHES: Final[dict[str, tuple[str, bool]]] = {
    "allow_other": ("allow_other", True),
    "noallow_other": ("allow_other", False),
    "zero_open": ("zero_open", True),
    "no_zero_open": ("zero_open", False),
    "push": ("push", True),
    "no_push": ("push", False),
    "follow": ("follow", True),
    "nofollow": ("follow", False),
    "xattr": ("xattr", True),
    "noxattr": ("xattr", False),
}


def parse_options(texts: tuple[str, ...]) -> MountOptions:
    """Return the options of all `-o` arguments; a later one overrides an earlier one.

    Raises ConfigError that names the option and what it takes.
    """
    root = os.geteuid() == 0
    found: dict[str, Any] = {"uid": os.getuid(), "gid": os.getgid(), "allow_other": root, "socket": socket_path()}
    kernel = ["nosuid", "nodev"] if root else []
    for option in (part for text in texts for part in text.split(",") if part):
        name, given, value = option.partition("=")
        if name in VALUES and given:
            convert, takes = VALUES[name]
            try:
                found[name] = convert(value)
            except ValueError:
                raise ConfigError(f"mount option {name}={value}: it takes {takes}") from None
        elif option in SWITCHES:
            field, setting = SWITCHES[option]
            found[field] = setting
        elif option in KERNEL_FLAGS:
            opposite = option.removeprefix("no") if option.startswith("no") else f"no{option}"
            kernel = [flag for flag in kernel if flag not in (option, opposite)] + [option]
        elif option not in IGNORED and not option.startswith(("x-", "comment=")):
            known = [*VALUES, *SWITCHES]
            like = difflib.get_close_matches(name, known, 1)
            takes = f"did you mean {like[0]!r}?" if like else f"known are {', '.join(known)}"
            if name in VALUES:
                takes = f"it takes {VALUES[name][1]}"
            raise ConfigError(f"mount option {option!r} is not understood; {takes}")
    # Absolute, since a background mount process changes to /.
    for name in ("socket", "log"):
        if name in found:
            found[name] = found[name].absolute()
    return MountOptions(**found, kernel=tuple(kernel))
