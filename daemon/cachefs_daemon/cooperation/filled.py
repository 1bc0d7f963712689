"""Who has got all that is its to keep, since other members count for placement."""

import hashlib
from collections.abc import Iterable, Sequence

from cachefs_daemon.cluster.view import ClusterView, NodeRecord
from cachefs_daemon.sharing.sections import FILLING, FILLING_NAME
from cachefs_daemon.sharing.state import SharedState


def ring_digest(ids: Sequence[str]) -> str:
    """By which nodes see that they mean the same members: 32 hex digits."""
    return hashlib.blake2b(" ".join(ids).encode(), digest_size=16).hexdigest()


def not_filled(
    shared: SharedState, view: ClusterView, nodes: Iterable[NodeRecord]
) -> list[tuple[NodeRecord, int, int]]:
    """Which of these other nodes lack something still, with how many blocks and bytes. Of those that have not said so
    for the members that count now nothing is known, and they lack 0 and 0."""
    wanted = ring_digest([one.id for one in view.present])
    found = []
    for one in nodes:
        facts = shared.value(FILLING, one.id, FILLING_NAME)
        if facts is None or facts.ring != wanted:
            found.append((one, 0, 0))
        elif facts.blocks:
            found.append((one, facts.blocks, facts.bytes))
    return found
