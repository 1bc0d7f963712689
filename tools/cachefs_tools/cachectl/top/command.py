"""The command `cachectl top`."""

import shutil
import sys
import time
from typing import Final

import click

from cachefs.errors import ConfigError
from cachefs.extras import require_extra
from cachefs_tools.cachectl.command_session import CommandSession, with_session
from cachefs_tools.cachectl.top.frame import DrawingArea, ShownNode, render_frame
from cachefs_tools.cachectl.top.glyphs import glyphs_for
from cachefs_tools.cachectl.top.history import BYTE_FLOWS, RateHistory
from cachefs_tools.cachectl.top.lists import TopState
from cachefs_tools.cachectl.top.picture import PictureSource, picture_document

# Columns and lines of a frame if the terminal's size is unknown.
DEFAULT_SIZE: Final = (80, 24)
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
    asker, history = PictureSource(session.client, interval), RateHistory()
    if session.as_json or once:
        history.add_picture(asker.fetch_picture())
        time.sleep(interval)
        picture = asker.fetch_picture()
        history.add_picture(picture)
        text = render_frame(
            ShownNode(picture, history), TopState(), DrawingArea(*shutil.get_terminal_size(DEFAULT_SIZE), glyphs_for())
        )
        session.print_result(picture_document(picture, {flow: history.rate(flow) for flow in BYTE_FLOWS}), *text.lines)
        return
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise ConfigError("top needs a terminal; `cachectl top --once` prints one picture, --json a document")
    with require_extra(EXTRA, "cachectl top"):
        from cachefs_tools.cachectl.top.screen import run
    if status := run(asker, history):
        sys.exit(status)
