"""cachectl warmup, warmups, evict, pin, unpin, ls and verify: the part of a dataset on this node."""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import BinaryIO

import click
from rich.table import Table

from cachefs.block import TIER_NAMES
from cachefs.errors import ConfigError
from cachefs.formatting import format_count
from cachefs.messages import (
    CachedFile,
    DirectoryEntry,
    DirectoryPath,
    Empty,
    EvictForecast,
    PinnedAmount,
    Selection,
    TierStatus,
    WarmupForecast,
    WarmupId,
    WarmupProgress,
    WarmupRequest,
)  # fmt: skip
from cachefs.rpc import (
    CACHED,
    DIRECTORY_LIST,
    EVICT,
    EVICT_FORECAST,
    PIN,
    STATUS,
    UNPIN,
    VERIFY,
    WARMUP,
    WARMUP_CANCEL,
    WARMUP_FORECAST,
    WARMUP_LIST,
    WARMUP_WATCH,
    Method,
)
from cachefs_tools.cachectl import completion
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus, with_session
from cachefs_tools.cachectl.display import share, size, table
from cachefs_tools.cachectl.progress import holds_lines, show_verification, show_warmup
from cachefs_tools.escaped_names import escape_name

# Deadline in seconds for counting a large dataset.
FORECAST_SECONDS = 600.0
NO_CLUSTER_WARMUPS = "the daemon's release has no warmups of the cluster; update it, or leave out --cluster"


def dataset_path(text: str | bytes) -> bytes:
    """Return a path in a dataset: relative, without empty components and `.`; b"" is the root."""
    return b"/".join(part for part in os.fsencode(text).split(b"/") if part not in (b"", b"."))


def selected_paths(paths: Iterable[str | bytes]) -> list[bytes]:
    """Return the paths of a request. [] means everything: no path was given, or the root is among them."""
    wanted = [dataset_path(path) for path in paths]
    return [] if b"" in wanted else wanted


def parse_fraction(ctx: click.Context, param: click.Parameter, text: str) -> float:
    """Parse an option such as 0.3 or 30%. Raises click.BadParameter unless it is in (0, 1]."""
    try:
        number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        number = -1
    if not 0 < number <= 1:
        raise click.BadParameter(f"{text!r} is neither a number above 0 up to 1 nor a percentage like 25%")
    return number


def parse_time(ctx: click.Context, param: click.Parameter, text: str | None) -> float:
    """Parse an option such as 23:30, 2026-12-24 18:00 or +2h, in local time. Returns Unix seconds; 0 without a value.

    Raises click.BadParameter.
    """
    if not text:
        return 0.0
    now = datetime.now()  # local times are meant
    if after := re.fullmatch(r"\+(\d{1,9})([smhd])", text):
        return time.time() + int(after[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[after[2]]
    if of_day := re.fullmatch(r"(\d{1,2}):(\d{2})", text):
        try:
            when = now.replace(hour=int(of_day[1]), minute=int(of_day[2]), second=0, microsecond=0)
        except ValueError:
            when = None
        if when is not None:
            return (when if when > now else when + timedelta(days=1)).timestamp()
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            f"{text!r} is neither a time like 23:30 or 2026-12-24 18:00, nor a delay like +30m, +2h or +1d"
        ) from None


@click.command()
@click.argument("dataset", shell_complete=completion.datasets)
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=completion.paths)
@click.option(
    "--fraction",
    default="1",
    callback=parse_fraction,
    help="Fetch only the first part of the files, such as 0.3 or 30%.",
)
@click.option(
    "--path", "more_paths", multiple=True, metavar="PATH", help="The same as PATH. May be given several times."
)
@click.option("--list", "list_file", type=click.File("rb"), help="Read PATHs from a file, one per line; - is stdin.")
@click.option("-0", "--null", is_flag=True, help="The paths in --list end with NUL instead of a newline.")
@click.option("-n", "--dry-run", is_flag=True, help="Only print what would be fetched.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return when all is done, or at once.")
@click.option("--cluster", is_flag=True, help="Have each node of the cluster bring the blocks that it keeps.")
@click.option(
    "--at", metavar="TIME", callback=parse_time,
    help="With --cluster: begin then. TIME is HH:MM, YYYY-MM-DD HH:MM, or +30m, +2h, +1d from now.",
)  # fmt: skip
@click.option(
    "--before", metavar="JOB", default="",
    help="With --cluster: begin as soon as this job has published what it reads, and follow its order.",
)  # fmt: skip
@with_session
def warmup(  # noqa: PLR0913  # one for each option
    session: CommandSession, dataset: str, paths: tuple[str, ...], more_paths: tuple[str, ...], fraction: float,
    list_file: BinaryIO | None, null: bool, dry_run: bool, wait: bool, cluster: bool, at: float, before: str,
) -> None:  # fmt: skip
    """Bring files onto a node or its cluster before they are read.

    With PATHs, only the files at or below them are brought. PATHs are relative to the dataset, as `ls` shows them. Of a
    list, those that are not there are left out and counted, and the exit status is 4. With --cluster, the warmup goes
    on if this command is interrupted, and after restarts; `cachectl warmups --cancel` ends it, on any node.
    """
    if (at or before) and not cluster:
        raise click.UsageError("--at and --before need --cluster")
    if at and before:
        raise click.UsageError("--at and --before exclude each other")
    paths += more_paths
    wanted = split_paths(list_file.read(), b"\0" if null else b"\n") if list_file else []
    if list_file and not wanted and not paths:
        raise click.BadParameter("the list names no path", param_hint="--list")
    selected = selected_paths([*paths, *wanted])
    request = WarmupRequest(
        dataset=dataset, paths=selected, fraction=fraction, wait=wait, leave_out_missing=bool(wanted),
        cluster=cluster, at=at, before=before,
    )  # fmt: skip
    if dry_run:
        forecast = session.call(WARMUP_FORECAST, request, FORECAST_SECONDS)
        if cluster and forecast.holds < 0:
            raise ConfigError(NO_CLUSTER_WARMUPS)
        session.print_result(forecast, *warmup_forecast_lines(dataset, forecast))
        return
    last = show_warmup(session, check_support(session.stream(WARMUP, request), request))
    has_ended = last.state not in ("waiting", "running")
    session.print_result(last, finished_text(session, last) if has_ended else begun_text(last))
    if last.missing or (has_ended and is_incomplete(last)):
        sys.exit(ExitStatus.INCOMPLETE)


