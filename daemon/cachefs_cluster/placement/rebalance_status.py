"""Tells which nodes have got all their blocks since the ring changed."""

import hashlib
from collections.abc import Iterable, Sequence

from cachefs_cluster.membership.view import ClusterView, NodeRecord
from cachefs_cluster.sharing.sections import REBALANCE, REBALANCE_NAME
from cachefs_cluster.sharing.state import SharedState


def ring_digest(ids: Sequence[str]) -> str:
    """Return a digest by which nodes compare memberships: 32 hex digits."""
    return hashlib.blake2b(" ".join(ids).encode(), digest_size=16).hexdigest()


def incomplete_nodes(
    shared: SharedState, view: ClusterView, nodes: Iterable[NodeRecord]
) -> list[tuple[NodeRecord, int, int]]:
    """Return the nodes that still lack blocks, with counts of blocks and bytes; both are 0 for nodes that have not
    reported for the current ring."""
    wanted = ring_digest([one.id for one in view.available_members])
    found = []
    for one in nodes:
        facts = shared.remote_value(REBALANCE, one.id, REBALANCE_NAME)
        if facts is None or facts.ring != wanted:
            found.append((one, 0, 0))
        elif facts.blocks:
            found.append((one, facts.blocks, facts.bytes))
    return found
