"""Routes of blocks that stay at home: those of which nobody has published who reads them when.

The home of one block is computed when it is asked for, so nothing has to be known of its snapshot as a whole.
"""

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from cachefs.planning.cluster.rendezvous import Hashes, Scores, key_hashes, scores_of_one
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cluster.view import ClusterView, NodeRecord
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.route import Route

# Seconds for which a block that has another home now may still be at the one before. By then it was read, or filling in
# the background has moved it.
FORMER_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class _Ring:
    """The members that count for placement, in order of their ids."""

    ids: tuple[str, ...]
    seeds: Hashes
    weights: Scores

    @classmethod
    def of(cls, view: ClusterView) -> "_Ring":
        ids = tuple(one.id for one in view.placing)
        seeds = np.array([xxhash.xxh3_64_intdigest(one.encode()) for one in ids], np.uint64)
        return cls(ids, seeds, np.array([one.weight for one in view.placing], np.float64))

    def is_like(self, other: "_Ring") -> bool:
        return self.ids == other.ids and np.array_equal(self.weights, other.weights)

    def first(self, hashed: np.uint64, count: int) -> list[str]:
        """The first *count* members for a block, the home first; fewer where there are fewer."""
        if not self.ids:
            return []
        found: list[str] = []
        scores = scores_of_one(hashed, self.seeds, self.weights)
        for _ in range(min(count, len(self.ids))):
            best = int(np.argmax(scores))  # of equals the one with the smaller id
            found.append(self.ids[best])
            scores[best] = -np.inf
        return found


class HomeRoutes:
    """Used on the event loop."""

    def __init__(self, membership: Membership) -> None:
        self._view = membership.view
        self._ring = self._former = _Ring.of(self._view)
        self._changed = 0.0  # monotonic seconds at which the ring became another one
        membership.listen(self._on_view)

    def route(self, source: BlockSource) -> Route | None:
        """Of a block that is not on this node; None where no other node is to be asked."""
        hashed = key_hashes(np.frombuffer(source.key, np.uint8))[0]
        ids = self._ring.first(hashed, 2)
        if not ids:
            return None  # nobody is known to count
        home, after = (self._view.get(one) for one in (*ids, "")[:2])
        before = self._before(hashed, ids[0])
        route = Route.of(self._view.me, home, home, after, (before,) if before is not None else ())
        return route if route.brings is not None or route.may_have else None

    def _before(self, hashed: np.uint64, home: str) -> NodeRecord | None:
        """Who was the block's home before this one, if it may still have it."""
        if self._former is self._ring:
            return None
        if time.monotonic() - self._changed > FORMER_SECONDS:
            self._former = self._ring
            return None
        former = self._former.first(hashed, 1)
        record = self._view.get(former[0]) if former and former[0] != home else None
        return record if record is not None and record.state != "away" else None

    def _on_view(self, view: ClusterView) -> None:
        self._view = view
        ring = _Ring.of(view)
        if not ring.is_like(self._ring):
            self._former, self._ring, self._changed = self._ring, ring, time.monotonic()