def check_support(updates: Iterator[WarmupProgress], request: WarmupRequest) -> Iterator[WarmupProgress]:
    """Pass updates on. Raises ConfigError where the daemon's release would warm this node alone: it stops then."""
    for update in updates:
        if request.cluster and not update.cluster:
            raise ConfigError(NO_CLUSTER_WARMUPS)
        yield update


def is_incomplete(last: WarmupProgress) -> bool:
    """Return whether an ended warmup lacks something."""
    return bool(last.missing or last.failed or last.skipped or last.state == "failed")


def split_paths(text: bytes, end: bytes) -> list[bytes]:
    r"""Return the paths of a list, each ended by *end*. If all lines end with \r\n, the \r is removed."""
    paths = [path for path in text.split(end) if path]
    if end == b"\n" and all(path.endswith(b"\r") for path in paths):
        paths = [path.removesuffix(b"\r") for path in paths]
    return [path for path in paths if path]


def missing_lines(last: WarmupProgress) -> list[str]:
    """Return the line about listed paths that are not in the dataset."""
    if not last.missing:
        return []
    return [f"{last.missing:,} of the paths are not in the dataset, the first is {escape_name(last.first_missing)}"]


def warmup_forecast_lines(dataset: str, forecast: WarmupForecast) -> list[str | Table]:
    """Return the lines of `warmup --dry-run`."""
    wanted, here = forecast.wanted, forecast.here
    if forecast.nodes:
        whole = sum(one.bytes for one in forecast.nodes)
        rows = ((escape_name(one.name), size(one.bytes), size(one.capacity), size(one.holds)) for one in forecast.nodes)
        what = f"{format_count(wanted.blocks, 'block')}, {size(wanted.bytes)}, of {format_count(wanted.files, 'file')}"
        return [
            f"{escape_name(dataset)}: would have {format_count(len(forecast.nodes), 'node')} keep {what}",
            *holds_lines(forecast.holds, whole),
            "",
            table("NODE >PART >ROOM >HOLDS", rows),
        ]
    blocks, missing = wanted.blocks - here.blocks, wanted.bytes - here.bytes
    lines: list[str | Table] = [
        f"{escape_name(dataset)}: would fetch {format_count(max(0, blocks), 'block')}, {size(max(0, missing))}, of "
        f"{format_count(wanted.files, 'file')}",
        f"here already: {format_count(here.blocks, 'block')}, {size(here.bytes)}; "
        f"{format_count(here.files, 'whole file')}",
    ]
    if missing > forecast.free:
        lines.append(f"the tiers have {size(forecast.free)} free: others are evicted for the rest, or it is not cached")
    return lines


