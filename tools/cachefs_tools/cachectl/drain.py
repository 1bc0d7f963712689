"""cachectl drain: removes a node from its cluster without losing blocks that only it holds."""

import time
from typing import Final

import click

from cachefs.cluster_messages import DrainRequest, DrainStatus
from cachefs.formatting import format_count
from cachefs.rpc import DRAIN
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus, with_session
from cachefs_tools.cachectl.display import size
from cachefs_tools.escaped_names import escape_name

# Seconds between queries.
_POLL_SECONDS: Final = 0.5


@click.command()
@click.argument("node", default="")
@click.option("--timeout", type=click.FloatRange(0.0), default=3600.0, show_default=True, help="Seconds to wait.")
@click.option("--undo", is_flag=True, help="Have a node stay that drains and has not left yet.")
@with_session
def drain(session: CommandSession, node: str, timeout: float, undo: bool) -> None:
    """Empty a node, and let it leave the cluster.

    Other nodes take over what it holds, and the command waits until they have it. NODE is the name or the id of a node;
    without one it is the node of this daemon. Its daemon continues and serves the jobs on its machine. The node leaves
    once no job reads there, and joins again when its daemon is restarted. Interrupting this command does not stop the
    drain.
    """
    if undo:
        found = session.call(DRAIN, DrainRequest(node=node, undo=True))
        session.print_result(found, f"{escape_name(found.name)} stays, and takes its part of the blocks again")
        return
    until, shown = time.monotonic() + timeout, ""
    found = session.call(DRAIN, DrainRequest(node=node))
    while not found.done and time.monotonic() < until:
        if (line := _progress(found)) != shown and not session.as_json:
            session.screen.print(shown := line)
        time.sleep(_POLL_SECONDS)
        found = session.call(DRAIN, DrainRequest(node=node))
    session.print_result(found, _result(found, timeout))
    if not found.done:
        raise SystemExit(ExitStatus.INCOMPLETE)


def _progress(found: DrainStatus) -> str:
    waiting = ", ".join(map(escape_name, found.waiting))
    return (
        f"still to be taken over: {format_count(found.blocks, 'block')} ({size(found.bytes)}); waiting for "
        f"{waiting or 'the ring'}"
    )


def _result(found: DrainStatus, timeout: float) -> str:
    name = escape_name(found.name)
    if not found.done:
        return f"{name} still drains after {timeout:g} s; ask again for how far it is. {_progress(found)}"
    if found.has_left:
        return f"{name} holds no block that other nodes need, and has left the cluster; its daemon may be stopped"
    return f"{name} holds nothing that others need, and leaves the cluster when the jobs on it have ended"
