"""How far the demo is: live bars on a terminal, and a line for each step where the output goes elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from cachefs_tools.demo.figures import Epoch, Position

PROGRAM = "cachefs-demo"


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
    def epoch(self, title: str, samples: int) -> Iterator["Bar"]:
        """A bar for an epoch."""
        task = self._bars.add_task(title, total=samples, note="")
        bar = Bar(self._bars, task)
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

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def move(self, position: Position, note: str = "") -> None:
        """The loop is there now; *note* is shown behind the bar."""
        waiting = f"{position.waited / position.seconds:4.0%} waiting" if position.seconds else ""
        self._bars.update(
            self._task, completed=position.samples, note=f"{position.seconds:5.1f} s {waiting}{note and f'  {note}'}"
        )


@contextmanager
def shown() -> Iterator[Display]:
    """A display, until the demo ends."""
    screen = Console(file=sys.stderr, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(16), MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bars:
        yield Display(bars)
