"""cachectl warmups: running and finished warmups."""

import sys

import click

from cachefs.messages import Empty, WarmupId, WarmupProgress
from cachefs.rpc import WARMUP_CANCEL, WARMUP_LIST, WARMUP_WATCH
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus, with_session
from cachefs_tools.cachectl.content import finished_text
from cachefs_tools.cachectl.display import share, size, table
from cachefs_tools.cachectl.progress import show_warmup
from cachefs_tools.escaped_names import escape_name


@click.command()
@click.option("--watch", type=int, metavar="ID", help="Show the progress of one until it ends. Ctrl-C leaves it alone.")
@click.option("--cancel", type=int, metavar="ID", help="End one. What has come stays.")
@with_session
def warmups(session: CommandSession, watch: int | None, cancel: int | None) -> None:
    """Show the warmups that run, and the last that have ended."""
    if watch is not None and cancel is not None:
        raise click.UsageError("--watch and --cancel exclude each other")
    if watch is not None:
        last = show_warmup(session, session.stream(WARMUP_WATCH, WarmupId(id=watch)), watched=True)
        session.print_result(last, finished_text(session, last))
        if last.missing or last.failed or last.skipped:
            sys.exit(ExitStatus.INCOMPLETE)
    elif cancel is not None:
        last = session.call(WARMUP_CANCEL, WarmupId(id=cancel))
        session.print_result(last, finished_text(session, last))
    else:
        found = session.call(WARMUP_LIST, Empty())
        session.print_result(
            found, table("=ID DATASET =STATE >HERE? >OF >SHARE >SKIPPED?? >FAILED??", map(_row, found.warmups))
        )


def _row(one: WarmupProgress) -> tuple[object, ...]:
    return (
        one.id, escape_name(one.dataset), one.state, size(one.bytes), size(one.bytes_total),
        share(one.bytes, one.bytes_total), f"{one.skipped:,}", f"{one.failed:,}",
    )  # fmt: skip
