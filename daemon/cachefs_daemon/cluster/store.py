"""What membership needs of a store that all nodes share: records that vanish with their nodes, and one ring.

etcd is one, Leases of Kubernetes are another. A store does its work beside the membership, in threads or tasks of its
own, goes on whatever fails, and tells what it finds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cachefs_daemon.cluster.ring import Ring
from cachefs_daemon.cluster.view import NodeRecord

# Seconds that a record stays when nobody keeps it. A daemon that stalls for as long as a third of it loses nothing.
RECORD_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Stored:
    """All that is in a store at one moment."""

    # By id of the node.
    records: Mapping[str, NodeRecord]
    # None where the store has none, or one that is nonsense.
    ring: Ring | None
    # Names this version of the ring to the store.
    version: object = 0


class StoreListener(Protocol):
    """Is told what a store finds, on the event loop."""

    def stored(self, stored: Stored) -> None:
        """What is there now."""

    def claimed(self) -> None:
        """This node's record is there."""

    def taken(self, record: NodeRecord) -> None:
        """Another node that runs has this node's id."""

    def problem(self, text: str) -> None:
        """What is wrong, in a line; empty: nothing any more."""

    def fresh(self) -> None:
        """What `stored` said last was still so a moment ago."""


class RecordStore(Protocol):
    """Used on the event loop. No call waits."""

    @property
    def source(self) -> str:
        """Which kind of store it is."""

    def start(self, listener: StoreListener) -> None:
        """Begin. Raises CachefsError where it never can."""

    def put(self, record: NodeRecord) -> None:
        """From now on this node's record is this one, which the store keeps until `stop`."""

    def propose(self, ring: Ring, version: object) -> None:
        """Replace the ring, if its version is still this one. `stored` says whether it was. A store with revisions of
        its own numbers epochs by these."""

    def refresh(self) -> None:
        """Look now."""

    async def stop(self) -> None:
        """Remove this node's record, and end. Takes a few seconds at most."""
