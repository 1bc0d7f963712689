"""cachectl status, mounts, errors, reload and log-level: the state of the daemon, with `--watch`, and its settings."""

import contextlib
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NoReturn

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table

from cachefs.errors import DaemonUnavailable
from cachefs.formatting import format_count, format_duration
from cachefs.messages import Empty, EndpointStatus, LogLevel, MountView, PeerCounts, Status, TierStatus
from cachefs.mount_spec import MountSpec
from cachefs.rpc import LOG_LEVEL, RELOAD, STATUS
from cachefs.trouble_texts import describe_trouble
from cachefs_tools.cachectl.cluster import cluster_facts
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus, print_lines, to_json_types, with_session
from cachefs_tools.cachectl.display import labelled_lines, share, size, table
from cachefs_tools.escaped_names import escape_name

# Seconds between answers.
DEFAULT_SECONDS: Final = 2.0
# Deadline in seconds of an answer.
CALL_SECONDS: Final = 10.0
TERMINATED: Final = 128 + signal.SIGTERM

# Document for --json, and lines for people.
CommandOutput = tuple[object, Iterable[RenderableType]]

watch_option = click.option(
    "--watch",
    "seconds",
    metavar="[SECONDS]",
    is_flag=False,
    flag_value=str(DEFAULT_SECONDS),
    type=click.FloatRange(min=0.1),
    help=f"Repeat every SECONDS seconds, until Ctrl-C.  [default: {DEFAULT_SECONDS:.0f}]",
)


def watch_output(session: CommandSession, seconds: float, fetch: Callable[[], CommandOutput]) -> NoReturn:
    """Show the result of *fetch* every *seconds*. Continues while no daemon answers, and says so.

    On a terminal each answer replaces the previous one; elsewhere they follow each other, with --json one per line.
    Raises KeyboardInterrupt at the end, and CachefsError if the daemon refuses.
    """
    with _screen(session) as put:
        begun = time.monotonic()
        while True:
            try:
                put(*fetch())
            except DaemonUnavailable as error:
                put({"error": type(error).__name__, "message": str(error)}, [f"{error}; trying again"])
            # If an answer takes long, a pause precedes the next one.
            begun = max(begun + seconds, time.monotonic() - seconds)
            time.sleep(max(0.05, begun - time.monotonic()))


