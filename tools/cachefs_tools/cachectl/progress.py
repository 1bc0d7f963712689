"""Shows the progress of the daemon's long operations: a bar on a terminal, else a line from time to time."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from cachefs.errors import DaemonUnavailable
from cachefs.formatting import format_count
from cachefs.messages import ListingPhase, ListingProgress, VerifyProgress, WarmupProgress
from cachefs_tools.cachectl.command_session import CommandSession
from cachefs_tools.cachectl.display import share, size
from cachefs_tools.escaped_names import escape_name

Update = TypeVar("Update")

# Seconds between lines without a terminal.
LINE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _ProgressTexts(Generic[Update]):
    """Texts of an update: for work in progress, and after an interruption."""

    line: Callable[[Update], str]
    interrupted: Callable[[Update], str]


class _BytesColumn(ProgressColumn):
    """A column with bytes done, total bytes, and speed, in the units of all other output."""

    def render(self, task: Task) -> Text:
        speed = task.speed or (task.completed / task.elapsed if task.elapsed else 0)
        return Text(f"{size(task.completed)} of {size(task.total or 0)}, {size(speed)}/s")


class _RateColumn(ProgressColumn):
    """A column with the speed in units per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        # A single update gives no speed between two.
        speed = task.speed or (task.completed / task.elapsed if task.elapsed else 0)
        return Text(f"{speed:,.0f} {self._unit}/s")


def show_listing(session: CommandSession, updates: Iterable[ListingProgress]) -> ListingProgress:
    """Show a listing. Returns the last update, which has the dataset.

    The number of objects is unknown before the end of the listing, but usually close to that of the previous one.
    """
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), _RateColumn("objects"), TimeElapsedColumn(),
        console=session.screen, transient=True, disable=not session.screen.is_terminal,
    )  # fmt: skip
    listed, phase = 0, ""

    def show(task: TaskID, update: ListingProgress) -> None:
        nonlocal listed, phase
        if phase != update.phase:
            # Objects from an interrupted listing do not count for the rate, and building has a rate of its own.
            bar.reset(task, completed=update.resumed if update.phase == ListingPhase.LISTING else 0)
            phase = update.phase
        if update.phase == ListingPhase.LISTING:
            listed = update.objects
            total = update.expected if update.expected > listed else None
        else:
            total = listed or None
        text = f"{update.phase}: {format_count(update.objects, 'object')}, {size(update.bytes)}"
        bar.update(task, completed=update.objects, total=total, description=text)

    texts: _ProgressTexts[ListingProgress] = _ProgressTexts(
        lambda one: f"{one.phase}: {format_count(one.objects, 'object')}, {size(one.bytes)}",
        lambda one: f"interrupted after {format_count(one.objects, 'object')}; nothing has changed",
    )
    return _show_updates(session, bar, updates, show, texts)


def show_warmup(session: CommandSession, updates: Iterable[WarmupProgress], *, watched: bool = False) -> WarmupProgress:
    """Show a warmup. Returns the last update. watched: the warmup continues after an interruption."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(20), _BytesColumn(), TimeRemainingColumn(),
        console=session.screen, transient=True, disable=not session.screen.is_terminal,
    )  # fmt: skip

    has_told = False

    def show(task: TaskID, update: WarmupProgress) -> None:
        nonlocal has_told
        if 0 <= update.holds < update.bytes_total and not has_told and not session.as_json:
            has_told = True
            for told in holds_lines(update.holds, update.bytes_total):
                session.screen.print(told, soft_wrap=True)
        text = f"warming {escape_name(update.dataset)}{_reason(update)}"
        bar.update(task, completed=update.bytes, total=update.bytes_total, description=text)

    def line(one: WarmupProgress) -> str:
        done = share(one.bytes, one.bytes_total)
        text = f"warming {escape_name(one.dataset)}: {done}, {size(one.bytes)} of {size(one.bytes_total)}"
        return text + _reason(one)

    def interrupted(one: WarmupProgress) -> str:
        where = "on all nodes" if one.cluster else "here"
        here = f"{escape_name(one.dataset)}: {one.blocks:,} of {one.blocks_total:,} blocks {where}, {size(one.bytes)}"
        if watched or one.cluster:
            return f"{here}; the warmup continues: `cachectl warmups`"
        return f"{here}; the warmup is cancelled, and fetched blocks stay. With --no-wait, it runs in the background"

    return _show_updates(session, bar, updates, show, _ProgressTexts(line, interrupted))


def _reason(update: WarmupProgress) -> str:
    return f"; {escape_name(update.reason)}" if update.reason else ""


def holds_lines(holds: int, whole: int) -> list[str]:
    """Return the line that not all of a warmup fits into the cluster. holds: bytes that do; -1 for all."""
    if not 0 <= holds < whole:
        return []
    of_whole = f"{share(holds, whole)} of it, {size(holds)} of {size(whole)}"
    return [f"the tiers of all nodes hold {of_whole}; the rest is left out"]


def show_verification(session: CommandSession, updates: Iterable[VerifyProgress]) -> VerifyProgress:
    """Show a verification. Returns the last update."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn("blocks"),
        TimeRemainingColumn(), console=session.screen, transient=True, disable=not session.screen.is_terminal,
    )  # fmt: skip

    def show(task: TaskID, update: VerifyProgress) -> None:
        bar.update(task, completed=update.blocks, total=update.blocks_total)

    texts: _ProgressTexts[VerifyProgress] = _ProgressTexts(
        lambda one: f"verifying: {one.blocks:,} of {format_count(one.blocks_total, 'block')}",
        lambda one: (
            f"interrupted after {one.blocks:,} of {format_count(one.blocks_total, 'block')}; {one.repaired:,} were "
            "damaged"
        ),
    )
    return _show_updates(session, bar, updates, show, texts)


def _show_updates(
    session: CommandSession,
    bar: Progress,
    updates: Iterable[Update],
    show: Callable[[TaskID, Update], None],
    texts: _ProgressTexts[Update],
) -> Update:
    """Show all updates. Returns the last one. Raises DaemonUnavailable if there is none."""
    last = None
    due = time.monotonic() + LINE_SECONDS
    try:
        with bar:
            task = bar.add_task("", total=None)
            for last in updates:
                show(task, last)
                if bar.disable and time.monotonic() >= due:
                    due = time.monotonic() + LINE_SECONDS
                    session.screen.print(texts.line(last), soft_wrap=True)
    except KeyboardInterrupt:
        if last is not None:
            session.screen.print(texts.interrupted(last), soft_wrap=True)
        raise
    if last is None:
        raise DaemonUnavailable("the daemon ended the call without an answer; see its log")
    return last
