"""Options of `mount.cachefs ... -o a,b=c`, as written by a user, mount(8) and fstab.

An option is one field of `MountOptions`. The field's annotation has the parser, and the texts of `mount.cachefs --help`
and docs/configuration.md (docs/site/generated.py makes the table there).
"""

import difflib
import os
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

from cachefs.errors import ConfigError
from cachefs.sizes import parse_share
from cachefs.socket_path import socket_path

# Options that mount(8) adds or interprets itself. A cachefs mount is read-only in any case.
_GENERIC = {"defaults", "rw", "ro", "auto", "noauto", "user", "nouser", "users", "_netdev", "nofail", "async", "sync"}
_TIMES = {"atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime", "strictatime", "lazytime"}
IGNORED: Final = frozenset(_GENERIC | _TIMES)
# Options that are passed on to the kernel.
KERNEL_FLAGS: Final = ("dev", "nodev", "suid", "nosuid", "exec", "noexec")
# Most workers of a mount.
MAX_WORKERS: Final = 64
# The largest 32-bit number would mean "none" to chown(2).
_MAX_ID: Final = (1 << 32) - 2


class ShieldChoice(StrEnum):
    """Whether a mount gets a shield (cachefs.mount.shield)."""

    AUTO = "auto"  # where possible
    ON = "on"  # the mount fails where a shield is not possible
    OFF = "off"


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


# Each method that a dataclass generates takes 0.1 ms of the start of a mount, hence eq=False, repr=False below.
@dataclass(eq=False, repr=False)
class _Texts:
    """The texts of an option for users."""

    help: str
    # Sentences that follow `help` in docs/configuration.md: Markdown.
    details: str = field(default="", kw_only=True)
    # The default in words, where the field's default does not say it: Markdown.
    default: str = field(default="", kw_only=True)


@dataclass(eq=False, repr=False)
class ValueOption(_Texts):
    """An option with a value: NAME=VALUE."""

    # The value in the help.
    placeholder: str
    # Raises ValueError.
    parse: Callable[[str], Any]
    # The values that it takes, for errors.
    takes: str

    def spellings(self, name: str) -> tuple[str, ...]:
        """Return the ways to write the option."""
        return (f"{name}={self.placeholder}",)


@dataclass(eq=False, repr=False)
class SwitchOption(_Texts):
    """An option without a value."""

    # The option that turns it off.
    off: str

    def spellings(self, name: str) -> tuple[str, ...]:
        """Return the ways to write the option."""
        return (name, self.off)


