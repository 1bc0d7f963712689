"""What may be evicted from nodes when jobs have ended, dataset by dataset: nothing (as long as nobody says otherwise,
and where it is pinned), what nobody has read for some time (TTL), or what has been read least recently when room is
needed.

What a running job reads, and what is pinned, stays in any case. A node's tiers evict by themselves what is read last;
this is for an administrator who wants datasets to go as wholes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cachefs.planning.scheduling.cluster import GRACE
from cachefs.planning.scheduling.facts import NodeFacts


@dataclass(frozen=True, slots=True)
class CleaningRule:
    """What may be done with a snapshot that no job reads."""

    kind: Literal["keep", "pin", "ttl", "lru"] = "keep"
    # For "ttl": seconds since anybody has read it.
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "ttl" and not self.seconds > 0:
            raise ValueError(f"a TTL is a number of seconds above 0, not {self.seconds}")


@dataclass(frozen=True, slots=True)
class Eviction:
    """A snapshot that is to leave a node."""

    node: str
    snapshot: str
    bytes: int
    # In words.
    why: str


def expired(nodes: Sequence[NodeFacts], rules: Mapping[str, CleaningRule]) -> tuple[Eviction, ...]:
    """What nobody has read for longer than its rule allows. rules: by snapshot; "keep" where there is none.

    A node that has not been heard for longer than the TTL is left alone: somebody may have read there meanwhile. But
    one that is well says nothing for half a minute where nothing happens, so a shorter TTL is no reason.
    """
    return tuple(
        Eviction(node.name, snapshot, copy.bytes, f"no reader has used it for {copy.idle + node.age:,.0f} s")
        for node in nodes
        for snapshot, copy in node.copies.items()
        if (rule := rules.get(snapshot)) is not None
        and rule.kind == "ttl"
        and copy.idle > rule.seconds
        and node.age <= max(rule.seconds, GRACE)
        and _free_to_go(node, snapshot)
    )


def making_room(
    node: NodeFacts, wanted: int, rules: Mapping[str, CleaningRule], keep: str = ""
) -> tuple[Eviction, ...]:
    """What to evict so that *wanted* bytes fit on the node: of "lru" and "ttl" what was read least recently first, and
    no more than is needed. Nothing where even all of that is too little: then nothing is gained. keep: a snapshot that
    stays, as it is what the room is for."""
    lacking = wanted - (node.capacity - node.used)
    found: list[Eviction] = []
    oldest = sorted(node.copies, key=lambda snapshot: (-node.copies[snapshot].idle, snapshot))
    for snapshot in oldest:
        if lacking <= 0:
            break
        kind = rules.get(snapshot, CleaningRule()).kind
        size = node.copies[snapshot].bytes
        if kind in ("lru", "ttl") and size and snapshot != keep and _free_to_go(node, snapshot):
            why = f"read least recently ({node.copies[snapshot].idle:,.0f} s ago), and room is needed"
            found.append(Eviction(node.name, snapshot, size, why))
            lacking -= size
    return tuple(found) if lacking <= 0 else ()


def _free_to_go(node: NodeFacts, snapshot: str) -> bool:
    return not node.copies[snapshot].pinned and not node.jobs.get(snapshot)
