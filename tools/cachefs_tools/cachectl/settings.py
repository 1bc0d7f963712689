"""cachectl reload and log-level: settings of the daemon that change at run time."""

import sys

import click

from cachefs.messages import Empty, LogLevel
from cachefs.rpc import LOG_LEVEL, RELOAD
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus, with_session
from cachefs_tools.escaped_names import escape_name


@click.command()
@with_session
def reload(session: CommandSession) -> None:
    """Have the daemon read its configuration again.

    What can change at run time takes effect at once. With status 4, something else has changed too and takes a restart.
    """
    answer = session.call(RELOAD, Empty())
    lines = [
        f"{each.key} is {escape_name(each.now)} now, and was {escape_name(each.before)}" for each in answer.applied
    ]
    lines += [f"{each.key} = {escape_name(each.now)} takes a restart of the daemon" for each in answer.restart]
    session.print_result(answer, *(lines or ["nothing has changed"]))
    if answer.restart:
        sys.exit(ExitStatus.INCOMPLETE)


@click.command()
@click.argument("level", required=False, type=click.Choice(["debug", "info", "warning", "error"]))
@with_session
def log_level(session: CommandSession, level: str | None) -> None:
    """Show or set the daemon's log level."""
    answer = session.call(LOG_LEVEL, LogLevel(level=level or ""))
    session.print_result(answer, answer.level)
