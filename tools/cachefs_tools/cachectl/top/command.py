"""The command `cachectl top`."""

import shutil
import sys
import time
from typing import Final

import click

from cachefs.errors import ConfigError
from cachefs.extras import needs_extra
from cachefs_tools.cachectl.command_session import CommandSession, with_session
from cachefs_tools.cachectl.top.asking import Asker
from cachefs_tools.cachectl.top.frame import Sheet, View, frame
from cachefs_tools.cachectl.top.history import BYTE_FLOWS, History
from cachefs_tools.cachectl.top.pen import pen_for
from cachefs_tools.cachectl.top.picture import document
from cachefs_tools.cachectl.top.state import State

# Columns and lines of a frame if the terminal's size is unknown.
USUAL: Final = (80, 24)
EXTRA: Final = "top"


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2),
    default=1.0,
    show_default=True,
    help="Seconds between pictures.",
)
@click.option("--once", is_flag=True, help="Print one picture as text, and end.")
@with_session
def top(session: CommandSession, interval: float, once: bool) -> None:
    """Show tiers, throughput, jobs, datasets and mounts, live.

    The keys are shown by ?. Rates are those between two pictures; --once and --json take two, --interval apart. Where
    NO_COLOR is set nothing has a colour, and on terminals of TERM=linux or vt100 bars are ASCII.
    """
    asker, history = Asker(session.client, interval), History()
    if session.as_json or once:
        history.add(asker.ask())
        time.sleep(interval)
        picture = asker.ask()
        history.add(picture)
        text = frame(View(picture, history), State(), Sheet(*shutil.get_terminal_size(USUAL), pen_for()))
        session.answer(document(picture, {flow: history.rate(flow) for flow in BYTE_FLOWS}), *text.lines)
        return
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise ConfigError("top needs a terminal; `cachectl top --once` prints one picture, --json a document")
    with needs_extra(EXTRA, "cachectl top"):
        from cachefs_tools.cachectl.top.screen import run
    if status := run(asker, history):
        sys.exit(status)