@contextlib.contextmanager
def _screen(session: CommandSession) -> Iterator[Callable[[object, Iterable[RenderableType]], None]]:
    """Yield a function that shows an answer."""
    if session.as_json:
        yield lambda document, _: click.echo(json.dumps(to_json_types(document)))
        return
    if not sys.stdout.isatty():
        yield lambda _, lines: print_lines([*lines, ""])
        return
    console = Console(highlight=False, markup=False, emoji=False)
    with _ends_on_sigterm(), Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda _, lines: live.update(_CroppedLines(list(lines)), refresh=True)


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Exit in order on SIGTERM, so that the terminal is restored."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _CroppedLines:
    """Shows as many lines as fit the terminal. The last line counts the missing ones."""

    def __init__(self, lines: list[RenderableType]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = console.height
        lines = console.render_lines(Group(*self._lines), options.update(height=None), pad=False)
        if len(lines) > room:
            more = len(lines) - room + 1
            lines = [*lines[: room - 1], [Segment(f"… {more} more lines; enlarge the terminal to see them")]]
        for line in lines:
            yield from line
            yield Segment.line()


@click.command()
@watch_option
@with_session
def status(session: CommandSession, seconds: float | None) -> None:
    """Show tiers, hit ratios, fetches and mounts of this node."""
    if seconds is not None:
        watch_output(session, seconds, lambda: status_output(session.call(STATUS, Empty(), CALL_SECONDS)))
    document, lines = status_output(session.call(STATUS, Empty()))
    session.print_result(document, *lines)


def status_output(now: Status) -> CommandOutput:
    """Return the document and the lines of `status`."""
    return {**to_json_types(now), "hit_ratios": hit_ratios(now)}, describe(now)


@click.command()
@with_session
def mounts(session: CommandSession) -> None:
    """Show the mounts of this node, and which snapshots they show.

    A mount of one dataset that was refreshed since is `behind`: it shows the new snapshot once it is mounted again.
    One with the option follow `follows`, NAME@ID is `chosen`, and mounts of several datasets always show the newest.
    """
    found = session.call(STATUS, Empty()).mounts
    session.print_result({"mounts": found}, mount_table(found) if found else "no mounts")


@click.command()
@click.option("--all", "single", is_flag=True, help="A row for each object or device that has failed.")
@with_session
def errors(session: CommandSession, single: bool) -> None:
    """Show what is wrong now, and recent failures by their causes.

    A line with "!" is a trouble that lasts: reads wait, or fail. The table shows how long ago a cause was first and
    last seen, how often, where, and why. … stands for the name of what failed. Tiers are among them.
    """
    now = session.call(STATUS, Empty())
    document = {"troubles": now.troubles, "causes": now.causes, "errors": now.errors}
    lines: list[str | Table] = list(trouble_lines(now))
    if not now.errors:
        lines += [] if lines else ["no errors"]
    elif single or not now.causes:  # older daemons report no causes
        rows = (
            (
                age_text(each.when),
                f"{each.count:,}",
                escape_name(each.subject),
                escape_name(elide_subject(each.subject, each.message)),
            )
            for each in now.errors
        )
        lines.append(table("=LAST >COUNT SUBJECT ~MESSAGE", rows))
    else:
        causes = (
            (
                age_text(each.first),
                age_text(each.last),
                f"{each.count:,}",
                escape_name(each.where),
                escape_name(elide_subject(each.where, each.message)),
            )
            for each in now.causes
        )
        lines.append(table("=FIRST =LAST >COUNT WHERE ~MESSAGE", causes))
    session.print_result(document, *lines)


def elide_subject(subject: str, message: str) -> str:
    """Return the message with … in place of the subject, which has a column of its own."""
    return message.replace(subject, "…") if len(subject) > 1 else message


def age_text(when: float) -> str:
    """Format the age of a Unix time."""
    return f"{format_duration(max(0.0, time.time() - when))} ago"


def hit_ratios(now: Status) -> dict[str, float]:
    """Return the share of reads that each tier answered; empty before the first read.

    Only reads that reached cachefs count. Reads from the kernel's page cache are invisible.
    """
    reads = sum(tier.hits for tier in now.tiers) + now.misses
    if not reads:
        return {}
    return {**{tier.name: tier.hits / reads for tier in now.tiers}, "miss": now.misses / reads}


def describe(now: Status) -> Iterator[str | Table]:
    """Yield the lines of `status`."""
    yield f"cachefsd {now.version}, pid {now.pid}, up {format_duration(now.uptime)}, state in {now.state_dir}"
    yield ""
    if now.troubles:
        yield from trouble_lines(now)
        yield ""
    reads = sum(tier.hits for tier in now.tiers) + now.misses
    rows = (
        (tier.name, size(tier.used), size(tier.limit), f"{tier.blocks:,}", f"{tier.evicted:,}", f"{tier.hits:,}",
         share(tier.hits, reads), tier.policy)
        for tier in now.tiers
    )  # fmt: skip
    yield table("=TIER >USED >LIMIT >BLOCKS? >EVICTED?? >HITS? >RATIO =POLICY???", rows)
    yield ""
    yield labelled_lines(itertools.chain.from_iterable(map(tier_facts, now.tiers)))
    yield ""
    yield labelled_lines(count_facts(now, reads))
    if now.mounts:
        yield ""
        yield mount_table(now.mounts)


def trouble_lines(now: Status) -> Iterator[str]:
    """Yield a line for each present trouble."""
    for trouble in now.troubles:
        yield f"! {escape_name(describe_trouble(trouble, time.time()))}"


def tier_facts(tier: TierStatus) -> Iterator[tuple[str, str]]:
    """Yield a tier's directory and problems."""
    yield tier.name, f"in {escape_name(tier.directory)}"
    if tier.is_cut_short:
        yield "", f"only {size(tier.limit)} of its budget of {size(tier.budget)} can be used now"
    if tier.problem:
        yield "", escape_name(tier.problem)


def count_facts(now: Status, reads: int) -> Iterator[tuple[str, str]]:
    """Yield the node's counters. reads: all that reached it."""
    yield "misses", f"{format_count(now.misses, 'read')} waited for a fetch ({share(now.misses, reads)})"
    in_flight = f"{format_count(now.in_flight_blocks, 'block')}, {size(now.in_flight_bytes)}"
    yield "fetched", f"{format_count(now.fetched_blocks, 'block')}, {size(now.fetched_bytes)}; in flight {in_flight}"
    if now.peers != PeerCounts():
        yield from peer_facts(now.peers)
    if now.fetch_processes:
        carried = sum(process.blocks for process in now.fetch_processes)
        pids = ", ".join(str(process.pid) for process in now.fetch_processes)
        noun = "a fetch process" if len(now.fetch_processes) == 1 else "fetch processes"
        yield "carried", f"{carried:,} of these blocks, by {noun} (pid {pids})"
    guessed = now.guessed
    if guessed.blocks:
        undecided = max(0, guessed.blocks - guessed.right - guessed.wrong)
        read = f"{guessed.right:,} were read, {guessed.wrong:,} were not, {undecided:,} may still be"
        yield "guessed", f"{format_count(guessed.blocks, 'block')}, {size(guessed.bytes)}: {read}"
    if now.passed_blocks:
        yield (
            "passed",
            f"{format_count(now.passed_blocks, 'block')} straight to their readers, as no tier could hold them",
        )
    detours = (
        f", {format_count(now.origin_detours, 'read')} took the slower client (the log says why)"
        if now.origin_detours
        else ""
    )
    yield "origin", f"{format_count(now.origin_requests, 'request')}, {now.origin_errors:,} failed{detours}"
    for endpoint in now.endpoints:
        yield "", describe_endpoint(endpoint)
    yield from cluster_facts(now.cluster)
    yield "repairs", f"{format_count(now.repairs, 'damaged block')} dropped"
    yield "datasets", f"{now.datasets}, warmups running {now.warmups}, recent errors {len(now.causes or now.errors)}"


def peer_facts(peers: PeerCounts) -> Iterator[tuple[str, str]]:
    """Yield the traffic with other nodes."""
    yield "peers", f"{format_count(peers.blocks, 'block')}, {size(peers.bytes)} from other nodes"
    in_vain = f"{peers.not_here:,} not there, {peers.failed:,} failed, {peers.hedged:,} late and asked elsewhere too"
    yield "", f"asked {format_count(peers.asked, 'time')}: {in_vain}"
    if peers.silent:
        yield "", f"another source asked {format_count(peers.silent, 'time')} beside a node that sent no heartbeat"
    served = f"{format_count(peers.served_blocks, 'block')}, {size(peers.served_bytes)} for other nodes"
    yield "", f"{served}, {peers.served_fetched:,} of them fetched for that"
    if peers.taken or peers.given:
        yield (
            "",
            f"{format_count(peers.taken, 'block')} fetched for nodes that were behind, {peers.given:,} fetched by "
            "other nodes for this one",
        )


def describe_endpoint(one: EndpointStatus) -> str:
    """Describe what is known of a server."""
    parts = [f"{one.width} of {one.most} requests at once"]
    if one.rate:
        parts.append(f"{one.rate:,.0f} a second")
    if one.throttled:
        parts.append(f"{one.throttled:,} throttled")
    if one.hedged:
        parts.append(f"{one.hedged:,} sent twice, of which {one.hedges_won:,} answered first")
    if one.silent:
        parts.insert(0, f"no answer for {format_duration(one.silent)}")
    return f"{escape_name(one.name)}: {', '.join(parts)}"


def mount_state(mount: MountView) -> str:
    """Return the state of a mount in a word."""
    if not mount.alive:
        return "dead"
    return "detached" if mount.detached else "ending" if mount.ending else "alive"


def mount_snapshot(mount: MountView) -> str:
    """Return the first digits of a mount's snapshot, and whether it is the newest one."""
    spec = MountSpec.parse(mount.spec)
    if not spec.is_single:
        return "newest"
    if not mount.snapshot:
        return "unknown"
    chosen = spec.datasets[0].digits is not None
    word = "chosen" if chosen else "follows" if spec.is_latest else "behind" if mount.behind else "newest"
    return f"{mount.snapshot[:8]} {word}"


def mount_table(found: list[MountView]) -> Table:
    """Return a table with a row per mount."""
    rows = (
        (escape_name(each.mountpoint), escape_name(each.spec), mount_snapshot(each), each.pid, mount_state(each),
         *(f"{each.counters.get(counter, 0):,}" for counter in ("requests", "read", "errors")))
        for each in found
    )  # fmt: skip
    return table("MOUNTPOINT SPEC =SNAPSHOT?? >PID?? =STATE >REQUESTS? >READS >ERRORS?", rows)


@click.command()
@with_session
def reload(session: CommandSession) -> None:
    """Have the daemon read its configuration again.

    What can change at run time takes effect at once. With status 4, something else has changed too and takes a restart.
    """
    response = session.call(RELOAD, Empty())
    lines = [
        f"{each.key} is {escape_name(each.now)} now, and was {escape_name(each.before)}" for each in response.applied
    ]
    lines += [f"{each.key} = {escape_name(each.now)} takes a restart of the daemon" for each in response.restart]
    session.print_result(response, *(lines or ["nothing has changed"]))
    if response.restart:
        sys.exit(ExitStatus.INCOMPLETE)


@click.command()
@click.argument("level", required=False, type=click.Choice(["debug", "info", "warning", "error"]))
@with_session
def log_level(session: CommandSession, level: str | None) -> None:
    """Show or set the daemon's log level."""
    response = session.call(LOG_LEVEL, LogLevel(level=level or ""))
    session.print_result(response, response.level)
