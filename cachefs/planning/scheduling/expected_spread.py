"""The expected spread of one snapshot: the data that nodes have, and those that running jobs are still fetching.

The nodes of a job will together have all that they read, as far as they have room. Which node will have which block is
not known yet, so each is expected to fetch the same part of what they lack.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachefs.planning.scheduling.facts import SHARDS
from cachefs.planning.scheduling.spread import NodeValues, Rows, ShardParts, Spread


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotReaders:
    """The nodes on which jobs read a snapshot. Arrays have the shape (readers,)."""

    # Each row once.
    rows: Rows
    # Nodes of each job: indices in these arrays.
    jobs: Sequence[Rows]
    # Free bytes of each beyond its needs; part of its fetched data that will be on SSD.
    rooms: NodeValues
    on_ssd: NodeValues
    zones: Rows
    # How much its report counts.
    trust: NodeValues


class ExpectedSpread:
    """Answers as `Spread`, for the near future. Follows changes of nodes without readers; after changes of
    readers, a new one must be made."""

    def __init__(self, spread: Spread, readers: SnapshotReaders) -> None:
        self.size = spread.size
        self._spread = spread
        rows, zones = readers.rows, readers.zones
        more = _expected_parts(spread, readers) if spread.size else np.zeros((len(rows), SHARDS), np.float32)
        coming = more.any(axis=1)
        # Nodes that will fetch: parts of each shard, of the whole snapshot, and the part of these on SSD.
        self._rows, self._more = rows[coming], more[coming]
        self._part, self._ssd = self._more.mean(axis=1, dtype=np.float64), readers.on_ssd[coming]
        # Row -> index in the arrays above, up to the last row.
        self._places = np.full(int(self._rows.max(initial=0)) + 1, -1, np.int64)
        self._places[self._rows] = np.arange(len(self._rows))
        zones, counts = zones[coming], readers.trust[coming].astype(np.float32)
        self._of_zone: dict[int, ShardParts] = {}
        if len(zones):
            order = np.argsort(zones, kind="stable")
            found, starts = np.unique(zones[order], return_index=True)
            sums = np.add.reduceat((self._more * counts[:, None])[order], starts, axis=0).astype(np.float64)
            self._of_zone = dict(zip(found.tolist(), sums, strict=True))

    def coming_bytes(self, rows: Rows) -> NodeValues:
        """Return the bytes that each of these nodes will still fetch: shape (rows,)."""
        return self._looked_up(self._part, rows) * self.size

    def rows(self) -> Rows:
        """As `Spread.rows`."""
        return np.union1d(self._spread.rows(), self._rows)

    def held_share(self, rows: Rows, weights: npt.NDArray[np.float32] | None = None) -> NodeValues:
        """As `Spread.held_share`."""
        part: NodeValues = self._part if weights is None else (self._more @ weights).astype(np.float64)
        found: NodeValues = self._spread.held_share(rows, weights) + self._looked_up(part, rows)
        return np.minimum(found, 1.0)

    def on_ssd(self, rows: Rows) -> NodeValues:
        """As `Spread.on_ssd`."""
        there, coming = self._spread.held_share(rows), self._looked_up(self._part, rows)
        ssd = there * self._spread.on_ssd(rows) + coming * self._looked_up(self._ssd, rows)
        both = there + coming
        return np.divide(ssd, both, out=np.zeros(len(rows)), where=both > 0)

    def matrix_of(self, rows: Rows) -> npt.NDArray[np.float32]:
        """As `Spread.matrix_of`."""
        found = self._spread.matrix_of(rows)
        places = self._places_of(rows)
        bring = places >= 0
        found[bring] += self._more[places[bring]]
        return np.minimum(found, np.float32(1.0))

    def zones(self) -> Iterable[int]:
        """As `Spread.zones`."""
        return dict.fromkeys((*self._spread.zones(), *self._of_zone))

    def coverage(self, zones: Iterable[int]) -> ShardParts:
        """As `Spread.coverage`."""
        zones = list(zones)
        total = self._spread.coverage(zones)
        for zone in zones:
            total = total + self._of_zone.get(zone, 0.0)
        return np.minimum(total, 1.0)

    def _places_of(self, rows: Rows) -> Rows:
        # Row 0 stands for unknown nodes.
        return self._places[np.where(rows < len(self._places), rows, 0)]

    def _looked_up(self, values: NodeValues, rows: Rows) -> NodeValues:
        return np.append(values, 0.0)[self._places_of(rows)]


def _expected_parts(spread: Spread, readers: SnapshotReaders) -> npt.NDArray[np.float32]:
    """Return the part of each shard that each reader will still fetch: shape (readers, SHARDS)."""
    held = spread.matrix_of(readers.rows)
    more = np.zeros_like(held)
    for places in readers.jobs:
        lack = np.maximum(1.0 - held[places].sum(axis=0), 0.0)
        more[places] += lack / np.float32(len(places))
    # Two jobs of a node may fetch the same data.
    np.minimum(more, 1.0 - held, out=more)
    size = more.mean(axis=1, dtype=np.float64) * spread.size
    fits = np.divide(readers.rooms, size, out=np.ones(len(size)), where=size > readers.rooms)
    more *= fits.astype(np.float32)[:, None]
    return more