def begun_text(first: WarmupProgress) -> str:
    """Return the answer to a warmup in the background."""
    what = f"{format_count(first.blocks_total, 'block')}, {size(first.bytes_total)}"
    if first.cluster:
        doing = f"is to be warmed: {what}" if first.state == "waiting" else f"is being warmed: {what}"
        text = f"{escape_name(first.dataset)} {doing}, on all nodes as warmup {first.id}; see `cachectl warmups`"
        reason = [escape_name(first.reason)] if first.reason else []
        return "\n".join([text, *reason, *holds_lines(first.holds, first.bytes_total), *missing_lines(first)])
    text = (
        f"warming {escape_name(first.dataset)}: {what}, in the background as warmup {first.id}; see `cachectl warmups`"
    )
    return "\n".join([text, *missing_lines(first)])


def finished_text(session: CommandSession, last: WarmupProgress) -> str:
    """Return the result of a warmup from its last progress message. Queries the tiers if blocks had no room."""
    is_local = last.skipped and not last.cluster and not session.as_json
    return warmup_text(last, session.call(STATUS, Empty()).tiers if is_local else ())


def warmup_text(last: WarmupProgress, tiers: Sequence[TierStatus] = ()) -> str:
    """Return the result of a warmup from its last progress message. tiers: of the node."""
    ending = "incomplete" if last.state == "done" and (last.skipped or last.missing) else last.state
    where = "on all nodes" if last.cluster else "here"
    here = f"{last.blocks:,} of {last.blocks_total:,} blocks {where}"
    lines = [f"{escape_name(last.dataset)}: {here}, {size(last.bytes)} ({ending})", *missing_lines(last)]
    if last.skipped:
        skipped, room = format_count(last.skipped, "block"), "enlarge a tier's budget"
        # On a full disk the budget is not the limit: a larger one would make no room.
        full = [
            f"only {size(max(0, one.limit))} of the {one.name} tier's budget of {size(one.budget)} can be used: make "
            f"room on what {escape_name(one.directory)} is on"
            for one in tiers
            if one.is_cut_short
        ]
        lines.append(f"{skipped} found no room: {'; '.join(full) or room}, or warm less (--fraction)")
    if last.failed:
        lines.append(f"{format_count(last.failed, 'block')} could not be fetched: see `cachectl errors`")
    if last.message:
        lines.append(last.message)
    return "\n".join(lines)


@click.command()
@click.argument("dataset", shell_complete=completion.datasets)
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=completion.paths)
@click.option("-y", "--yes", is_flag=True, help="Do not ask before everything is freed.")
@click.option("-n", "--dry-run", is_flag=True, help="Only print what would be freed.")
@with_session
def evict(session: CommandSession, dataset: str, paths: tuple[str, ...], yes: bool, dry_run: bool) -> None:
    """Free what is cached of a dataset.

    With PATHs, only the files at or below them are freed.
    """
    wanted = selected_paths(paths)
    if dry_run or (not wanted and not yes):
        forecast = session.call(EVICT_FORECAST, Selection(dataset=dataset, paths=wanted), FORECAST_SECONDS)
        if dry_run:
            session.print_result(forecast, f"{escape_name(dataset)}: would free {freed_text(forecast)}")
            return
        session.confirm(f"this frees all of {dataset} on this node: {freed_text(forecast)}", yes)
    freed = session.call(EVICT, Selection(dataset=dataset, paths=wanted))
    session.print_result(freed, f"freed {format_count(freed.blocks, 'block')}, {size(freed.bytes)}")


def freed_text(forecast: EvictForecast) -> str:
    """Return a description of what an eviction would free."""
    here, pinned = forecast.here, forecast.pinned
    text = (
        f"{format_count(here.blocks, 'block')}, {size(here.bytes)}, among them {format_count(here.files, 'whole file')}"
    )
    return f"{text}; pinned: {format_count(pinned.blocks, 'block')}, {size(pinned.bytes)}" if pinned.blocks else text


@click.command()
@click.argument("dataset", shell_complete=completion.datasets)
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=completion.paths)
@with_session
def pin(session: CommandSession, dataset: str, paths: tuple[str, ...]) -> None:
    """Keep files from being evicted when room is needed.

    Pinning does not fetch them: see warmup.
    """
    change_pins(session, PIN, "pinned", dataset, paths)


