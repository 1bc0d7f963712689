"""cachectl cluster, ring, drain and scale-hint: the nodes of this node's cluster.

They are shown with their shares of the blocks, removed without losing blocks that only they hold, and compared with the
number of nodes that the published jobs need.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Final

import click
from rich.table import Table

from cachefs.cluster_messages import ClusterStatus, DrainRequest, DrainStatus, MemberStatus, ScaleOutcome, ScaleStatus
from cachefs.formatting import format_count, format_duration
from cachefs.messages import ClusterBrief, Empty, WarmupProgress
from cachefs.rpc import CLUSTER, DRAIN, SCALE_HINT
from cachefs_tools.cachectl.command_session import CommandSession, ExitStatus, with_session
from cachefs_tools.cachectl.display import share, size, table
from cachefs_tools.escaped_names import escape_name

# Seconds between queries.
_POLL_SECONDS: Final = 0.5
# Most nodes whose matrix fits 80 columns.
MAX_COLUMNS: Final = 6
# Most rows of the list that replaces the matrix.
MAX_PAIRS: Final = 40
# A node counts as slow if its median block time is this multiple of the median node's, and at least SLOW_SECONDS.
SLOW_FACTOR: Final = 3.0
SLOW_SECONDS: Final = 0.05
# Sources of the membership, in words.
_SOURCES: Final = {"static": "a static list", "kubernetes": "Kubernetes"}
_NO_CLUSTER: Final = "this node is in no cluster; see [cluster] in its configuration"


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
    session.print_result(found, *describe_scale(found))


def describe_scale(found: ScaleStatus) -> Iterator[str | Table]:
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


@click.command()
@click.option(
    "--diff",
    "changes",
    multiple=True,
    metavar="CHANGE",
    help="What would move if a node joined (+NAME, +NAME:WEIGHT or +NAME:WEIGHT:ZONE) or left (-NAME). May be given "
    "several times. Without a weight, a node that joins has the average one.",
)
@with_session
def ring(session: CommandSession, changes: tuple[str, ...]) -> None:
    """Show which part of all blocks each node is the home of.

    A block's home fetches it from the origin, and keeps it unless a published job reads it elsewhere sooner. SHARE is
    what the node's weight says, and HOMES what it is with 131,072 blocks. This command changes nothing.
    """
    found = session.call(CLUSTER, Empty())
    from cachefs_tools.cachectl import ring_tables  # numpy takes 0.1 s, which would delay every other command

    document, lines = ring_tables.diff_output(found, changes) if changes else ring_tables.shares_output(found)
    session.print_result(document, *lines)


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


@click.command()
@click.option(
    "--traffic",
    is_flag=True,
    help="Show the bytes that each node has received from each other node, and this node over each of its addresses.",
)
@with_session
def cluster(session: CommandSession, traffic: bool) -> None:
    """Show the nodes of the cluster, as this node knows them.

    SHARE is the part of all blocks whose home a node is, USED what its tiers hold, and ORIGIN what it has brought from
    origins. IN and OUT are what this node has had from it, and has given it, since this daemon started. A star stands
    behind this node's name.
    """
    found = session.call(CLUSTER, Empty())
    session.print_result(found, *(describe_traffic(found) if traffic else describe(found)))


def describe(found: ClusterStatus) -> Iterator[str | Table]:
    """Yield the lines of `cluster`."""
    if found.source == "none":
        yield _NO_CLUSTER
        return
    source = _SOURCES.get(found.source, found.source)
    yield f"cluster {found.name}, from {source}; ring epoch {found.epoch} for {format_duration(found.age)}"
    if found.problem:
        yield f"problem: {escape_name(found.problem)}"
    yield ""
    has_zones = any(each.zone for each in found.members)
    rows = (
        (escape_name(each.name) + ("*" if each.id == found.me else ""), each.state, _share(each),
         *([escape_name(each.zone) or "-"] if has_zones else []), escape_name(address(each)), *_reported_bytes(each),
         *(("-", "-") if each.id == found.me else (size(each.traffic.bytes_in), size(each.traffic.bytes_out))))
        for each in found.members
    )  # fmt: skip
    yield table(f"NAME =STATE >SHARE {'ZONE?? ' if has_zones else ''}ADDRESS?? >USED >ORIGIN? >IN? >OUT?", rows)
    usual = _median_seconds(found)
    lines = [line for each in found.members for line in _problem_lines(each, usual)]
    lines += [_warmup_line(one) for one in found.warmups]
    lines += [f"note: {escape_name(remark)}" for remark in found.remarks]
    if lines:
        yield ""
    yield from lines


def _warmup_line(one: WarmupProgress) -> str:
    done = f"{share(one.bytes, one.bytes_total)}, {size(one.bytes)} of {size(one.bytes_total)}"
    reason = f"; {escape_name(one.reason)}" if one.reason else ""
    return f"warmup {one.id} of {escape_name(one.dataset)} {one.state}: {done}{reason}"


def describe_traffic(found: ClusterStatus) -> Iterator[str | Table]:
    """Yield the traffic between nodes, as far as they report it: a matrix, or its largest entries."""
    if found.source == "none":
        yield _NO_CLUSTER
        return
    names = {each.id: escape_name(each.name) for each in found.members}
    sent = {
        (each.id, giver): count
        for each in found.members
        if each.counters is not None
        for giver, count in each.counters.received.items()
        if giver in names
    }
    if not sent:
        yield "no node has received a block from another node"
    elif len(names) <= MAX_COLUMNS:
        rows = (
            (names[to], *(size(sent.get((to, giver), 0)) if to != giver else "-" for giver in names)) for to in names
        )
        yield table(" ".join(["TO/FROM", *(f">{each}" for each in names.values())]), rows)
    else:
        largest = sorted(sent.items(), key=lambda each: -each[1])[:MAX_PAIRS]
        yield table("TO FROM >BYTES", ((names[to], names[giver], size(count)) for (to, giver), count in largest))
    rails = [(names[each.id], rail) for each in found.members for rail in each.traffic.rails]
    if rails:
        yield ""
        yield "received by this node over the addresses of nodes that have several:"
        rails.sort(key=lambda each: -each[1].bytes_in)
        rows = (
            (name, escape_name(rail.address), escape_name(rail.card) or "-", size(rail.bytes_in),
             "not used" if rail.problem else "used")
            for name, rail in rails[:MAX_PAIRS]
        )  # fmt: skip
        yield table("FROM ADDRESS CARD >BYTES =STATE", rows)


def address(member: MemberStatus) -> str:
    """Return the address for other nodes, as HOST:PORT, and the number of further ones."""
    host = f"[{member.host}]" if ":" in member.host else member.host
    return f"{host}:{member.data_port}" + (f" +{len(member.rails)}" if member.rails else "")


def _share(member: MemberStatus) -> str:
    return f"{100 * member.share:.1f} %" if member.placing else "-"


def _reported_bytes(member: MemberStatus) -> tuple[str, str]:
    """Return the reported bytes in a node's tiers, and from origins."""
    counters = member.counters
    if counters is None or counters.problem:
        return "-", "-"
    return size(sum(tier.used for tier in counters.tiers)), size(counters.origin_bytes)


