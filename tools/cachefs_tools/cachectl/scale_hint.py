"""cachectl scale-hint: the number of nodes that the published jobs need."""

from collections.abc import Iterator

import click
from rich.table import Table

from cachefs.cluster_messages import ScaleOutcome, ScaleStatus
from cachefs.messages import Empty
from cachefs.rpc import SCALE_HINT
from cachefs_tools.cachectl.command_session import CommandSession, with_session
from cachefs_tools.cachectl.display import size, table
from cachefs_tools.escaped_names import escape_name


@click.command("scale-hint")
@with_session
def scale_hint(session: CommandSession) -> None:
    """Say how many nodes the published jobs need.

    And what one node more or less would change. KEPT is what stays in the cluster from one epoch to the next, of the
    bytes that jobs read. The rest comes from the origins again in each epoch: ORIGIN is that until the jobs end.
    ORIGIN/S and PEERS/S are what comes in a second from origins and from node to node, as the jobs read now. A star
    stands behind the number of nodes that there are.
    """
    found = session.call(SCALE_HINT, Empty())
    session.print_result(found, *describe(found))


def describe(found: ScaleStatus) -> Iterator[str | Table]:
    """Yield the lines of `scale-hint`."""
    capacity, used = found.now.capacity, sum(node.used for node in found.nodes)
    yield f"{_nodes(len(found.nodes))} with room for {size(capacity)}, of which {size(used)} are taken"
    if not found.needed:
        yield "no job has published what it reads, so nothing is needed"
        return
    which = "1 snapshot" if found.snapshots == 1 else f"{found.snapshots} snapshots"
    yield f"published jobs read {size(found.needed)} of {which}; {_capacity_text(found)}"
    yield ""
    rows = [one for one in (found.one_fewer, found.now, found.one_more) if one is not None]
    yield table(
        ">NODES >ROOM >KEPT >ORIGIN >ORIGIN/S >PEERS/S",
        [(f"{one.nodes}{'*' if one == found.now else ' '}", *_row(one)) for one in rows],
    )
    for node in found.nodes:
        if node.problem:
            yield f"note: the state of {escape_name(node.name)} is unknown: {escape_name(node.problem)}"


def _row(one: ScaleOutcome) -> tuple[str, ...]:
    left = "?" if one.origin_bytes is None else size(round(one.origin_bytes))
    return size(one.capacity), size(one.kept), left, size(round(one.origin_rate)), size(round(one.peer_rate))


def _capacity_text(found: ScaleStatus) -> str:
    needed, there = found.nodes_needed, len(found.nodes)
    if not needed:
        return "how much room there is is not known"
    if needed > there:
        return f"to keep all of it takes {_nodes(needed)}, {needed - there} more"
    return "all of it fits" if needed == there else f"all of it fits, and {_nodes(needed)} would be enough"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count:,} nodes"