@click.command()
@click.argument("dataset", shell_complete=completion.datasets)
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=completion.paths)
@with_session
def unpin(session: CommandSession, dataset: str, paths: tuple[str, ...]) -> None:
    """Undo pin: the files may be evicted again."""
    change_pins(session, UNPIN, "unpinned", dataset, paths)


def change_pins(
    session: CommandSession, method: Method[Selection, PinnedAmount], done: str, dataset: str, paths: tuple[str, ...]
) -> None:
    """Pin or unpin. done: the past participle for the answer."""
    reply = session.call(method, Selection(dataset=dataset, paths=selected_paths(paths)))
    session.print_result(reply, f"{done} {format_count(reply.files, 'file')}, {size(reply.bytes)}")


@click.command()
@click.argument("dataset", shell_complete=completion.datasets)
@click.argument("path", default="", shell_complete=completion.paths)
@click.option(
    "--cached", is_flag=True, help="List all files at or below PATH that are cached, in part or whole, or pinned."
)
@with_session
def ls(session: CommandSession, dataset: str, path: str, cached: bool) -> None:
    """List the files of a dataset.

    Without --cached these are the entries of the directory PATH in the snapshot.
    """
    if cached:
        pages = session.stream(CACHED, Selection(dataset=dataset, paths=selected_paths([path])))
        here = ([file for file in page.files if any(file.cached) or file.pinned] for page in pages)
        session.print_pages("files", here, "PATH >SIZE >MEMORY >SSD =PINNED?", cached_row)
        return
    listed = session.stream(DIRECTORY_LIST, DirectoryPath(dataset=dataset, path=dataset_path(path)))
    session.print_pages("entries", (page.entries for page in listed), "NAME >SIZE", entry_row)


def entry_row(entry: DirectoryEntry) -> tuple[str, ...]:
    """Return a row of `ls`."""
    return (escape_name(entry.name) + "/", "") if entry.directory else (escape_name(entry.name), size(entry.size))


def cached_row(file: CachedFile) -> tuple[str, ...]:
    """Return a row of `ls --cached`."""
    memory, ssd = (size(file.cached[TIER_NAMES.index(tier)]) for tier in ("memory", "ssd"))
    return escape_name(file.path), size(file.size), memory, ssd, "yes" if file.pinned else ""


@click.command()
@with_session
def verify(session: CommandSession) -> None:
    """Read every cached byte again and drop damaged blocks.

    A block that was dropped is fetched again when it is read.
    """
    last = show_verification(session, session.stream(VERIFY, Empty()))
    text = (
        f"verified {format_count(last.blocks, 'block')}, {size(last.bytes)}; {last.repaired:,} were damaged and dropped"
    )
    session.print_result(last, text)
    if last.repaired:
        sys.exit(ExitStatus.INCOMPLETE)


@click.command()
@click.option("--watch", type=int, metavar="ID", help="Show the progress of one until it ends. Ctrl-C leaves it alone.")
@click.option("--cancel", type=int, metavar="ID", help="End one. What has come stays.")
@with_session
def warmups(session: CommandSession, watch: int | None, cancel: int | None) -> None:
    """Show the warmups that run, and the last that have ended."""
    if watch is not None and cancel is not None:
        raise click.UsageError("--watch and --cancel exclude each other")
    if watch is not None:
        last = show_warmup(session, session.stream(WARMUP_WATCH, WarmupId(id=watch)), watched=True)
        session.print_result(last, finished_text(session, last))
        if is_incomplete(last):
            sys.exit(ExitStatus.INCOMPLETE)
    elif cancel is not None:
        last = session.call(WARMUP_CANCEL, WarmupId(id=cancel))
        session.print_result(last, finished_text(session, last))
    else:
        found = session.call(WARMUP_LIST, Empty())
        rows = table("=ID DATASET =STATE =NODES?? >HERE? >OF >SHARE >SKIPPED?? >FAILED??", map(_row, found.warmups))
        session.print_result(found, rows, *reason_lines(found.warmups))


def reason_lines(warmups: Iterable[WarmupProgress]) -> Iterator[str]:
    """Yield a line for each warmup that waits, or that a node holds up."""
    for one in warmups:
        text = one.reason or (one.message if one.cluster else "")
        if text:
            yield f"warmup {one.id}: {escape_name(text)}"


def _row(one: WarmupProgress) -> tuple[object, ...]:
    return (
        one.id, escape_name(one.dataset), one.state, "all" if one.cluster else "this one", size(one.bytes),
        size(one.bytes_total), share(one.bytes, one.bytes_total), f"{one.skipped:,}", f"{one.failed:,}",
    )  # fmt: skip
