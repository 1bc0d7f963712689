"""cachectl drain: removes a node from its cluster without losing blocks that only it holds."""

import time
from typing import Final

import click

from cachefs.cluster_messages import DrainNode, DrainStatus
from cachefs.counts import counted
from cachefs.rpc import DRAIN
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus, with_session
from cachefs_tools.cachectl.display import size
from cachefs_tools.names import escape

# Seconds between queries.
_POLL: Final = 0.5


@click.command()
@click.argument("node", default="")
@click.option("--timeout", type=click.FloatRange(0.0), default=3600.0, show_default=True, help="Seconds to wait.")
@click.option("--undo", is_flag=True, help="Have a node stay that drains and has not left yet.")
@with_session
def drain(session: CommandSession, node: str, timeout: float, undo: bool) -> None:
    """Empty a node, and let it leave the cluster.

    Other nodes take over what it holds, and the command waits until they have it. NODE is the name or the id of a node;
    without one it is the node of this daemon. Its daemon goes on and serves the jobs on its machine. It leaves once
    none reads there, and joins again when its daemon is started anew. To interrupt this command does not stop the
    drain.
    """
    if undo:
        found = session.call(DRAIN, DrainNode(node=node, undo=True))
        session.answer(found, f"{escape(found.name)} stays, and takes its part of the blocks again")
        return
    until, shown = time.monotonic() + timeout, ""
    found = session.call(DRAIN, DrainNode(node=node))
    while not found.done and time.monotonic() < until:
        if (line := _progress(found)) != shown and not session.as_json:
            session.screen.print(shown := line)
        time.sleep(_POLL)
        found = session.call(DRAIN, DrainNode(node=node))
    session.answer(found, _result(found, timeout))
    if not found.done:
        raise SystemExit(ExitStatus.INCOMPLETE)


def _progress(found: DrainStatus) -> str:
    waiting = ", ".join(map(escape, found.waiting))
    return (
        f"still to be taken over: {counted(found.blocks, 'block')} ({size(found.bytes)}); waiting for "
        f"{waiting or 'the ring'}"
    )


def _result(found: DrainStatus, timeout: float) -> str:
    if not found.done:
        return f"{escape(found.name)} still drains after {timeout:g} s; ask again for how far it is. {_progress(found)}"
    if found.has_left:
        return (
            f"{escape(found.name)} holds nothing that others need, and has left the cluster; its daemon may be stopped"
        )
    return f"{escape(found.name)} holds nothing that others need, and leaves the cluster when the jobs on it have ended"
