"""Shows the demo on a terminal: its progress as live bars (otherwise as a line for each step), and its figures.

It also prints the figures as a chart: a bar for each epoch, and the effect of the daemon's kill. Bars differ in shape
and colour. On an ASCII terminal the chart is ASCII too.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import click
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from cachefs_bench.demo import results
from cachefs_bench.demo.results import DemoEpoch, DemoResult, LoopPosition, sample_rates
from cachefs_bench.demo.settings import DemoSettings

MIN_WIDTH: Final = 80
MAX_WIDTH: Final = 110
_LABEL: Final = 11  # columns in front of a bar
_FIGURES: Final = 27  # columns behind it
PROGRAM: Final = "cachefs-demo"


@dataclass(frozen=True, slots=True)
class ChartGlyphs:
    """The characters of a chart."""

    computing: str
    waiting: str
    levels: str  # from nothing to full
    arrow: str
    rule: str


UNICODE: Final = ChartGlyphs("█", "░", " ▁▂▃▄▅▆▇█", "▲", "─")
ASCII: Final = ChartGlyphs("#", ".", " .,:;=+*#", "^", "-")
COMPUTING: Final = "green"
WAITING: Final = "red"


def draw_chart(story: DemoResult, settings: DemoSettings, screen: Console) -> Group:
    """Return the chart, at most as wide as the screen. Titles are wrapped on a narrow one."""
    marks = UNICODE if "utf" in screen.encoding.lower() else ASCII
    return Group(*_lines(story, settings, marks, max(MIN_WIDTH, min(screen.width, MAX_WIDTH))))


def _lines(story: DemoResult, settings: DemoSettings, marks: ChartGlyphs, width: int) -> Iterator[Text]:
    yield from (Text(results.heading(story, settings), "bold"), Text(results.store_text(), "dim"))
    yield Text()
    bar = width - _LABEL - _FIGURES
    legend = Text.assemble(
        " " * _LABEL, (marks.computing * 2, COMPUTING), " computing  ", (marks.waiting * 2, WAITING),
        " waiting for samples",
    )  # fmt: skip
    legend.pad_right(width - _FIGURES - len(legend))
    yield legend.append(f"{'time':>9}{'waiting':>9}{'requests':>9}", "bold")
    longest = max(epoch.trained.seconds for run in story.all_runs() for epoch in run.epochs)
    for run in story.runs:
        yield Text.assemble((run.title, "bold"), ("  " + run.explanation, "dim"))
        yield from (_bar(epoch, bar, longest, marks) for epoch in run.epochs)
    yield Text(marks.rule * width, "dim")
    yield from _killed_lines(story, bar, longest, marks)
    yield Text(marks.rule * width, "dim")
    yield from map(Text, results.verdict_lines(story))


def _bar(epoch: DemoEpoch, width: int, longest: float, marks: ChartGlyphs) -> Text:
    trained = epoch.trained
    length = max(1, round(width * trained.seconds / longest))
    waiting = round(length * epoch.waiting)
    return Text.assemble(
        f"  epoch {trained.epoch + 1}".ljust(_LABEL),
        (marks.computing * (length - waiting), COMPUTING), (marks.waiting * waiting, WAITING), " " * (width - length),
        f"{trained.seconds:7.1f} s{100 * epoch.waiting:7.0f} %{epoch.requests:9,}",
    )  # fmt: skip


def _killed_lines(story: DemoResult, width: int, longest: float, marks: ChartGlyphs) -> Iterator[Text]:
    """Yield the run whose daemon was killed, and the loop's speed in that epoch."""
    kill, run = story.kill, story.killed
    yield Text.assemble((run.title, "bold"), ("  " + run.explanation, "dim"))
    yield from (_bar(epoch, width, longest, marks) for epoch in run.epochs)
    epoch = run.epochs[kill.position.epoch]
    speeds = sample_rates(epoch.positions, width)
    top = max(speeds)
    levels = "".join(marks.levels[round(speed / top * (len(marks.levels) - 1))] for speed in speeds)
    yield Text.assemble(" samples/s".ljust(_LABEL), (levels, COMPUTING), f"{top:7,.0f} at most")
    column = min(width - 1, int(width * kill.position.seconds / epoch.trained.seconds))
    note = results.KILLED_HERE
    before = column > len(note)
    arrow = f"{note} {marks.arrow}" if before else f"{marks.arrow} {note}"
    yield Text(" " * (_LABEL + column - (len(note) + 1 if before else 0)) + arrow, WAITING)
    yield from map(Text, results.kill_lines(story))


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
