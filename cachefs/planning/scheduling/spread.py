"""The spread of one snapshot over nodes, updated node by node: as it is, and as it is expected to be.

Nodes of a cluster keep one copy of a block together. The parts of a shard on two nodes are therefore assumed to be
different blocks, as long as there is room for both: they add up, to the whole shard at most.

`ExpectedSpread` adds the data that running jobs are still fetching. The nodes of a job will together have all that they
read, as far as they have room. Which node will have which block is not known yet, so each is expected to fetch the same
part of what they lack.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.scheduling.facts import SHARDS, WHOLE, NodeCopy

# Steps of trust: a fresh report counts LEVELS / LEVELS. Integers, so that sums stay exact while nodes come and go.
LEVELS: Final = 16
# A whole shard as an integer: fine enough for the part of one of 20,000 nodes.
_UNIT: Final = WHOLE << 12
_MAX_SUM: Final = _UNIT * LEVELS
# Below this part of a snapshot it does not matter which shards it is.
_SMALL_SHARE: Final = 1 / SHARDS

# Rows of the cluster's table, one per node. Shape (n,), int64.
Rows = npt.NDArray[np.int64]
# A number per node. Shape (n,), float64.
NodeValues = npt.NDArray[np.float64]
# A part per shard, 0 to 1. Shape (SHARDS,), float64.
ShardParts = npt.NDArray[np.float64]
_Sums = npt.NDArray[np.int64]


class Spread:
    """The spread of one snapshot, by node (row of the cluster's table; row 0 stands for unknown nodes)."""

    def __init__(self, size: int) -> None:
        """size: bytes of the snapshot."""
        self.size = size
        self.copies: dict[int, NodeCopy] = {}
        # Zone -> what its nodes have of each shard, in 1 / _MAX_SUM. Only zones that have data.
        self._sums: dict[int, _Sums] = {}
        # By row, up to the last used one: part of the snapshot's bytes present, and part of these on SSD.
        self._cached = np.zeros(1, np.float32)
        self._on_ssd = np.zeros(1, np.float32)
        # Rows with data, and their parts of each shard; computed on demand.
        self._matrix: tuple[Rows, npt.NDArray[np.float32]] | None = None

    def add_copy(self, row: int, zone: int, copy: NodeCopy, level: int) -> None:
        """Add the *copy* of a node without one. Its report counts level / LEVELS."""
        self.copies[row] = copy
        self._add(zone, self._parts(copy) * level)
        if row >= len(self._cached):
            more = np.zeros(row + row // 4 + 1 - len(self._cached), np.float32)
            self._cached, self._on_ssd = np.append(self._cached, more), np.append(self._on_ssd, more)
        self._cached[row] = self._share(copy)
        self._on_ssd[row] = copy.ssd / copy.bytes if copy.bytes else 0.0

    def remove_copy(self, row: int, zone: int, level: int) -> None:
        """Remove the copy of a node. level: how much its report counted."""
        self._add(zone, -self._parts(self.copies.pop(row)) * level)
        self._cached[row] = self._on_ssd[row] = 0.0

    def change_weight(self, row: int, zone: int, change: int) -> None:
        """Change how much the report of a node with a copy counts, by *change* levels."""
        self._add(zone, self._parts(self.copies[row]) * change)

    def held_share(self, rows: Rows, weights: npt.NDArray[np.float32] | None = None) -> NodeValues:
        """Return the part of the reads whose data each node reported to have: 0 to 1, shape (rows,).

        weights: share of the reads in each shard: shape (SHARDS,); None: equal.
        """
        if weights is None:
            return _looked_up(self._cached, rows)
        if self._matrix is None:
            known = np.fromiter(self.copies, np.int64, len(self.copies))
            parts = [self._parts(copy) for copy in self.copies.values()]
            self._matrix = known, np.array(parts, np.float32).reshape(-1, SHARDS) / np.float32(_UNIT)
        known, matrix = self._matrix
        found = np.zeros(len(self._cached), np.float32)
        found[known] = matrix @ weights
        return _looked_up(found, rows)

    def on_ssd(self, rows: Rows) -> NodeValues:
        """Return the part of each node's copy that is on its SSD: 0 to 1, shape (rows,)."""
        return _looked_up(self._on_ssd, rows)

    def matrix_of(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Return the part of each shard that each node reported to have: 0 to 1, shape (rows, SHARDS)."""
        evenly, exact, parts = np.zeros(len(rows), np.float32), [], []
        for position, row in enumerate(rows.tolist()):
            copy = self.copies.get(row)
            if copy is None:
                continue
            share = self._share(copy)
            if copy.shards is None or share < _SMALL_SHARE:
                evenly[position] = round(share * _UNIT) / _UNIT
            else:
                exact.append(position)
                parts.append(copy.shards)
        found = np.repeat(evenly[:, None], SHARDS, axis=1)
        if parts:
            found[exact] = np.concatenate(parts).reshape(-1, SHARDS).astype(np.float32) / np.float32(WHOLE)
        return found

    def rows(self) -> Rows:
        """Return the rows of the nodes with a copy."""
        return np.fromiter(self.copies, np.int64, len(self.copies))

    def zones(self) -> Iterable[int]:
        """Return the zones with data of it."""
        return self._sums

    def coverage(self, zones: Iterable[int]) -> ShardParts:
        """Return the part of each shard that these zones have together: 0 to 1, shape (SHARDS,)."""
        total = np.zeros(SHARDS, np.int64)
        for zone in zones:
            if zone in self._sums:
                total += self._sums[zone]
        return np.minimum(total / _MAX_SUM, 1.0)

    def _add(self, zone: int, parts: _Sums) -> None:
        total = self._sums.get(zone, 0) + parts
        if total.any():
            self._sums[zone] = total
        else:
            self._sums.pop(zone, None)
        self._matrix = None

    def _parts(self, copy: NodeCopy) -> _Sums:
        share = self._share(copy)
        if copy.shards is None or share < _SMALL_SHARE:
            return np.full(SHARDS, round(share * _UNIT), np.int64)
        return copy.shards.astype(np.int64) << 12

    def _share(self, copy: NodeCopy) -> float:
        return min(1.0, copy.bytes / self.size) if self.size else 1.0


def _looked_up(values: npt.NDArray[np.float32], rows: Rows) -> NodeValues:
    found: NodeValues = values[np.where(rows < len(values), rows, 0)].astype(np.float64)
    return found


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
        self._positions = np.full(int(self._rows.max(initial=0)) + 1, -1, np.int64)
        self._positions[self._rows] = np.arange(len(self._rows))
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
        positions = self._positions_of(rows)
        bring = positions >= 0
        found[bring] += self._more[positions[bring]]
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

    def _positions_of(self, rows: Rows) -> Rows:
        # Row 0 stands for unknown nodes.
        return self._positions[np.where(rows < len(self._positions), rows, 0)]

    def _looked_up(self, values: NodeValues, rows: Rows) -> NodeValues:
        return np.append(values, 0.0)[self._positions_of(rows)]


def _expected_parts(spread: Spread, readers: SnapshotReaders) -> npt.NDArray[np.float32]:
    """Return the part of each shard that each reader will still fetch: shape (readers, SHARDS)."""
    cached = spread.matrix_of(readers.rows)
    more = np.zeros_like(cached)
    for positions in readers.jobs:
        lack = np.maximum(1.0 - cached[positions].sum(axis=0), 0.0)
        more[positions] += lack / np.float32(len(positions))
    # Two jobs of a node may fetch the same data.
    np.minimum(more, 1.0 - cached, out=more)
    size = more.mean(axis=1, dtype=np.float64) * spread.size
    fits = np.divide(readers.rooms, size, out=np.ones(len(size)), where=size > readers.rooms)
    more *= fits.astype(np.float32)[:, None]
    return more
