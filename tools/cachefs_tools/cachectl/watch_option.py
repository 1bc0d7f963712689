"""`--watch`: shows an answer repeatedly, until Ctrl-C."""

import contextlib
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

from cachefs.errors import DaemonUnavailable
from cachefs_tools.cachectl.command_session import CommandSession, print_lines, to_json_types

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
