"""Detects that two daemons claim to be one node, as when two machines were given one name of a static list.

A restarted node asks with another incarnation, and its former incarnation is never heard again. If the former one is
heard after the new one, both daemons run.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cachefs_cluster.membership.view import NodeRecord

log = logging.getLogger(__name__)

# Incarnations remembered per node.
_MAX_INCARNATIONS: Final = 8
# Seconds for which the conflict is reported after it was noticed: a poll takes 100 s at most.
REMARK_SECONDS: Final = 240.0
# Seconds between two log lines about one node.
_LOG_SECONDS: Final = 600.0


@dataclass(slots=True)
class _Claim:
    """The incarnations that claim one node's id."""

    # Addresses by incarnation, in the order in which they were first heard.
    addresses: dict[str, str] = field(default_factory=dict)
    remark: str = ""
    noticed_at: float = 0.0
    logged_at: float = -_LOG_SECONDS


class IdentityConflicts:
    """The conflicting claims of all members. Times are of one clock."""

    def __init__(self) -> None:
        self._claims: dict[str, _Claim] = {}  # by id: members only

    def note_request(self, node: NodeRecord, incarnation: str, address: str, now: float) -> None:
        """Record a request of a daemon that claims to be this member."""
        if not incarnation:
            return
        claim = self._claims.setdefault(node.id, _Claim())
        if incarnation not in claim.addresses:
            claim.addresses[incarnation] = address
            if len(claim.addresses) > _MAX_INCARNATIONS:
                del claim.addresses[next(iter(claim.addresses))]
            return
        newest = next(reversed(claim.addresses))
        if incarnation == newest:
            return
        claim.noticed_at = now
        claim.remark = (
            f"two daemons claim to be node {node.name}, at {claim.addresses[incarnation]} and at "
            f"{claim.addresses[newest]}; give each machine its own [cluster] name"
        )
        if now - claim.logged_at >= _LOG_SECONDS:
            claim.logged_at = now
            log.warning("%s", claim.remark)

    def remarks(self, now: float) -> Iterator[str]:
        """Yield a line for each current conflict."""
        for claim in self._claims.values():
            if claim.remark and now - claim.noticed_at < REMARK_SECONDS:
                yield claim.remark
