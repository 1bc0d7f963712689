"""cachectl cluster: shows the nodes of this node's cluster."""

import statistics
from collections.abc import Iterator
from typing import Final

import click
from rich.table import Table

from cachefs.cluster_messages import ClusterStatus, MemberStatus
from cachefs.formatting import format_duration
from cachefs.messages import ClusterBrief, Empty
from cachefs.rpc import CLUSTER
from cachefs_tools.cachectl.command_session import CommandSession, with_session
from cachefs_tools.cachectl.display import size, table
from cachefs_tools.escaped_names import escape_name

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


@click.command()
@click.option("--traffic", is_flag=True, help="Show the bytes that each node has received from each other node.")
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
    lines += [f"note: {escape_name(remark)}" for remark in found.remarks]
    if lines:
        yield ""
    yield from lines


def describe_traffic(found: ClusterStatus) -> Iterator[str | Table]:
    """Yield the traffic between nodes, as far as they report it: a matrix, or its largest entries."""
    if found.source == "none":
        yield _NO_CLUSTER
        return
    names = {each.id: escape_name(each.name) for each in found.members}
    given = {
        (each.id, giver): count
        for each in found.members
        if each.counters is not None
        for giver, count in each.counters.received.items()
        if giver in names
    }
    if not given:
        yield "no node has received a block from another node"
    elif len(names) <= MAX_COLUMNS:
        rows = (
            (names[to], *(size(given.get((to, giver), 0)) if to != giver else "-" for giver in names)) for to in names
        )
        yield table(" ".join(["TO/FROM", *(f">{each}" for each in names.values())]), rows)
    else:
        largest = sorted(given.items(), key=lambda each: -each[1])[:MAX_PAIRS]
        yield table("TO FROM >BYTES", ((names[to], names[giver], size(count)) for (to, giver), count in largest))


def address(member: MemberStatus) -> str:
    """Return the address for other nodes, as HOST:PORT."""
    host = f"[{member.host}]" if ":" in member.host else member.host
    return f"{host}:{member.data_port}"


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
    if member.counters is not None:
        said = [member.counters.problem] if member.counters.problem else member.counters.problems
        yield from (f"{shown}: {escape_name(line)}" for line in said)


def cluster_facts(found: ClusterBrief) -> Iterator[tuple[str, str]]:
    """Yield the cluster facts of `cachectl status`, for `display.facts`; nothing outside of a cluster."""
    if found.source == "none":
        return
    states = ", ".join(f"{count} {state}" for state, count in sorted(found.states.items()))
    yield "cluster", f"{escape_name(found.name)}: {states}; ring epoch {found.epoch}"
    if found.problem:
        yield "", escape_name(found.problem)
