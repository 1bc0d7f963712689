"""Which nodes have said that they do not have a snapshot, so that blocks of that snapshot are not asked of them.

Such a node is passed over in rendezvous order. All nodes that read hear the same of it, so all turn to the same next
node. Only the first node that is asked may wait for the snapshot: the waits of all nodes would add up. A node that
lacks a snapshot remembers which nodes asked it for blocks: they read these blocks, so they may have them later, and are
asked before the origin. So each block still leaves the origin once.
"""

import asyncio
from typing import Final

# Seconds for which such an answer holds. Then the node is asked again, since the snapshot may have come.
LACKS_SECONDS: Final = 5.0
# Seconds for which nodes remember that one of them has lacked a snapshot: no node is to wait for it again, and the
# nodes that read its blocks meanwhile may have them.
REMEMBERED_SECONDS: Final = 600.0
# Snapshots of which this is remembered, and nodes that have asked this one for blocks of one of them.
MOST_SNAPSHOTS: Final = 1024
MOST_READERS: Final = 64

_NO_NODES: Final[frozenset[str]] = frozenset()


class SnapshotLacks:
    """Used on the event loop."""

    def __init__(self) -> None:
        self._until: dict[str, dict[str, float]] = {}  # by snapshot and id of the node, in loop time
        self._noted: dict[str, float] = {}  # by snapshot: loop time of the last answer, latest at the end
        # By snapshot that this node has lacked, and id of the node that was told so: loop time, latest at the end.
        self._readers: dict[str, dict[str, float]] = {}

    def note(self, snapshot: str, node_id: str) -> None:
        """That node has just said that it does not have the snapshot."""
        now = asyncio.get_running_loop().time()
        self._noted.pop(snapshot, None)
        self._noted[snapshot] = now
        self._until.setdefault(snapshot, {})[node_id] = now + LACKS_SECONDS
        if len(self._noted) > MOST_SNAPSHOTS:
            oldest = next(iter(self._noted))
            del self._noted[oldest]
            self._until.pop(oldest, None)

    def is_known(self, snapshot: str) -> bool:
        """Has any node said lately that it does not have the snapshot?"""
        noted = self._noted.get(snapshot)
        return noted is not None and asyncio.get_running_loop().time() - noted < REMEMBERED_SECONDS

    def nodes(self, snapshot: str) -> frozenset[str]:
        """Ids of the nodes that lack the snapshot, as far as is known."""
        return _nodes_later(self._until, snapshot, 0.0)

    def note_reader(self, snapshot: str, node_id: str) -> None:
        """This node has just told that node that it does not have the snapshot."""
        readers = self._readers.pop(snapshot, {})
        readers.pop(node_id, None)
        readers[node_id] = asyncio.get_running_loop().time()
        if len(readers) > MOST_READERS:
            del readers[next(iter(readers))]
        self._readers[snapshot] = readers
        if len(self._readers) > MOST_SNAPSHOTS:
            del self._readers[next(iter(self._readers))]

    def readers(self, snapshot: str) -> frozenset[str]:
        """Ids of the nodes that have read blocks of the snapshot lately without this node, as that lacked it."""
        return _nodes_later(self._readers, snapshot, REMEMBERED_SECONDS)


def _nodes_later(times: dict[str, dict[str, float]], snapshot: str, ago: float) -> frozenset[str]:
    """Return the ids of the nodes whose time is later than so many seconds *ago*, and forget the other nodes of the
    snapshot. times: by snapshot and id of the node, in loop time."""
    if not times or snapshot not in times:
        return _NO_NODES
    moment = asyncio.get_running_loop().time() - ago
    later = {node: when for node, when in times[snapshot].items() if when > moment}
    if not later:
        del times[snapshot]
        return _NO_NODES
    times[snapshot] = later
    return frozenset(later)
