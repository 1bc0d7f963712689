"""The ring: the nodes that count for placement, in one key that all nodes share, and how it follows the records.

All results that nodes must agree on (homes, holders of copies) are computed from the ring, with the zones, weights and
sizes in it. The ring changes as a whole, and its version is the ring epoch. So two nodes of one epoch never disagree,
and a node that missed a change has an older epoch. Nothing here does I/O or has a clock.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from cachefs_cluster.membership.view import ClusterView, NodeRecord, check_record

MAX_NODES: Final = 4096
_MAX_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Ring:
    """The nodes that count for placement, of one epoch."""

    # The ring epoch. 0: there is no ring yet.
    epoch: int = 0
    # Sorted by id; without incarnations, and all active.
    nodes: tuple[NodeRecord, ...] = ()

    def encode(self) -> bytes:
        """Encode the nodes as JSON. The store keeps the epoch."""
        return msgspec.json.encode(self.nodes)


_NODES: Final = msgspec.json.Decoder(tuple[NodeRecord, ...])


def decode_ring(text: bytes, epoch: int) -> Ring:
    """Decode and check a ring. Raises ValueError, in words, if it is invalid."""
    if len(text) > _MAX_BYTES:
        raise ValueError(f"{len(text):,} bytes; a ring has at most {_MAX_BYTES:,}")
    nodes = _NODES.decode(text)
    if len(nodes) > MAX_NODES:
        raise ValueError(f"{len(nodes):,} nodes; a ring has at most {MAX_NODES:,}")
    for node in nodes:
        check_record(node)
    if len({node.id for node in nodes}) < len(nodes):
        raise ValueError("it has a node twice")
    return Ring(epoch, ring_nodes(nodes))


def ring_nodes(records: Iterable[NodeRecord]) -> tuple[NodeRecord, ...]:
    """Return the records in the form of a ring. They have no cluster and no rails, which matter for no placement: nodes
    of the last release write none, and would be overruled endlessly."""
    nodes = (dataclasses.replace(record, incarnation="", state="active", cluster="", rails=()) for record in records)
    return tuple(sorted(nodes, key=lambda node: node.id))


class RingPlanner:
    """The last known records and ring, and since when nodes of the ring are missing.

    Times are monotonic seconds.
    """

    def __init__(self, me: str, grace: float) -> None:
        """grace: seconds that a node stays in the ring while it is away, or has not become active again."""
        self.me = me
        self.ring = Ring()
        self.records: Mapping[str, NodeRecord] = {}
        self._grace = grace
        # By id of a node of the ring: since when it has no record that is active or draining.
        self._missing_since: dict[str, float] = {}

    def update(self, records: Mapping[str, NodeRecord], ring: Ring | None, now: float) -> None:
        """Take in the content of the store. ring: None if a client has emptied the store; the last ring stays known."""
        self.records = records
        if ring is not None:
            self.ring = ring
        missing = {node.id for node in self.ring.nodes if not self._is_settled(node.id)}
        self._missing_since = {each: self._missing_since.get(each, now) for each in missing}

    def _is_settled(self, node_id: str) -> bool:
        record = self.records.get(node_id)
        return record is not None and record.state in ("active", "draining")

    def wanted_nodes(self, now: float) -> tuple[NodeRecord, ...]:
        """Return the nodes that the ring should have: active ones, and those that are away within their grace."""
        nodes = [record for record in self.records.values() if record.state == "active"]
        nodes += [
            node
            for node in self.ring.nodes
            if node.id in self._missing_since and now - self._missing_since[node.id] < self._grace
        ]
        return ring_nodes(nodes)

    def leader_rank(self) -> int:
        """Return how many nodes that can change the ring precede this one. The first does it; the others wait for
        it."""
        return sum(1 for each, record in self.records.items() if record.state != "away" and each < self.me)

    def seconds_to_next_change(self, now: float) -> float | None:
        """Return the seconds until the next grace ends; None if no node is missing."""
        times = [since + self._grace - now for since in self._missing_since.values()]
        return max(0.0, min(times)) if times else None

    def make_view(self, source: str, problem: str) -> ClusterView:
        """Return this node's view of the cluster."""
        members = {node.id: dataclasses.replace(node, state="away") for node in self.ring.nodes}
        in_ring = dict(members)
        for each, record in self.records.items():
            placed = in_ring.get(each)
            if placed is None:
                members[each] = record
                continue
            # Placement uses the values of the ring, as other nodes do, until the ring has changed.
            members[each] = dataclasses.replace(
                record, zone=placed.zone, weight=placed.weight, memory=placed.memory, ssd=placed.ssd
            )
        ordered = tuple(members[each] for each in sorted(members))
        return ClusterView(self.ring.epoch, self.me, ordered, tuple(sorted(in_ring)), source, problem)
