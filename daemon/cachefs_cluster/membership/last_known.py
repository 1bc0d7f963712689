"""The last known state of the cluster, on disk: for a start while the shared store does not answer.

The store cannot change meanwhile, so the ring in this file is mostly the one that all other nodes have. If not, its
epoch tells them.
"""

import logging
from pathlib import Path
from typing import Final

import msgspec

from cachefs_cluster.membership.ring import MAX_NODES, Ring, ring_nodes
from cachefs_cluster.membership.view import NodeRecord, check_record

log = logging.getLogger(__name__)

FILE_NAME: Final = "members.json"


class LastKnownCluster(msgspec.Struct, frozen=True):
    """Ring and records of one moment."""

    # Id of this node: another node ignores a copied file.
    me: str
    epoch: int
    ring: tuple[NodeRecord, ...]
    records: tuple[NodeRecord, ...]


def save_last_known(state_dir: Path, known: LastKnownCluster) -> None:
    """Write the file without fsync: a torn file is ignored. Raises OSError; the old file then stays."""
    fresh = state_dir / f"{FILE_NAME}.new"
    fresh.write_bytes(msgspec.json.encode(known))
    fresh.replace(state_dir / FILE_NAME)


def load_last_known(state_dir: Path, me: str) -> tuple[Ring, dict[str, NodeRecord]] | None:
    """Load the ring, and the records by id; None if there are none."""
    path = state_dir / FILE_NAME
    try:
        known = msgspec.json.decode(path.read_bytes(), type=LastKnownCluster)
        for record in (*known.ring, *known.records):
            check_record(record)
        if max(len(known.ring), len(known.records)) > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} nodes")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s cannot be used (%s) and is ignored; other nodes are unknown for now", path, error)
        return None
    if known.me != me:
        return None
    return Ring(known.epoch, ring_nodes(known.ring)), {record.id: record for record in known.records}
