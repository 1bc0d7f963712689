"""Progress of the daemon's long work, on the terminal only."""

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
from cachefs.messages import ListingProgress, VerifyProgress, WarmupProgress
from cachefs_tools.cachectl.display import size
from cachefs_tools.cachectl.session import Session

Update = TypeVar("Update")


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} {self._unit}/s")


def follow_listing(session: Session, updates: Iterable[ListingProgress]) -> ListingProgress:
    """The last update, which carries the dataset. How many objects there will be is not known before the end."""
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), _Rate("objects"), TimeElapsedColumn(),
        console=session.screen, transient=True, disable=not session.screen.is_terminal,
    )  # fmt: skip

    def show(task: TaskID, update: ListingProgress) -> None:
        text = f"{update.phase}: {update.objects:,} objects, {size(update.bytes)}"
        bar.update(task, completed=update.objects, description=text)

    return _follow(bar, "listing", updates, show)


def follow_warmup(session: Session, updates: Iterable[WarmupProgress]) -> WarmupProgress:
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(), console=session.screen, transient=True, disable=not session.screen.is_terminal,
    )  # fmt: skip

    def show(task: TaskID, update: WarmupProgress) -> None:
        bar.update(task, completed=update.bytes, total=update.bytes_total)

    return _follow(bar, "warming", updates, show)


def follow_verify(session: Session, updates: Iterable[VerifyProgress]) -> VerifyProgress:
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate("blocks"), TimeRemainingColumn(),
        console=session.screen, transient=True, disable=not session.screen.is_terminal,
    )  # fmt: skip

    def show(task: TaskID, update: VerifyProgress) -> None:
        bar.update(task, completed=update.blocks, total=update.blocks_total)

    return _follow(bar, "verifying", updates, show)


def _follow(bar: Progress, title: str, updates: Iterable[Update], show: Callable[[TaskID, Update], None]) -> Update:
    last = None
    with bar:
        task = bar.add_task(title, total=None)
        for last in updates:
            show(task, last)
    if last is None:
        raise DaemonUnavailable("the daemon ended the call without an answer; see its log")
    return last
