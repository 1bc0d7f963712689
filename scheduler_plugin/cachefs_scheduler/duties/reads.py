"""When copies were read last, and who is about to read them: what least recently used means."""

from collections.abc import Collection
from typing import Final

from cachefs_scheduler.duties.book import Book

# Seconds after a node has counted reads for which a snapshot is in use. Nodes count every 15 s.
IN_USE: Final = 60.0

# Pairs of a node and a snapshot whose last reads are remembered.
MOST: int = 200_000


class Reads:
    """Used on the event loop. Times are monotonic seconds."""

    def __init__(self, book: Book) -> None:
        self._book = book
        # By node and snapshot: when a job was seen to read it there last, or it was first seen.
        self._last: dict[str, dict[str, float]] = {}
        self._count = 0
        self._latest: dict[str, float] = {}  # the same by snapshot, of all nodes
        self._counted: dict[str, dict[str, int]] = {}  # by node and snapshot: SnapshotReport.reads
        self._counting: dict[str, float] = {}  # by snapshot: when that number was seen to grow last

    def note(self, node: str, snapshot: str, when: float) -> None:
        """It was read there."""
        self._latest[snapshot] = max(when, self._latest.get(snapshot, when))
        of_node = self._last.setdefault(node, {})
        if snapshot not in of_node:
            if self._count >= MOST:
                return
            self._count += 1
        of_node[snapshot] = when

    def last(self, node: str, snapshot: str, now: float) -> float:
        """When it was read there last; *now* where nobody knows."""
        return self._last.get(node, {}).get(snapshot, now)

    def latest(self, snapshot: str, now: float) -> float:
        """When any node read it last; *now* where none is known to have."""
        return self._latest.get(snapshot, now)

    def count(self, node: str, snapshot: str, reads: int, now: float) -> bool:
        """Take what the node's daemon has counted of its readers. Returns whether it has grown."""
        of_node = self._counted.setdefault(node, {})
        known, of_node[snapshot] = of_node.get(snapshot, reads), reads
        if known != reads:
            self._counting[snapshot] = now
        return known != reads

    def is_in_use(self, snapshot: str, now: float) -> bool:
        """Does a mount of any node read it, whether a job has published that or not?"""
        return now - self._counting.get(snapshot, -IN_USE) < IN_USE

    def keep(self, node: str, snapshots: set[str]) -> None:
        """The node has these, and no others."""
        of_node = self._counted.get(node, {})
        for one in of_node.keys() - snapshots:
            del of_node[one]
        gone = [one for one in self._last.get(node, {}) if one not in snapshots]
        for one in gone:
            del self._last[node][one]
        self._count -= len(gone)
        if not self._last.get(node, True):
            del self._last[node]

    def keep_only(self, nodes: set[str], snapshots: Collection[str]) -> None:
        """There are these nodes and snapshots, and no others."""
        self._latest = {one: when for one, when in self._latest.items() if one in snapshots}
        self._counting = {one: when for one, when in self._counting.items() if one in snapshots}
        for node in self._counted.keys() - nodes:
            del self._counted[node]
        for node in self._last.keys() - nodes:
            self._count -= len(self._last.pop(node))

    def is_placed(self, node: str, snapshot: str) -> bool:
        """Was a job placed there that reads it? It may not have begun."""
        return any(node in one.nodes for one in self._book.of(snapshot))

    def placed(self, nodes: Collection[str]) -> dict[str, set[str]]:
        """The same of some nodes: by node, the snapshots. One look at all jobs, of which there may be 10,000."""
        found: dict[str, set[str]] = {node: set() for node in nodes}
        for one in self._book:
            for node in one.nodes:
                if node in found:
                    found[node].add(one.snapshot)
        return found

    def all(self) -> list[tuple[str, str, float]]:
        """Node, snapshot and time of each."""
        return [(node, *one) for node, of_node in self._last.items() for one in of_node.items()]
