"""Routes of blocks that stay at home: those of which nobody has published who reads them when.

The home of one block is computed when it is asked for, so nothing has to be known of its snapshot as a whole.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from cachefs.planning.cluster.rendezvous import Hashes, Scores, key_hashes, scores_of_one
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cluster.view import ClusterView
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.route import Route
from cachefs_daemon.fetch.snapshot_lacks import SnapshotLacks

# Seconds for which a block that has another home now may still be at the one before. By then it was read, or filling in
# the background has moved it.
FORMER_SECONDS: Final = 600.0
# Nodes that are asked before the origin for a block that they may have read while this node lacked the snapshot.
MOST_BEFORE_ORIGIN: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Ring:
    """The members that count for placement, in order of their ids."""

    ids: tuple[str, ...]
    seeds: Hashes
    weights: Scores
    # Equal numbers for those of one zone: second copies are in another one.
    zones: npt.NDArray[np.int32]

    @classmethod
    def of(cls, view: ClusterView, replicas: int) -> "_Ring":
        ids = tuple(one.id for one in view.placing)
        seeds = np.array([xxhash.xxh3_64_intdigest(one.encode()) for one in ids], np.uint64)
        return cls(ids, seeds, np.array([one.weight for one in view.placing], np.float64), _zones(view, replicas))

    def first_among(self, hashed: np.uint64, nodes: frozenset[str]) -> list[str]:
        """The first few of these nodes in rendezvous order."""
        scores = scores_of_one(hashed, self.seeds, self.weights)
        numbers = [number for number in np.argsort(-scores, kind="stable").tolist() if self.ids[number] in nodes]
        return [self.ids[number] for number in numbers[:MOST_BEFORE_ORIGIN]]

    def is_like(self, other: "_Ring") -> bool:
        return (
            self.ids == other.ids
            and np.array_equal(self.weights, other.weights)
            and np.array_equal(self.zones, other.zones)
        )

    def first(self, hashed: np.uint64, without: frozenset[str] = frozenset()) -> tuple[str, str]:
        """The home of a block, and who stands in for it: the node with the second copy, where there are two. Empty
        where there is no such node. without: ids of nodes that are passed over."""
        if not self.ids:
            return "", ""
        scores = scores_of_one(hashed, self.seeds, self.weights)
        if without:
            scores[[one in without for one in self.ids]] = -np.inf
        home = int(np.argmax(scores))  # of equals the one with the smaller id
        if scores[home] == -np.inf:
            return "", ""
        scores[self.zones == self.zones[home]] = -np.inf
        second = int(np.argmax(scores))
        return self.ids[home], self.ids[second] if scores[second] > -np.inf else ""


def _zones(view: ClusterView, replicas: int) -> npt.NDArray[np.int32]:
    """As `cachefs.planning.cluster.homes` has them: who has none is a zone for itself, and so is everybody where there
    is only one zone, or one copy."""
    zones = [one.zone for one in view.placing]
    if replicas < 2 or len(set(zones)) < 2:
        return np.arange(len(zones), dtype=np.int32)
    names = {zone: number for number, zone in enumerate(dict.fromkeys(zones))}
    numbers = [names[zone] if zone else len(names) + number for number, zone in enumerate(zones)]
    return np.array(numbers, np.int32)


class HomeRoutes:
    """Used on the event loop."""

    def __init__(self, membership: Membership, lacks: SnapshotLacks, replicas: int = 1) -> None:
        """lacks: which nodes are passed over. replicas: copies of each block that the cluster keeps."""
        self._lacks = lacks
        # Does this node still fill up with what others have of a snapshot? It has just come then, or come back.
        self.is_filling: Callable[[str], bool] = lambda snapshot: False
        self._replicas = replicas
        self._view = membership.view
        self._ring = self._former = _Ring.of(self._view, replicas)
        self._changed = 0.0  # monotonic seconds at which the ring became another one
        membership.listen(self._on_view)

    def route(self, source: BlockSource) -> Route | None:
        """Of a block that is not on this node; None where no other node is to be asked."""
        hashed = key_hashes(np.frombuffer(source.key, np.uint8))[0]
        first, second = self._ring.first(hashed, self._lacks.nodes(source.snapshot))
        if not first:
            return None  # no node is known to count, or none of them has the snapshot
        me, home, after = self._view.me, self._view.get(first), self._view.get(second)
        others, readers = list(self._before(hashed)), self._lacks.readers(source.snapshot)
        # While this node was away, or lacked the snapshot, the next one in order stood in for it.
        if self._replicas > 1 or (first == me and (readers or self.is_filling(source.snapshot))):
            others.insert(0, second)
        records = [self._view.get(one) for one in others if one != first]
        before = [one for one in records if one is not None and one.state != "away"]
        route = Route.of(me, home, home, after, tuple(before))
        if self._replicas > 1 and second == me:
            route = replace(route, is_mine=True)
        if readers:
            records = [self._view.get(one) for one in self._ring.first_among(hashed, readers - {me})]
            reading = [one for one in records if one is not None and one.state != "away" and one not in route.may_have]
            route = replace(route, before_origin=tuple(reading))
        return route if route.leads_elsewhere else None

    def _before(self, hashed: np.uint64) -> Sequence[str]:
        """Who was the block's home before this one, and had the second copy, if they may still have it."""
        if self._former is self._ring:
            return ()
        if time.monotonic() - self._changed > FORMER_SECONDS:
            self._former = self._ring
            return ()
        return self._former.first(hashed)[: self._replicas]

    def _on_view(self, view: ClusterView) -> None:
        self._view = view
        ring = _Ring.of(view, self._replicas)
        if not ring.is_like(self._ring):
            self._former, self._ring, self._changed = self._ring, ring, time.monotonic()
