"""Records which nodes lack a snapshot, so that they are not asked for its blocks.

Such a node is skipped in rendezvous order. It tells all reading nodes the same, so all turn to the same next node. Only
the first node asked may wait for the snapshot: the waits of all nodes would add up. A node that lacks a snapshot
remembers which nodes asked it for blocks: as they read these blocks, they may have them later, and are asked before the
origin. So each block still leaves the origin once.
"""

import asyncio
from typing import Final

# Seconds for which such a response holds. Then the node is asked again, since the snapshot may have arrived.
MISSING_SECONDS: Final = 5.0
# Seconds for which a lack is remembered: meanwhile no node waits for the snapshot again, and the nodes that read its
# blocks may have them.
REMEMBERED_SECONDS: Final = 600.0
# Snapshots remembered, and reading nodes remembered per snapshot.
MAX_SNAPSHOTS: Final = 1024
MAX_READING_NODES: Final = 64

_NO_NODES: Final[frozenset[str]] = frozenset()


class MissingSnapshots:
    """Nodes that lack snapshots, and nodes that read without this one. Used on the event loop."""

    def __init__(self) -> None:
        self._until: dict[str, dict[str, float]] = {}  # by snapshot and node id: expiry in loop time
        self._last_reports: dict[str, float] = {}  # by snapshot: loop time of the last response, latest last
        # By snapshot that this node lacked, and id of the asking node: loop time, latest last.
        self._reading_nodes: dict[str, dict[str, float]] = {}

    def note_missing(self, snapshot: str, node_id: str) -> None:
        """Record that the node has just said that it lacks the snapshot."""
        now = asyncio.get_running_loop().time()
        self._last_reports.pop(snapshot, None)
        self._last_reports[snapshot] = now
        self._until.setdefault(snapshot, {})[node_id] = now + MISSING_SECONDS
        if len(self._last_reports) > MAX_SNAPSHOTS:
            oldest = next(iter(self._last_reports))
            del self._last_reports[oldest]
            self._until.pop(oldest, None)

    def has_recent_report(self, snapshot: str) -> bool:
        """Return whether any node said lately that it lacks the snapshot."""
        noted = self._last_reports.get(snapshot)
        return noted is not None and asyncio.get_running_loop().time() - noted < REMEMBERED_SECONDS

    def nodes_without(self, snapshot: str) -> frozenset[str]:
        """Return the ids of the nodes known to lack the snapshot."""
        return _nodes_since(self._until, snapshot, 0.0)

    def note_reading_node(self, snapshot: str, node_id: str) -> None:
        """Record that this node has just told the other that it lacks the snapshot."""
        readers = self._reading_nodes.pop(snapshot, {})
        readers.pop(node_id, None)
        readers[node_id] = asyncio.get_running_loop().time()
        if len(readers) > MAX_READING_NODES:
            del readers[next(iter(readers))]
        self._reading_nodes[snapshot] = readers
        if len(self._reading_nodes) > MAX_SNAPSHOTS:
            del self._reading_nodes[next(iter(self._reading_nodes))]

    def nodes_reading(self, snapshot: str) -> frozenset[str]:
        """Return the ids of the nodes that lately read blocks of the snapshot without this node, which lacked it."""
        return _nodes_since(self._reading_nodes, snapshot, REMEMBERED_SECONDS)


def _nodes_since(times: dict[str, dict[str, float]], snapshot: str, ago: float) -> frozenset[str]:
    """Return the ids of nodes whose time is less than *ago* seconds past, and forget the snapshot's other nodes. times:
    loop time by snapshot and node id."""
    if not times or snapshot not in times:
        return _NO_NODES
    moment = asyncio.get_running_loop().time() - ago
    later = {node: when for node, when in times[snapshot].items() if when > moment}
    if not later:
        del times[snapshot]
        return _NO_NODES
    times[snapshot] = later
    return frozenset(later)