@dataclass(eq=False, repr=False)
class FlagsOption(_Texts):
    """Options that are passed on as they are."""

    flags: tuple[str, ...]

    def spellings(self, _: str) -> tuple[str, ...]:
        """Return the ways to write the options."""
        return self.flags


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options of one mount."""

    socket: Annotated[
        Path,
        ValueOption(
            "the daemon's socket",
            "PATH",
            Path,
            "a path",
            default="`$CACHEFS_SOCKET`, else `/run/cachefs/cachefsd.sock`",
        ),
    ]
    uid: Annotated[
        int,
        ValueOption("owner of everything", "N", _number_up_to(_MAX_ID), "a user number", default="the mounting user"),
    ]
    gid: Annotated[
        int,
        ValueOption(
            "group of everything", "N", _number_up_to(_MAX_ID), "a group number", default="the mounting user's"
        ),
    ]
    umask: Annotated[
        int,
        ValueOption(
            "subtracted from modes 0644 and 0755", "OCTAL", _octal, "an octal mode such as 022",
            details="The kernel enforces modes if the umask takes away a right to read or execute. `umask=222` gives "
            "the modes 0444 and 0555, and closes the [control file](publishing.md#from-any-language) to ordinary users",
        ),
    ] = 0  # fmt: skip
    allow_other: Annotated[
        bool,
        SwitchOption(
            "whether other users may read", "noallow_other", default="`allow_other` where root mounts",
            details="For other than root it needs `user_allow_other` in `/etc/fuse.conf`",
        ),
    ] = False  # fmt: skip
    zero_open: Annotated[
        bool,
        SwitchOption(
            "let the kernel open files by itself; else each open and close is a request to the mount process, which is "
            "slower", "no_zero_open",
        ),
    ] = True  # fmt: skip
    # Whether the mount gets a shield (cachefs.mount.shield).
    shield: Annotated[
        ShieldChoice,
        ValueOption(
            "whether the kernel answers ioctls, which Python's open() sends, in place of the mount; auto: where root "
            "mounts one dataset",
            "auto|on|off", ShieldChoice, "auto, on or off",
            details="`auto` needs Linux 6.5; `on` refuses to mount if not; `off` is "
            "faster if all readers are programs in C or C++, Python 3.14 and newer, or jobs of `cachefs run`. See [the "
            "shield](posix.md#the-shield)",
        ),
    ] = ShieldChoice.AUTO  # fmt: skip
    readahead: Annotated[
        int,
        ValueOption(
            "the kernel's readahead for this mount; 0 leaves the kernel's default",
            "KIB", _natural_number, "a number of KiB", details="Setting it needs root",
        ),
    ] = 1024  # fmt: skip
    workers: Annotated[
        int,
        ValueOption(
            "processes that serve requests", "N", _number_up_to(MAX_WORKERS),
            f"a number up to {MAX_WORKERS}, 0 for a choice by processors",
            default="1; with 4 processors or more one per 4 and one more, 4 at most",
            details="Each answers 6,000 to 14,000 cold files per second; with zero-open only",
        ),
    ] = 0  # fmt: skip
    follow: Annotated[
        bool,
        SwitchOption(
            "with one dataset: show the new snapshot after a refresh, as the SPEC NAME@latest does; open files keep "
            "what they have, and there is no shield", "nofollow",
            details="See [mounts that follow refreshes](user-guide.md#mounts-that-follow-refreshes)",
        ),
    ] = False  # fmt: skip
    push: Annotated[
        bool,
        SwitchOption(
            "fill the page cache ahead of readers whose order is published", "no_push",
            details="With `no_push` the mount only finds out which pages the page cache has, so that their blocks are "
            "not fetched",
        ),
    ] = True  # fmt: skip
    page_cache_budget: Annotated[
        str,
        ValueOption(
            "how much of the page cache pushed pages may take: a size, or a share of the memory that is available at "
            "the start, in the control group if that has a limit",
            "AMOUNT", _amount, "a size such as 8GiB, or a share such as 25%",
            details="Pages of blocks that no tier of the node has do not count, since only the kernel decides on them. "
            "A tenth of all memory is always left alone: the budget shrinks when less than the budget and this tenth "
            "is available, and grows back by a fiftieth a second",
        ),
    ] = "25%"  # fmt: skip
    xattr: Annotated[
        bool,
        SwitchOption(
            "give files extended attributes (user.cachefs.*), as `cachectl info PATH` tells them; `ls -l` and `cp -a` "
            "then ask the mount for each file",
            "noxattr", details="See [their names](posix.md#extended-attributes)",
        ),
    ] = False  # fmt: skip
    grace: Annotated[
        float,
        ValueOption(
            "how long a mount process that gets SIGTERM waits for programs that use the mount; then its files fail "
            "with ENOTCONN", "SECONDS", _seconds, "a number of seconds",
            details="Up to 10 s more if no such program was seen: see [the end of a "
            "mount](posix.md#the-end-of-a-mount)",
        ),
    ] = 30.0  # fmt: skip
    daemon_wait: Annotated[
        float,
        ValueOption(
            "how long to wait for a daemon that is not up yet", "SECONDS", _seconds, "a number of seconds"
        ),
    ] = 10.0  # fmt: skip
    log: Annotated[
        Path | None,
        ValueOption(
            "messages of the mount process in the background", "FILE", Path, "a path", default="syslog"
        ),
    ] = None  # fmt: skip
    kernel: Annotated[
        tuple[str, ...],
        FlagsOption("passed to the kernel", KERNEL_FLAGS, default="`nosuid,nodev` where root mounts"),
    ] = ()  # fmt: skip


@dataclass(eq=False, repr=False)
class OptionHelp:
    """One option as a user sees it."""

    # The ways to write it.
    spellings: tuple[str, ...]
    # In words: Markdown.
    default: str
    help: str
    # Sentences that follow `help` in docs/configuration.md: Markdown.
    details: str


def option_helps() -> Iterator[OptionHelp]:
    """Yield all options, in the order of `MountOptions`."""
    for one in fields(MountOptions):
        option = _option(one)
        default = option.default or _default_in_words(one, option)
        yield OptionHelp(option.spellings(one.name), default, option.help, option.details)


def _default_in_words(one: "Field[Any]", option: ValueOption | SwitchOption | FlagsOption) -> str:
    if isinstance(option, SwitchOption):
        return f"`{one.name if one.default else option.off}`"
    return f"`{one.default}`" if isinstance(one.default, str) else f"{one.default:g}"


def _option(one: "Field[Any]") -> ValueOption | SwitchOption | FlagsOption:
    annotation: Any = one.type
    option: ValueOption | SwitchOption | FlagsOption = annotation.__metadata__[0]
    return option


_OPTIONS: Final = {one.name: _option(one) for one in fields(MountOptions)}
_VALUES: Final = {name: option for name, option in _OPTIONS.items() if isinstance(option, ValueOption)}
_SWITCHES: Final = {
    spelling: (name, spelling == name)
    for name, option in _OPTIONS.items()
    if isinstance(option, SwitchOption)
    for spelling in (name, option.off)
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
        if name in _VALUES and given:
            try:
                found[name] = _VALUES[name].parse(value)
            except ValueError:
                raise ConfigError(f"mount option {name}={value}: it takes {_VALUES[name].takes}") from None
        elif option in _SWITCHES:
            switch, is_on = _SWITCHES[option]
            found[switch] = is_on
        elif option in KERNEL_FLAGS:
            opposite = option.removeprefix("no") if option.startswith("no") else f"no{option}"
            kernel = [flag for flag in kernel if flag not in (option, opposite)] + [option]
        elif option not in IGNORED and not option.startswith(("x-", "comment=")):
            known = [*_VALUES, *_SWITCHES]
            like = difflib.get_close_matches(name, known, 1)
            takes = f"did you mean {like[0]!r}?" if like else f"known are {', '.join(known)}"
            if name in _VALUES:
                takes = f"it takes {_VALUES[name].takes}"
            raise ConfigError(f"mount option {option!r} is not understood; {takes}")
    # Absolute, since a background mount process changes to /.
    for name in ("socket", "log"):
        if name in found:
            found[name] = found[name].absolute()
    return MountOptions(**found, kernel=tuple(kernel))
