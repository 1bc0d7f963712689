"""cachectl cluster: the nodes of this node's cluster."""

from collections.abc import Iterator

import click
from rich.table import Table

from cachefs.cluster_messages import ClusterStatus, MemberStatus
from cachefs.messages import ClusterBrief, Empty
from cachefs.rpc import CLUSTER
from cachefs_tools.cachectl.command_session import CommandSession, with_session
from cachefs_tools.cachectl.display import duration, name, size, table


@click.command()
@with_session
def cluster(session: CommandSession) -> None:
    """Show the nodes of the cluster, as this node knows them.

    SHARE is the part of all blocks whose home a node is. IN and OUT are what this node has had from the others, and
    has given them, since its daemon started. A star stands behind this node's name.
    """
    found = session.call(CLUSTER, Empty())
    session.answer(found, *describe(found))


def describe(found: ClusterStatus) -> Iterator[str | Table]:
    """The lines of `cluster`."""
    if found.source == "none":
        yield "this node is in no cluster; see [cluster] in its configuration"
        return
    yield (
        f"cluster {found.name}, known from {found.source}; ring epoch {found.epoch}, as it is for {duration(found.age)}"
    )
    if found.problem:
        yield f"problem: {name(found.problem)}"
    yield ""
    rows = (
        (name(each.name) + ("*" if each.id == found.me else ""), each.state, _share(each), f"{each.weight:.4g}",
         name(each.zone) or "-", name(address(each)), size(each.traffic.bytes_in), size(each.traffic.bytes_out))
        for each in found.members
    )  # fmt: skip
    yield table("NAME =STATE >SHARE >WEIGHT ZONE ADDRESS >IN >OUT", rows)
    troubles = [line for each in found.members if (line := _trouble(each))]
    if troubles or found.remarks:
        yield ""
    yield from troubles
    yield from (f"note: {name(remark)}" for remark in found.remarks)


def address(member: MemberStatus) -> str:
    """Where others reach it, as HOST:PORT."""
    host = f"[{member.host}]" if ":" in member.host else member.host
    return f"{host}:{member.data_port}"


def _share(member: MemberStatus) -> str:
    return f"{100 * member.share:.1f} %" if member.placing else "-"


def _trouble(member: MemberStatus) -> str:
    """What this node has had to suffer from another, in a line."""
    traffic = member.traffic
    counts = ((traffic.failures, "requests failed"), (traffic.busy, "found it busy"), (traffic.wrong, "wrong blocks"))
    parts = [f"{count:,} {what}" for count, what in counts if count]
    if traffic.cooling:
        parts.insert(0, "does not answer, and is not asked for a while")
    return f"{name(member.name)}: {', '.join(parts)}" if parts else ""


def brief(found: ClusterBrief) -> Iterator[str]:
    """What `cachectl status` says of the cluster; nothing where the node is in none."""
    if found.source == "none":
        return
    states = ", ".join(f"{count} {state}" for state, count in sorted(found.states.items()))
    yield f"cluster    {name(found.name)}, from {found.source}: {states}; ring epoch {found.epoch}"
    if found.problem:
        yield f"{'':<10} {name(found.problem)}"
