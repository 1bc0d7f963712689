"""Checks lines of /etc/fstab that mount cachefs."""

import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cachefs.errors import CachefsError
from cachefs.formatting import format_count
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import FS_TYPE, SOURCE_PREFIX
from cachefs_tools.doctor.finding import Finding, ok, problem, warning
from cachefs_tools.escaped_names import escape_name

FSTAB: Final = Path("/etc/fstab")
HELPER: Final = Path("/sbin/mount.cachefs")
_TYPE: Final = "cachefs"
_SERVICE: Final = "cachefsd.service"


class FstabFacts(msgspec.Struct, frozen=True):
    """Facts about fstab."""

    # (number, text) of lines that mount cachefs.
    lines: Sequence[tuple[int, str]] = ()
    # Whether mount(8) finds the mount helper.
    has_helper: bool = False
    # Existing directories of these lines.
    directories: Sequence[str] = ()


def gather(path: object) -> FstabFacts:
    """Gather facts. path: of the table."""
    assert isinstance(path, str)
    try:
        text = Path(path).read_text(errors="surrogateescape")
    except OSError:
        return FstabFacts()
    lines = cachefs_lines(text)
    mountpoints = [fields[1] for _, line in lines if len(fields := line.split()) > 1]
    # From the parent directory, since a mount there may hang.
    there = [mountpoint for mountpoint in mountpoints if _name_in_parent(Path(_unescaped(mountpoint)))]
    return FstabFacts(lines, os.access(HELPER, os.X_OK), there)


def cachefs_lines(text: str) -> list[tuple[int, str]]:
    """Return (number, text) of lines that mount cachefs, or seem to."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if line.lstrip().startswith("#") or not fields:
            continue
        if fields[0].startswith(SOURCE_PREFIX) or (len(fields) > 2 and fields[2] in (_TYPE, FS_TYPE)):
            found.append((number, line))
    return found


def findings(facts: FstabFacts, datasets: Collection[str] | None) -> Iterator[Finding]:
    """Yield findings. datasets: names known to the daemon; None: no daemon answers."""
    found = [finding for number, line in facts.lines for finding in _line_findings(number, line, facts, datasets)]
    yield from found
    if facts.lines and not facts.has_helper:
        yield problem(
            "fstab.helper",
            f"/etc/fstab mounts cachefs, and {HELPER} is missing or leads nowhere",
            "mount(8) does not know the type cachefs",
            "as root: cachefs install-mount-helper",
        )
    elif facts.lines and not found:
        yield ok("fstab.lines", f"{format_count(len(facts.lines), 'line')} of /etc/fstab for mounts of cachefs")


def _line_findings(number: int, line: str, facts: FstabFacts, datasets: Collection[str] | None) -> Iterator[Finding]:
    where = f"/etc/fstab, line {number}"
    fields = line.split()
    if not 4 <= len(fields) <= 6:
        yield problem(
            "fstab.syntax",
            f"{where} has {len(fields)} fields",
            "mount -a skips it, or fails at boot",
            "write: cachefs:NAME  DIR  cachefs  defaults,_netdev,nofail  0 0",
        )
        return
    source, directory, kind, option_text = fields[:4]
    if kind != _TYPE:
        yield problem(
            "fstab.type",
            f"{where} has the type {escape_name(kind)}",
            "mount(8) does not find mount.cachefs",
            "write cachefs as the third field",
        )
    yield from _source_findings(where, source, datasets)
    yield from _option_findings(where, option_text)
    if directory not in facts.directories:
        yield problem(
            "fstab.directory",
            f"{where}: {escape_name(directory)} does not exist",
            "nothing is mounted there",
            f"mkdir -p {shlex.quote(escape_name(directory))}",
        )


def _source_findings(where: str, source: str, datasets: Collection[str] | None) -> Iterator[Finding]:
    if not source.startswith(SOURCE_PREFIX):
        yield warning(
            "fstab.source",
            f"{where} names the dataset as {escape_name(source)}",
            "a second `mount -a` fails, and a directory of that name is taken for it",
            f"write {SOURCE_PREFIX}{escape_name(source)}",
        )
    if datasets is None:
        return
    for part in MountSpec.parse(_unescaped(source)).datasets:
        if "://" not in part.name and part.name not in datasets:
            yield problem(
                "fstab.dataset",
                f"{where} names dataset {escape_name(part.name)}, which the daemon does not have",
                "the mount fails",
                f"cachectl dataset add {shlex.quote(escape_name(part.name))} URL",
            )


def _option_findings(where: str, option_text: str) -> Iterator[Finding]:
    options = option_text.split(",")
    if "_netdev" not in options:
        yield warning(
            "fstab.netdev",
            f"{where} lacks the option _netdev",
            "it is mounted before the network is there, and unmounted too late",
            "add _netdev",
        )
    if "nofail" not in options and "noauto" not in options:
        yield warning(
            "fstab.nofail",
            f"{where} lacks the option nofail",
            "where the mount fails, the machine does not finish its start",
            "add nofail",
        )
    units = [option for option in options if option.startswith(("x-systemd.after=", "x-systemd.requires="))]
    if any(option.startswith("x-systemd.requires=") and _SERVICE in option for option in units):
        yield warning(
            "fstab.requires",
            f"{where} has x-systemd.requires={_SERVICE}",
            "systemctl restart cachefsd unmounts it under running jobs",
            f"write x-systemd.after={_SERVICE}",
        )
    elif not any(_SERVICE in option for option in units):
        yield warning(
            "fstab.after",
            f"{where} does not name {_SERVICE}",
            "at boot it may be mounted before the daemon is ready, and fails after daemon_wait",
            f"add x-systemd.after={_SERVICE}",
        )
    try:
        from cachefs.mount.options import parse_options

        parse_options((_unescaped(option_text),))
    except CachefsError as error:
        yield problem("fstab.options", f"{where}: {error}", "the mount fails", "correct the option")


def _name_in_parent(path: Path) -> bool:
    try:
        return path == Path("/") or path.name in os.listdir(path.parent)
    except OSError:
        return False


def _unescaped(field: str) -> str:
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
