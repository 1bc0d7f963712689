"""The ring: the nodes that count for placement, in one key that all nodes share, and how it follows the records.

All that nodes compute alike (homes, who holds which copy) they compute from the ring, with zones, weights and sizes as
the ring has them. It changes as a whole, and its version is the ring epoch. So two nodes of one epoch never disagree,
and one that has missed something has an older epoch. Nothing here does I/O or has a clock.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from cachefs_daemon.cluster.view import ClusterView, NodeRecord, check_record

MOST_NODES: Final = 4096
_MOST_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Ring:
    """Nodes that count for placement."""

    # The ring epoch. 0: there is none yet.
    epoch: int = 0
    # Sorted by id; incarnations are left out, and all are active.
    nodes: tuple[NodeRecord, ...] = ()

    def encoded(self) -> bytes:
        """The nodes, as JSON. The epoch is a matter of the store."""
        return msgspec.json.encode(self.nodes)


_NODES: Final = msgspec.json.Decoder(tuple[NodeRecord, ...])


def decode_ring(text: bytes, epoch: int) -> Ring:
    """Raises ValueError, in words, for anything that is no ring."""
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{len(text):,} bytes; a ring has at most {_MOST_BYTES:,}")
    nodes = _NODES.decode(text)
    if len(nodes) > MOST_NODES:
        raise ValueError(f"{len(nodes):,} nodes; a ring has at most {MOST_NODES:,}")
    for node in nodes:
        check_record(node)
    if len({node.id for node in nodes}) < len(nodes):
        raise ValueError("it has a node twice")
    return Ring(epoch, ring_nodes(nodes))


def ring_nodes(records: Iterable[NodeRecord]) -> tuple[NodeRecord, ...]:
    """Records as a ring has them. They do not name the cluster: nodes of the last release write none."""
    nodes = (dataclasses.replace(record, incarnation="", state="active", cluster="") for record in records)
    return tuple(sorted(nodes, key=lambda node: node.id))


class Roster:
    """What a store has said last of records and ring, and since when nodes of the ring are not what they should be.

    Times are monotonic seconds.
    """

    def __init__(self, me: str, grace: float) -> None:
        """grace: seconds that a node stays in the ring while it is away, or has not become active again."""
        self.me = me
        self.ring = Ring()
        self.records: Mapping[str, NodeRecord] = {}
        self._grace = grace
        # By id of a node of the ring: since when it has no record that is active or draining.
        self._missing: dict[str, float] = {}

    def update(self, records: Mapping[str, NodeRecord], ring: Ring | None, now: float) -> None:
        """What the store has. No ring: somebody has emptied the store; the last one is known still."""
        self.records = records
        if ring is not None:
            self.ring = ring
        missing = {node.id for node in self.ring.nodes if not self._is_settled(node.id)}
        self._missing = {each: self._missing.get(each, now) for each in missing}

    def _is_settled(self, node_id: str) -> bool:
        record = self.records.get(node_id)
        return record is not None and record.state in ("active", "draining")

    def wanted(self, now: float) -> tuple[NodeRecord, ...]:
        """The nodes that the ring should have: those that are active, and those that are away and may come back."""
        nodes = [record for record in self.records.values() if record.state == "active"]
        nodes += [
            node for node in self.ring.nodes if node.id in self._missing and now - self._missing[node.id] < self._grace
        ]
        return ring_nodes(nodes)

    def leader_rank(self) -> int:
        """How many nodes that can change the ring come before this one. The first does it; the others wait for it."""
        return sum(1 for each, record in self.records.items() if record.state != "away" and each < self.me)

    def next_change(self, now: float) -> float | None:
        """Seconds until the grace of a node is over."""
        times = [since + self._grace - now for since in self._missing.values()]
        return max(0.0, min(times)) if times else None

    def view(self, source: str, problem: str) -> ClusterView:
        """What follows for this node."""
        members = {node.id: dataclasses.replace(node, state="away") for node in self.ring.nodes}
        in_ring = dict(members)
        for each, record in self.records.items():
            placed = in_ring.get(each)
            if placed is None:
                members[each] = record
                continue
            # What others compute with is what the ring says, until the ring has changed.
            members[each] = dataclasses.replace(
                record, zone=placed.zone, weight=placed.weight, memory=placed.memory, ssd=placed.ssd
            )
        ordered = tuple(members[each] for each in sorted(members))
        return ClusterView(self.ring.epoch, self.me, ordered, tuple(sorted(in_ring)), source, problem)
