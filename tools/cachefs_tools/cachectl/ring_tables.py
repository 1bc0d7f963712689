"""Output of `cachectl ring`: shares of the nodes, and blocks that a change of the nodes would move."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.table import Table
from xxhash import xxh3_64_intdigest

from cachefs.cluster_messages import ClusterStatus, MemberStatus
from cachefs.errors import ConfigError, NotFound
from cachefs.planning.cluster.homes import MemberShare, RingDiff, member_shares, ring_diff
from cachefs.planning.cluster.rendezvous import RingMember
from cachefs_tools.cachectl.display import size, table
from cachefs_tools.escaped_names import escape_name

RingOutput = tuple[dict[str, Any], Iterator[str | Table]]


def shares_output(found: ClusterStatus) -> RingOutput:
    """Return the document and the lines of `ring`. Raises NotFound if no node keeps blocks."""
    rows = member_shares(_placed_members(found), found.replicas)
    return document(found, rows), describe(found, rows)


def diff_output(found: ClusterStatus, changes: Sequence[str]) -> RingOutput:
    """Return the document and the lines of `ring --diff`. Raises UsageError for an invalid change, ConfigError for a
    node that is present already, NotFound for an absent one."""
    diff = ring_diff(_placed_members(found), changed_members(found, changes))
    return diff_document(found, diff), describe_diff(found, diff)


def _placed_members(found: ClusterStatus) -> list[RingMember]:
    members = [ring_member(member) for member in found.members if member.placing]
    if not members:
        raise NotFound("this node is in no cluster with nodes that keep blocks; see `cachectl cluster`")
    return members


def ring_member(one: MemberStatus) -> RingMember:
    """Return a node as placement knows it."""
    return RingMember(one.id, xxh3_64_intdigest(one.id.encode()), one.weight, one.zone)


def changed_members(found: ClusterStatus, changes: Sequence[str]) -> list[RingMember]:
    """Return the members after changes such as `+node-7:2.5` or `-node-3`. Raises as `diff_output`."""
    members = {member.id: ring_member(member) for member in found.members if member.placing}
    average = sum(member.weight for member in members.values()) / len(members)
    for text in changes:
        if text.startswith("+"):
            joining = _parse_joining(text, average)
            if joining.id in members or any(one.name == joining.id and one.id in members for one in found.members):
                raise ConfigError(f"{text}: there is such a node already; see `cachectl ring`")
            members[joining.id] = joining
        elif text.startswith("-"):
            del members[_find_leaving(text[1:], found, members)]
        else:
            raise click.UsageError(
                f"{text!r} is not a change: use +NAME:WEIGHT for a joining node, -NAME for a leaving one"
            )
    return list(members.values())


def _parse_joining(text: str, average: float) -> RingMember:
    name, _, weight_and_zone = text[1:].partition(":")
    weight, _, zone = weight_and_zone.partition(":")
    try:
        number = float(weight) if weight else average
    except ValueError:
        number = math.nan
    if not name or not 0 < number < math.inf:
        raise click.UsageError(f"{text!r} is not a joining node: use +NAME:WEIGHT, with a weight above 0 such as 2.5")
    # Its real id is unknown; any id moves as many blocks.
    return RingMember(name, xxh3_64_intdigest(name.encode()), number, zone)


def _find_leaving(name: str, found: ClusterStatus, members: dict[str, RingMember]) -> str:
    ids = [member.id for member in found.members if name in (member.name, member.id) and member.id in members]
    if not ids and name in members:
        ids = [name]
    if len(ids) != 1:
        what = f"{len(ids)} nodes have the name {name}; use an id" if ids else f"no node of the ring is called {name!r}"
        raise NotFound(f"{what}; see `cachectl ring`")
    return ids[0]


def describe(found: ClusterStatus, rows: Sequence[MemberShare]) -> Iterator[str | Table]:
    """Yield the lines of `ring`."""
    nodes = "node" if len(rows) == 1 else "nodes"
    yield f"ring epoch {found.epoch}, {len(rows)} {nodes}, 1 copy of each block"
    if found.replicas > 1:
        yield f"{found.replicas} copies of hot datasets: {', '.join(found.hot) or 'none at present'}"
    yield ""
    by_id = {member.id: member for member in found.members}
    second = found.replicas > 1
    yield table(
        "NAME =ID?? ZONE? >WEIGHT >SHARE >HOMES" + (" >SECOND" if second else "") + " >CAPACITY",
        [
            (
                escape_name(by_id[one.member.id].name), one.member.id, escape_name(one.member.zone) or "-",
                f"{one.member.weight:.4g}", _percent(one.ideal), _percent(one.homes),
                *([_percent(one.seconds)] if second else []), _capacity(by_id[one.member.id]),
            )
            for one in rows
        ],
    )  # fmt: skip
    away = [member for member in found.members if not member.placing]
    for one in away:
        yield f"{escape_name(one.name)} is {one.state} and is the home of no block"


def describe_diff(found: ClusterStatus, diff: RingDiff) -> Iterator[str | Table]:
    """Yield the lines of `ring --diff`."""
    yield (
        f"{_percent(diff.moved)} of all blocks would get another home; "
        f"{_percent(diff.least)} is the least that gives each node its share"
    )
    yield ""
    names = {member.id: member.name for member in found.members}
    yield table(
        "NAME >BEFORE >AFTER >GETS >GIVES",
        [
            (escape_name(names.get(one.member.id, one.member.id)), _percent(one.before), _percent(one.after),
             _percent(one.gets), _percent(one.gives))
            for one in diff.changes
        ],
    )  # fmt: skip


def document(found: ClusterStatus, rows: Sequence[MemberShare]) -> dict[str, Any]:
    """Return the document of `ring --json`. Shares are parts of all blocks, 0 to 1."""
    names = {member.id: member.name for member in found.members}
    nodes = [
        {
            "id": one.member.id, "name": names[one.member.id], "zone": one.member.zone, "weight": one.member.weight,
            "share": one.ideal, "homes": one.homes, "second": one.seconds,
        }
        for one in rows
    ]  # fmt: skip
    return {"epoch": found.epoch, "replicas": found.replicas, "nodes": nodes}


def diff_document(found: ClusterStatus, diff: RingDiff) -> dict[str, Any]:
    """Return the document of `ring --diff --json`. Values are parts of all blocks, 0 to 1."""
    names = {member.id: member.name for member in found.members}
    nodes = [
        {
            "id": change.member.id, "name": names.get(change.member.id, change.member.id), "before": change.before,
            "after": change.after, "gets": change.gets, "gives": change.gives,
        }
        for change in diff.changes
    ]  # fmt: skip
    return {"epoch": found.epoch, "moved": diff.moved, "least": diff.least, "nodes": nodes}


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _capacity(one: MemberStatus) -> str:
    return size(one.memory + one.ssd) if one.memory + one.ssd else "-"
