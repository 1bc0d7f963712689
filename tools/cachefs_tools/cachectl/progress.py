"""Shows the progress of long work of the daemon. It is shown on terminals only."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from cachefs.errors import DaemonUnavailable
from cachefs.messages import ListingPhase, ListingProgress, VerifyProgress, WarmupProgress
from cachefs_tools.cachectl.command_session import CommandSession
from cachefs_tools.cachectl.display import name, size

Update = TypeVar("Update")


class _Rate(ProgressColumn):
    """A column with the speed in units per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        # With one update only there is no speed between two of them.
        speed = task.speed or (task.completed / task.elapsed if task.elapsed else 0)
        return Text(f"{speed:,.0f} {self._unit}/s")


def follow_listing(session: CommandSession, updates: Iterable[ListingProgress]) -> ListingProgress:
    """Show a listing. Returns the last update, which has the dataset.

    The number of all objects is not known before the end of the listing, but it is mostly near that of the last one.
    """
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), _Rate("objects"), TimeElapsedColumn(),
        console=session.screen, transient=True, disable=not session.screen.is_terminal,
    )  # fmt: skip
    listed, phase = 0, ""

    def show(task: TaskID, update: ListingProgress) -> None:
        nonlocal listed, phase
        if phase != update.phase:
            # What an interrupted listing has found was not found at this rate, and building has a rate of its own.
            bar.reset(task, completed=update.resumed if update.phase == ListingPhase.LISTING else 0)
            phase = update.phase
        if update.phase == ListingPhase.LISTING:
            listed = update.objects
            total = update.expected if update.expected > listed else None
        else:
            total = listed or None
        text = f"{update.phase}: {update.objects:,} objects, {size(update.bytes)}"
        bar.update(task, completed=update.objects, total=total, description=text)

    return _follow(bar, "listing", updates, show)


def follow_warmup(session: CommandSession, updates: Iterable[WarmupProgress]) -> WarmupProgress:
    """Show a warmup. Returns the last update."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(), console=session.screen, transient=True, disable=not session.screen.is_terminal,
    )  # fmt: skip

    def show(task: TaskID, update: WarmupProgress) -> None:
        text = f"warming {name(update.dataset)}"
        bar.update(task, completed=update.bytes, total=update.bytes_total, description=text)

    return _follow(bar, "warming", updates, show)


def follow_verify(session: CommandSession, updates: Iterable[VerifyProgress]) -> VerifyProgress:
    """Show a verification. Returns the last update."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate("blocks"), TimeRemainingColumn(),
        console=session.screen, transient=True, disable=not session.screen.is_terminal,
    )  # fmt: skip

    def show(task: TaskID, update: VerifyProgress) -> None:
        bar.update(task, completed=update.blocks, total=update.blocks_total)

    return _follow(bar, "verifying", updates, show)


def _follow(bar: Progress, title: str, updates: Iterable[Update], show: Callable[[TaskID, Update], None]) -> Update:
    """Show all updates. Returns the last one; raises DaemonUnavailable where there is none."""
    last = None
    with bar:
        task = bar.add_task(title, total=None)
        for last in updates:
            show(task, last)
    if last is None:
        raise DaemonUnavailable("the daemon ended the call without an answer; see its log")
    return last