def _median_seconds(found: ClusterStatus) -> float:
    """Return the block time of the median node; 0 if fewer than two nodes have one."""
    times = [each.traffic.seconds for each in found.members if each.traffic.seconds > 0]
    return statistics.median_low(times) if len(times) > 1 else 0.0


def _problem_lines(member: MemberStatus, usual: float) -> Iterator[str]:
    """Yield a node's problems, one line each."""
    traffic, shown = member.traffic, escape_name(member.name)
    counts = ((traffic.failures, "requests failed"), (traffic.busy, "found it busy"), (traffic.wrong, "wrong blocks"))
    parts = [f"{count:,} {what}" for count, what in counts if count]
    if usual and traffic.seconds > max(SLOW_FACTOR * usual, SLOW_SECONDS):
        parts.insert(0, f"slow: a block takes {1e3 * traffic.seconds:,.0f} ms, from others {1e3 * usual:,.0f}")
    if traffic.cooling:
        parts.insert(0, "does not answer, and gets no requests for a while")
    if parts:
        yield f"{shown}: {', '.join(parts)}"
    if not traffic.cooling:
        yield from (f"{shown}: not used: {escape_name(rail.problem)}" for rail in traffic.rails if rail.problem)
    if member.counters is not None:
        problems = [member.counters.problem] if member.counters.problem else member.counters.problems
        yield from (f"{shown}: {escape_name(line)}" for line in problems)


def cluster_facts(found: ClusterBrief) -> Iterator[tuple[str, str]]:
    """Yield the cluster facts of `cachectl status`, for `display.facts`; nothing outside of a cluster."""
    if found.source == "none":
        return
    states = ", ".join(f"{count} {state}" for state, count in sorted(found.states.items()))
    yield "cluster", f"{escape_name(found.name)}: {states}; ring epoch {found.epoch}"
    if found.hot:
        yield "", f"second copies of hot datasets: {', '.join(found.hot)}"
    if found.problem:
        yield "", escape_name(found.problem)
