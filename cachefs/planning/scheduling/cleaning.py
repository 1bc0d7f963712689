"""Decides what to evict from nodes when jobs have ended, by the rule of each dataset: nothing (the default, and for
pinned data), data unread for some time (TTL), or the data read least recently when room is needed.

Data that a running job reads, and pinned data, stay in any case. A node's tiers evict by themselves; these rules are
for an administrator who wants datasets to go as wholes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cachefs.planning.scheduling.cluster_facts import GRACE_SECONDS
from cachefs.planning.scheduling.facts import NodeFacts


@dataclass(frozen=True, slots=True)
class CleaningRule:
    """The rule for a snapshot that no job reads."""

    kind: Literal["keep", "pin", "ttl", "lru"] = "keep"
    # For "ttl": seconds since the last read.
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "ttl" and not self.seconds > 0:
            raise ValueError(f"a TTL is a number of seconds above 0, not {self.seconds}")


@dataclass(frozen=True, slots=True)
class Eviction:
    """An advised eviction of a snapshot from a node."""

    node: str
    snapshot: str
    bytes: int
    # The reason, as text.
    reason: str


def expired_evictions(nodes: Sequence[NodeFacts], rules: Mapping[str, CleaningRule]) -> tuple[Eviction, ...]:
    """Return the evictions of data unread for longer than their rules allow. rules: by snapshot; "keep" where missing.

    A node without a report for longer than the TTL is skipped, as its data may have been read meanwhile. A healthy node
    may be silent for half a minute, so a shorter TTL does not skip it.
    """
    return tuple(
        Eviction(node.name, snapshot, copy.bytes, f"no reader has used it for {copy.idle + node.age:,.0f} s")
        for node in nodes
        for snapshot, copy in node.copies.items()
        if (rule := rules.get(snapshot)) is not None
        and rule.kind == "ttl"
        and copy.idle > rule.seconds
        and node.age <= max(rule.seconds, GRACE_SECONDS)
        and _is_evictable(node, snapshot)
    )


def evictions_for_room(
    node: NodeFacts, wanted: int, rules: Mapping[str, CleaningRule], keep: str = ""
) -> tuple[Eviction, ...]:
    """Return evictions that make *wanted* bytes fit on the node: "lru" and "ttl" data, least recently read first, and
    no more than needed. Empty where all of them would not suffice. keep: the snapshot that needs the room, never
    evicted."""
    lacking = wanted - (node.capacity - node.used)
    found: list[Eviction] = []
    oldest = sorted(node.copies, key=lambda snapshot: (-node.copies[snapshot].idle, snapshot))
    for snapshot in oldest:
        if lacking <= 0:
            break
        kind = rules.get(snapshot, CleaningRule()).kind
        size = node.copies[snapshot].bytes
        if kind in ("lru", "ttl") and size and snapshot != keep and _is_evictable(node, snapshot):
            why = f"read least recently ({node.copies[snapshot].idle:,.0f} s ago), and room is needed"
            found.append(Eviction(node.name, snapshot, size, why))
            lacking -= size
    return tuple(found) if lacking <= 0 else ()


def _is_evictable(node: NodeFacts, snapshot: str) -> bool:
    return not node.copies[snapshot].pinned and not node.jobs.get(snapshot)
