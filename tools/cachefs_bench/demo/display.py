"""Shows the progress of the demo: live bars on a terminal, otherwise a line for each step."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from cachefs_bench.demo.results import DemoEpoch, LoopPosition

PROGRAM: Final = "cachefs-demo"


class DemoDisplay:
    """The demo's progress, on standard error."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def show_step(self, step: str) -> None:
        """Show the name of a step."""
        if self._bars.disable:
            click.echo(f"{PROGRAM}: {step}", err=True)
        else:
            self._bars.console.print(step, style="dim", markup=False)

    @contextmanager
    def show_work(self, step: str) -> Iterator[None]:
        """Show a step of some seconds while it runs."""
        task = self._bars.add_task(step, total=None, note="")
        try:
            yield
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def show_epoch(self, title: str, samples: int) -> Iterator["EpochBar"]:
        """Show a bar for an epoch."""
        task = self._bars.add_task(title, total=samples, note="")
        bar = EpochBar(self._bars, task, samples)
        try:
            yield bar
        finally:
            self._bars.stop_task(task)

    def report_epoch(self, title: str, epoch: DemoEpoch) -> None:
        """Report the time of an epoch, if there are no bars."""
        if self._bars.disable:
            trained = epoch.trained
            self.show_step(
                f"{title}: {trained.seconds:.1f} s, {epoch.waiting:.0%} of it waiting,"
                f" {epoch.requests:,} requests to the object store"
            )


class EpochBar:
    """The progress of an epoch."""

    def __init__(self, bars: Progress, task: TaskID, samples: int) -> None:
        self._bars = bars
        self._task = task
        self._samples = samples

    def show_position(self, position: LoopPosition) -> None:
        """Move the bar to the loop's position."""
        waiting = f"{position.waited / position.seconds:4.0%} waiting" if position.seconds else ""
        self._bars.update(
            self._task,
            completed=position.samples,
            note=f"{position.samples:,} of {self._samples:,} {position.seconds:5.1f} s {waiting}",
        )


@contextmanager
def open_display() -> Iterator[DemoDisplay]:
    """Yield a display, until the demo ends."""
    screen = Console(file=sys.stderr, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(16),
        TextColumn("{task.fields[note]}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bars:
        yield DemoDisplay(bars)
