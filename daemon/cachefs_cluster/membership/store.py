"""The store interface that membership needs: records that vanish with their nodes, and one ring.

Implementations are etcd and Leases of Kubernetes. A store works beside the membership, in its own threads or tasks,
goes on whatever fails, and reports what it finds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cachefs_cluster.membership.ring import Ring
from cachefs_cluster.membership.view import NodeRecord

# Lifetime of a record in seconds without keep-alives. A daemon may stall for a third of it without loss.
RECORD_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class StoreContent:
    """The content of a store at one moment."""

    # By id of the node.
    records: Mapping[str, NodeRecord]
    # None if the store has no ring, or an invalid one.
    ring: Ring | None
    # Names this version of the ring to the store.
    version: object = 0


class StoreListener(Protocol):
    """Receives a store's reports, on the event loop."""

    def on_content(self, stored: StoreContent) -> None:
        """Receive the store's content."""

    def on_claimed(self) -> None:
        """Note that the store has this node's record."""

    def on_id_taken(self, record: NodeRecord) -> None:
        """Note that another running node has this node's id."""

    def on_problem(self, text: str) -> None:
        """Note a problem, as one line; "" once it is over."""

    def on_fresh(self) -> None:
        """Note that the last content was still valid a moment ago."""


class RecordStore(Protocol):
    """A store of records. Used on the event loop. No call blocks."""

    @property
    def source(self) -> str:
        """The kind of the store."""

    def start(self, listener: StoreListener) -> None:
        """Start the store. Raises CachefsError if it can never work."""

    def set_record(self, record: NodeRecord) -> None:
        """Set this node's record, which the store keeps until `stop`."""

    def propose(self, ring: Ring, version: object) -> None:
        """Replace the ring, if its version is still *version*; `on_content` reports the outcome. A store with its own
        revisions uses these as epochs."""

    def refresh(self) -> None:
        """Check for changes now."""

    async def stop(self) -> None:
        """Remove this node's record, and end. Takes a few seconds at most."""
