"""How far the demo is: live bars on a terminal, and a line for each step where the output goes elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from cachefs_tools.demo.figures import Epoch, Position

PROGRAM: Final = "cachefs-demo"


class Display:
    """What people see while the demo runs. All of it goes to standard error."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def say(self, step: str) -> None:
        """Name a step."""
        if self._bars.disable:
            click.echo(f"{PROGRAM}: {step}", err=True)
        else:
            self._bars.console.print(step, style="dim", markup=False)

    @contextmanager
    def working(self, step: str) -> Iterator[None]:
        """Show a step that takes some seconds, as long as it takes."""
        task = self._bars.add_task(step, total=None, note="")
        try:
            yield
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def epoch(self, title: str, samples: int) -> Iterator["Bar"]:
        """A bar for an epoch."""
        task = self._bars.add_task(title, total=samples, note="")
        bar = Bar(self._bars, task, samples)
        try:
            yield bar
        finally:
            self._bars.stop_task(task)

    def done(self, title: str, epoch: Epoch) -> None:
        """Say what an epoch has taken, where there are no bars."""
        if self._bars.disable:
            trained = epoch.trained
            self.say(
                f"{title}: {trained.seconds:.1f} s, {epoch.waiting:.0%} of it waiting,"
                f" {epoch.requests:,} requests to the object store"
            )


class Bar:
    """How far an epoch is."""

    def __init__(self, bars: Progress, task: TaskID, samples: int) -> None:
        self._bars = bars
        self._task = task
        self._samples = samples

    def move(self, position: Position) -> None:
        """The loop is there now."""
        waiting = f"{position.waited / position.seconds:4.0%} waiting" if position.seconds else ""
        self._bars.update(
            self._task,
            completed=position.samples,
            note=f"{position.samples:,} of {self._samples:,} {position.seconds:5.1f} s {waiting}",
        )


@contextmanager
def shown() -> Iterator[Display]:
    """A display, until the demo ends."""
    screen = Console(file=sys.stderr, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(16),
        TextColumn("{task.fields[note]}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bars:
        yield Display(bars)
