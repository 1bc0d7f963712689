"""Routes of blocks: which nodes of the cluster may have a block, and which one fetches it from the origin.

`HomeRoutes` computes the routes of blocks without a published plan, which stay at their home. The home of a block is
computed per request, so no data about its snapshot as a whole is needed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from cachefs.planning.cluster.rendezvous import Hashes, Scores, key_hashes, scores_of_block
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.view import ClusterView, NodeRecord
from cachefs_cluster.search.missing_snapshots import MissingSnapshots
from cachefs_daemon.datasets.block_source import BlockSource

# Seconds for which a block may still be at its former home after a change. By then it has been read, or moved by
# the rebalance in the background.
FORMER_HOME_SECONDS: Final = 600.0
# Nodes asked before the origin for a block that they may have read while this node lacked the snapshot.
MAX_PEERS_BEFORE_ORIGIN: Final = 4


@dataclass(frozen=True, slots=True)
class BlockRoute:
    """Nodes that may have, or can fetch, a block that is not on this node. This node is never among them."""

    # Asked in this order whether they have the block, at the cost of a look-up each.
    possible_holders: tuple[NodeRecord, ...] = ()
    # The home: the node through which all others fetch the block, so that it leaves the origin once. None: this node.
    fetching_node: NodeRecord | None = None
    # The stand-in that all others ask if the home cannot be asked. None: this node.
    stand_in_node: NodeRecord | None = None
    # Whether this node keeps the block; otherwise it holds a mere copy.
    is_kept_here: bool = False
    # Asked in this order whether they have the block, before this node asks the origin, for itself or for a peer.
    peers_before_origin: tuple[NodeRecord, ...] = ()

    @property
    def has_other_nodes(self) -> bool:
        """Whether any other node is to be asked."""
        return self.fetching_node is not None or bool(self.possible_holders or self.peers_before_origin)

    @classmethod
    def from_records(
        cls,
        me: str,
        holder: NodeRecord | None,
        home: NodeRecord | None,
        after: NodeRecord | None = None,
        before: tuple[NodeRecord, ...] = (),
    ) -> "BlockRoute":
        """Build a route from records; None, or a record of this node, stands for this node.

        me: id of this node. holder: keeps the cluster's copy; holders change all the time, and nodes may briefly differ
        about them. home: fetches the block from the origin; the same for all nodes. after: next node in rendezvous
        order. before: others that may have the block.
        """
        holder, home, after = (one if one is not None and one.id != me else None for one in (holder, home, after))
        others = [one for one in before if one.id != me and (home is None or one.id != home.id)]
        # A home that is also the holder gets a single request, to give or fetch the block, unless others may have it.
        first = [holder, *others] if others or holder is not home else []
        may_have = {one.id: one for one in first if one is not None}
        # A leaving node hands its blocks to their home.
        is_leaving = holder is not None and holder.state not in ("active", "joining")
        is_mine = holder is None or (is_leaving and home is None)
        return cls(tuple(may_have.values()), home, after if after is not home else None, is_mine)


@dataclass(frozen=True, slots=True, eq=False)
class _Ring:
    """The members that count for placement, ordered by id."""

    ids: tuple[str, ...]
    seeds: Hashes
    weights: Scores
    # Equal numbers for nodes of one zone: a second copy goes to another zone.
    zones: npt.NDArray[np.int32]

    @classmethod
    def from_view(cls, view: ClusterView, replicas: int) -> "_Ring":
        ids = tuple(member.id for member in view.placed_members)
        seeds = np.array([xxhash.xxh3_64_intdigest(one.encode()) for one in ids], np.uint64)
        return cls(
            ids, seeds, np.array([one.weight for one in view.placed_members], np.float64), _zone_numbers(view, replicas)
        )

    def first_of(self, hashed: np.uint64, nodes: frozenset[str]) -> list[str]:
        scores = scores_of_block(hashed, self.seeds, self.weights)
        numbers = [number for number in np.argsort(-scores, kind="stable").tolist() if self.ids[number] in nodes]
        return [self.ids[number] for number in numbers[:MAX_PEERS_BEFORE_ORIGIN]]

    def has_same_homes(self, other: "_Ring") -> bool:
        return (
            self.ids == other.ids
            and np.array_equal(self.weights, other.weights)
            and np.array_equal(self.zones, other.zones)
        )

    def home_and_stand_in(self, hashed: np.uint64, without: frozenset[str] = frozenset()) -> tuple[str, str]:
        """Return the home of a block and its stand-in: the node with the second copy, if there are two. Either is empty
        if there is no such node. without: ids of nodes to skip."""
        if not self.ids:
            return "", ""
        scores = scores_of_block(hashed, self.seeds, self.weights)
        if without:
            scores[[one in without for one in self.ids]] = -np.inf
        home = int(np.argmax(scores))  # ties go to the smaller id
        if scores[home] == -np.inf:
            return "", ""
        scores[self.zones == self.zones[home]] = -np.inf
        second = int(np.argmax(scores))
        return self.ids[home], self.ids[second] if scores[second] > -np.inf else ""


def _zone_numbers(view: ClusterView, replicas: int) -> npt.NDArray[np.int32]:
    """Return zone numbers as in `cachefs.planning.cluster.homes`: a node without a zone counts as a zone of its own,
    and so does every node if there is only one zone, or one copy."""
    zones = [member.zone for member in view.placed_members]
    if replicas < 2 or len(set(zones)) < 2:
        return np.arange(len(zones), dtype=np.int32)
    names = {zone: number for number, zone in enumerate(dict.fromkeys(zones))}
    numbers = [names[zone] if zone else len(names) + number for number, zone in enumerate(zones)]
    return np.array(numbers, np.int32)


class HomeRoutes:
    """Computes routes from the current and the former ring. Used on the event loop."""

    def __init__(self, membership: Membership, missing_snapshots: MissingSnapshots, replicas: int = 1) -> None:
        """missing_snapshots: nodes to skip, by snapshot. replicas: copies of each block in the cluster."""
        self._missing_snapshots = missing_snapshots
        self._is_rebalancing: Callable[[str], bool] = _is_never_rebalancing
        self._replicas = replicas
        self._view = membership.view
        self._ring = self._former = _Ring.from_view(self._view, replicas)
        self._changed = 0.0  # monotonic time of the last change of the ring
        membership.add_listener(self._on_view)

    def follow_rebalance(self, is_rebalancing: Callable[[str], bool]) -> None:
        """Allow for a rebalance from now on. is_rebalancing: returns whether this node still fetches its share of a
        snapshot from other nodes, having just joined or come back."""
        self._is_rebalancing = is_rebalancing

    def find_route(self, source: BlockSource) -> BlockRoute | None:
        """Return the route of a block that is not on this node; None if no other node is to be asked."""
        hashed = key_hashes(np.frombuffer(source.key, np.uint8))[0]
        first, second = self._ring.home_and_stand_in(hashed, self._missing_snapshots.nodes_without(source.snapshot))
        if not first:
            return None  # no node counts for placement, or none of them has the snapshot
        me, home, after = self._view.me, self._view.get(first), self._view.get(second)
        others, readers = list(self._former_homes(hashed)), self._missing_snapshots.nodes_reading(source.snapshot)
        # While this node was away, or lacked the snapshot, the next node in order stood in for it.
        if self._replicas > 1 or (first == me and (readers or self._is_rebalancing(source.snapshot))):
            others.insert(0, second)
        records = [self._view.get(one) for one in others if one != first]
        before = [record for record in records if record is not None and record.state != "away"]
        route = BlockRoute.from_records(me, home, home, after, tuple(before))
        if readers:
            records = [self._view.get(one) for one in self._ring.first_of(hashed, readers - {me})]
            reading = [
                one for one in records if one is not None and one.state != "away" and one not in route.possible_holders
            ]
            route = replace(route, peers_before_origin=tuple(reading))
        return route if route.has_other_nodes else None

    def _former_homes(self, hashed: np.uint64) -> Sequence[str]:
        """Return the former home of the block and holder of the second copy, if they may still have it."""
        if self._former is self._ring:
            return ()
        if time.monotonic() - self._changed > FORMER_HOME_SECONDS:
            self._former = self._ring
            return ()
        return self._former.home_and_stand_in(hashed)[: self._replicas]

    def _on_view(self, view: ClusterView) -> None:
        self._view = view
        ring = _Ring.from_view(view, self._replicas)
        if not ring.has_same_homes(self._ring):
            self._former, self._ring, self._changed = self._ring, ring, time.monotonic()


def _is_never_rebalancing(_: str) -> bool:
    return False
