"""The facts about all nodes, in arrays that are updated with each report. Estimates are computed from these.

A report counts less the longer its node has been silent: fully for a minute (healthy daemons report every 25 s), then
half as much with each ten minutes, in steps, until it counts nothing after about an hour. Each answer tells how much it
counted (`Estimate.trust`), so nothing is left out silently. A node that is "away" counts nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.planning.scheduling.facts import MAX_NODES, Links, NodeCopy, NodeFacts, SnapshotFacts
from cachefs.planning.scheduling.spread import LEVELS, ExpectedSpread, NodeValues, Rows, SnapshotReaders, Spread

# Seconds.
GRACE_SECONDS: Final = 60.0
TRUST_HALF_LIFE_SECONDS: Final = 600.0
# Bytes/s of links without any measurement: 10 Gbit/s between nodes, a disk, an object store. Only their order matters:
# a nearer node is faster.
DEFAULT_RATES: Final = {"origin_rate": 2e8, "peer_rate": 1.25e9, "tier_rate": 2e9}

_NUMBERS: Final = (
    "capacity", "memory", "origin_rate", "peer_rate", "tier_rate", "demand", "received", "fetched", "given",
)  # fmt: skip
_COLUMNS: Final = (*_NUMBERS, "needed", "jobs", "heard")


class _ReadingJobs(NamedTuple):
    """Jobs that read a snapshot on one node: their number, and their names; "" stands for all jobs without a known
    name."""

    jobs: int
    names: frozenset[str]


class ClusterFacts:
    """The facts about nodes and snapshots. `now` is on any monotonic clock, the same for all calls."""

    def __init__(self, links: Links | None = None) -> None:
        self.links = links or Links()
        self._facts: dict[str, NodeFacts] = {}
        self._rows: dict[str, int] = {}
        # Row 0 stands for unknown nodes.
        self._free: list[int] = []
        self._values = {name: np.zeros(1) for name in _COLUMNS}
        self._zone, self._trust_level = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._up, self._away = np.zeros(1, np.bool_), np.zeros(1, np.bool_)
        self._used = 1
        self._all: Rows | None = None
        # Zone numbers, and the region of each zone.
        self._zones: dict[tuple[str, str], int] = {("", ""): 0}
        self._regions: dict[str, int] = {"": 0}
        self.region_of: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        self._snapshots: dict[str, SnapshotFacts] = {}
        self._spreads: dict[str, Spread] = {}
        # By snapshot and row, the jobs that read it there.
        self._readers: dict[str, dict[int, _ReadingJobs]] = {}
        # By snapshot, results of `expected_spread` since the last change of its readers.
        self._expected: dict[str, ExpectedSpread] = {}
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._facts)

    def __contains__(self, name: object) -> bool:
        return name in self._facts

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def update_node(self, facts: NodeFacts, now: float) -> None:
        """Replace the facts of a node. Raises ValueError for one node too many."""
        if facts.name not in self._rows and len(self._rows) >= MAX_NODES:
            raise ValueError(f"there are {MAX_NODES:,} nodes already, the maximum; cannot add {facts.name}")
        if now > self._now:
            self.advance_clock(now)
        before = self._facts.get(facts.name)
        row = self._rows.get(facts.name)
        if row is None:
            row = self._rows[facts.name] = self._new_row()
            self._all = None
        elif before is not None and (before.zone, before.region) != (facts.zone, facts.region):
            self._withdraw_node(row, before, {})
            before = None
        self._fill_row(row, facts, now, before)

    def remove_node(self, name: str) -> None:
        """Remove a node that is no longer a member."""
        row, facts = self._rows.pop(name), self._facts.pop(name)
        self._withdraw_node(row, facts, {})
        for values in (*self._values.values(), self._zone, self._trust_level, self._up, self._away):
            values[row] = 0
        self._free.append(row)
        self._all = None

    def add_snapshot(self, snapshot: SnapshotFacts) -> None:
        """Add a snapshot. Copies reported earlier count from now on."""
        if self._snapshots.get(snapshot.id) == snapshot:
            return
        self._snapshots[snapshot.id] = snapshot
        self._expected.pop(snapshot.id, None)
        spread = self._spreads[snapshot.id] = Spread(snapshot.bytes)
        for name, facts in self._facts.items():
            if snapshot.id in facts.copies:
                row = self._rows[name]
                spread.add_copy(row, int(self._zone[row]), facts.copies[snapshot.id], int(self._trust_level[row]))

    def forget_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot that is no longer read."""
        self._snapshots.pop(snapshot, None)
        self._spreads.pop(snapshot, None)
        self._expected.pop(snapshot, None)

    def advance_clock(self, now: float) -> None:
        """Advance the clock, which lowers the weight of silent nodes. Takes 0.1 ms for 5,000 nodes without silent
        ones."""
        self._now = max(self._now, now)
        levels = self._levels(self._now - self._values["heard"][: self._used])
        levels[self._away[: self._used]] = 0
        levels[0] = 0
        known = np.flatnonzero(levels != self._trust_level[: self._used])
        if not len(known):
            return
        names = {row: name for name, row in self._rows.items()}
        for row in known.tolist():
            if row in names:
                change, zone = int(levels[row] - self._trust_level[row]), int(self._zone[row])
                facts = self._facts[names[row]]
                for snapshot in facts.copies:
                    if snapshot in self._spreads:
                        self._spreads[snapshot].change_weight(row, zone, change)
                for snapshot in facts.jobs:
                    self._expected.pop(snapshot, None)
                self._trust_level[row] = levels[row]

    def current_facts(self, name: str) -> NodeFacts | None:
        """Return the facts of a node with its current age; None for an unknown node."""
        facts = self._facts.get(name)
        return None if facts is None else replace(facts, age=self._now - float(self._values["heard"][self._rows[name]]))

    def reported_facts(self, name: str) -> NodeFacts | None:
        """Return the facts of a node with the age at its report. `current_facts` costs ten times as much."""
        return self._facts.get(name)

    def readers(self, snapshot: str) -> Rows:
        """Return the rows of the nodes on which jobs read the snapshot now."""
        rows = self._readers.get(snapshot, {})
        return np.fromiter(rows, np.int64, len(rows))

    def snapshot_facts(self, snapshot: str) -> SnapshotFacts | None:
        return self._snapshots.get(snapshot)

    def holders(self, snapshot: str) -> Mapping[str, NodeCopy]:
        """Return node name -> its copy of the snapshot."""
        return {name: facts.copies[snapshot] for name, facts in self._facts.items() if snapshot in facts.copies}

    # The data of estimates. Rows are int64, of shape (n,); results per row have the same shape.

    def rows(self, names: Sequence[str]) -> Rows:
        """Return the row of each node; 0 for unknown nodes."""
        find = self._rows.get
        return np.array([find(name, 0) for name in names], np.int64)

    def spread(self, snapshot: str) -> Spread:
        """Return the spread of a snapshot; for an unknown one, the spread of one that no node has."""
        return self._spreads.get(snapshot) or Spread(0)

    def expected_spread(self, snapshot: str) -> ExpectedSpread:
        """Return the expected spread, with what running jobs will fetch. Cached until one of their nodes reports."""
        found = self._expected.get(snapshot)
        if found is None:
            rows = self.readers(snapshot)
            rows = rows[self._trust_level[rows] > 0]
            jobs: dict[str, list[int]] = {}
            for position, row in enumerate(rows.tolist()):
                for name in self._readers[snapshot][row].names:
                    jobs.setdefault(name, []).append(position)
            readers = SnapshotReaders(
                rows,
                [np.array(positions, np.int64) for positions in jobs.values()],
                self.room(rows),
                1.0 - self.values_of("memory", rows) / np.maximum(self.values_of("capacity", rows), 1.0),
                self._zone[rows],
                self.trust(rows),
            )
            found = ExpectedSpread(self.spread(snapshot), readers)
            if snapshot in self._spreads:
                self._expected[snapshot] = found
        return found

    def values_of(self, column: str, rows: Rows) -> NodeValues:
        """Return a number of `NodeFacts`, or "jobs": how many run on each node."""
        return self._values[column][rows]

    def rates_of(self, column: str, rows: Rows) -> NodeValues:
        """Return a rate of `NodeFacts` in bytes/s; where unknown, the median of the known ones."""
        values = self._values[column]
        if (values[rows] > 0).all():
            return values[rows]
        known = values[: self._used][values[: self._used] > 0]
        guessed = float(np.median(known)) if len(known) else DEFAULT_RATES[column]
        return np.where(values[rows] > 0, values[rows], guessed)

    def zones_of(self, rows: Rows) -> Rows:
        """Return the zone number of each; `region_of` maps zone numbers to region numbers."""
        return self._zone[rows]

    def trust(self, rows: Rows) -> NodeValues:
        """Return how much each node's report counts: 0 to 1."""
        return self._trust_level[rows] / LEVELS

    def are_up(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return whether each takes jobs and keeps blocks."""
        return self._up[rows]

    def room(self, rows: Rows) -> NodeValues:
        """Return the bytes that each could keep beyond what it needs already; 0 for nodes that take no blocks."""
        room = np.maximum(self._values["capacity"][rows] - self._values["needed"][rows], 0.0)
        return np.where(self._up[rows], room * self.trust(rows), 0.0)

    def all_rows(self) -> Rows:
        if self._all is None:
            self._all = np.fromiter(self._rows.values(), np.int64, len(self._rows))
        return self._all

    def total(self, column: str) -> float:
        return float(self._values[column][: self._used].sum())

    def is_read(self, snapshot: str) -> bool:
        """Return whether a job reads the snapshot now, on any node."""
        return bool(self._readers.get(snapshot))

    def jobs_on(self, snapshot: str) -> Mapping[str, int]:
        """Return node name -> number of jobs that read the snapshot there now."""
        rows = self._readers.get(snapshot, {})
        return {name: rows[row].jobs for name, row in self._rows.items() if row in rows}

    def fetching_nodes(self) -> int:
        """Return the number of nodes that fetch from origins now."""
        return int(np.count_nonzero(self._values["fetched"][: self._used]))

    def _levels(self, ages: NodeValues) -> npt.NDArray[np.int64]:
        halvings = np.maximum(ages - GRACE_SECONDS, 0.0) / TRUST_HALF_LIFE_SECONDS
        levels: npt.NDArray[np.int64] = np.rint(LEVELS * np.exp2(-halvings)).astype(np.int64)
        return levels

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._used == len(self._zone):
            for name, values in self._values.items():
                self._values[name] = np.append(values, np.zeros(len(values)))
            self._zone, self._trust_level = (
                np.append(one, np.zeros_like(one)) for one in (self._zone, self._trust_level)
            )
            self._up, self._away = (np.append(one, np.zeros_like(one)) for one in (self._up, self._away))
        self._used += 1
        return self._used - 1

    def _fill_row(self, row: int, facts: NodeFacts, now: float, before: NodeFacts | None) -> None:
        if before is not None:
            self._withdraw_node(row, before, facts.copies)
        reported_at = now - facts.age
        silence = self._now - reported_at
        level = LEVELS if silence <= GRACE_SECONDS else int(self._levels(np.array([silence]))[0])
        level = 0 if facts.state == "away" else level
        zone, old_level = self._zone_number(facts), int(self._trust_level[row])
        for snapshot, copy in facts.copies.items():
            if (spread := self._spreads.get(snapshot)) is None:
                continue
            if spread.copies.get(row) is copy:
                if level != old_level:
                    spread.change_weight(row, zone, level - old_level)
            else:
                spread.add_copy(row, zone, copy, level)
        for name in _NUMBERS:
            self._values[name][row] = getattr(facts, name)
        self._values["needed"][row] = max(facts.needed, needed_of(facts))
        self._values["jobs"][row] = sum(facts.jobs.values())
        self._values["heard"][row] = reported_at
        self._zone[row], self._trust_level[row] = zone, level
        for snapshot, jobs in facts.jobs.items():
            self._expected.pop(snapshot, None)
            if jobs:
                self._readers.setdefault(snapshot, {})[row] = _ReadingJobs(
                    jobs, frozenset(facts.names.get(snapshot, ())) or frozenset(("",))
                )
        self._up[row], self._away[row] = facts.state == "up", facts.state == "away"
        self._facts[facts.name] = facts

    def _withdraw_node(self, row: int, facts: NodeFacts, stay: Mapping[str, NodeCopy]) -> None:
        """Remove the node from all snapshots, except for copies that *stay* unchanged."""
        for snapshot in facts.jobs:
            self._expected.pop(snapshot, None)
            if (rows := self._readers.get(snapshot)) is not None:
                rows.pop(row, None)
                if not rows:
                    del self._readers[snapshot]
        zone, level = int(self._zone[row]), int(self._trust_level[row])
        for snapshot, copy in facts.copies.items():
            if snapshot in self._spreads and stay.get(snapshot) is not copy:
                self._spreads[snapshot].remove_copy(row, zone, level)

    def _zone_number(self, facts: NodeFacts) -> int:
        key = (facts.region, facts.zone)
        if key not in self._zones:
            if len(self._zones) > MAX_NODES:
                raise ValueError(
                    f"there are {MAX_NODES:,} zones already, the maximum; cannot add that of node {facts.name}"
                )
            self._zones[key] = len(self._zones)
            region = self._regions.setdefault(facts.region, len(self._regions))
            self.region_of = np.append(self.region_of, region)
        return self._zones[key]


def needed_of(facts: NodeFacts) -> int:
    """Return the bytes on the node that running jobs read, or that are pinned."""
    return sum(copy.bytes for snapshot, copy in facts.copies.items() if copy.pinned or facts.jobs.get(snapshot))
