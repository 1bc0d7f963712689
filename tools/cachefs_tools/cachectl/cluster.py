"""cachectl cluster: the nodes of this node's cluster."""

from collections.abc import Iterator

import click
from rich.table import Table

from cachefs.cluster_messages import ClusterStatus, MemberStatus, NodeCounters
from cachefs.messages import ClusterBrief, Empty
from cachefs.rpc import CLUSTER
from cachefs_tools.cachectl.command_session import CommandSession, with_session
from cachefs_tools.cachectl.display import duration, name, size, table

# With more nodes than that, what each has given to each is left out.
MOST_IN_MATRIX = 6


@click.command()
@with_session
def cluster(session: CommandSession) -> None:
    """Show the nodes of the cluster, as this node knows them.

    SHARE is the part of all blocks whose home a node is. IN and OUT are what this node has had from the others, and
    has given them, since its daemon started. A star stands behind this node's name.

    The second table has what each node that answers within 2 s says of itself: what its tiers hold and may hold, its
    jobs and their ranks, and what has come there from origins and from other nodes since its daemon started.
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
    yield from _what_they_say(found)
    troubles = [line for each in found.members if (line := _trouble(each))]
    troubles += [line for each in found.members for line in _problems(each)]
    if troubles or found.remarks:
        yield ""
    yield from troubles
    yield from (f"note: {name(remark)}" for remark in found.remarks)


def _what_they_say(found: ClusterStatus) -> Iterator[str | Table]:
    """What the nodes that answer say of themselves, and what they have given each other."""
    said = [(each, each.counters) for each in found.members if each.counters is not None and not each.counters.problem]
    if not said:
        return
    yield ""
    rows = (
        (name(each.name), _tier(counters, "memory"), _tier(counters, "ssd"), str(counters.jobs),
         str(counters.consumers), size(counters.origin_bytes), size(sum(counters.received.values())))
        for each, counters in said
    )  # fmt: skip
    yield table("NAME >MEMORY >SSD >JOBS >RANKS >ORIGIN >PEERS", rows)
    if len(found.members) > MOST_IN_MATRIX or not any(counters.received for _, counters in said):
        return
    yield ""
    yield "what came to each node (a line) from each other (a column):"
    columns = " ".join(f">{name(each.name).replace(' ', '_')}" for each in found.members)
    matrix = ((name(each.name), *(_given(counters, other, each) for other in found.members)) for each, counters in said)
    yield table(f"TO {columns}", matrix)


def _given(counters: NodeCounters, giver: MemberStatus, taker: MemberStatus) -> str:
    return "" if giver.id == taker.id else size(counters.received.get(giver.id, 0))


def _tier(counters: NodeCounters, tier: str) -> str:
    """What a tier holds, and may hold."""
    for one in counters.tiers:
        if one.name == tier:
            return f"{size(one.used)} / {size(one.limit)}"
    return "-"


def _problems(member: MemberStatus) -> list[str]:
    """What a node says is wrong there, or why it says nothing."""
    counters = member.counters
    if counters is None:
        return []
    if counters.problem:
        return [f"{name(member.name)} says nothing of itself: {name(counters.problem)}"]
    return [f"{name(member.name)}: {name(problem)}" for problem in counters.problems]


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
