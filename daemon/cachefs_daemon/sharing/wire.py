"""What goes over the control endpoints: paths, headers, answers, and how large and how long each may be."""

from typing import Final

import msgspec

from cachefs_daemon.cluster.view import NodeRecord

CLUSTER: Final = "Cachefs-Cluster"
SENDER: Final = "Cachefs-Node"
# Of the sender: which start of its daemon.
INCARNATION: Final = "Cachefs-Incarnation"
# The ring epoch of a static list: says which list the sender has.
LIST: Final = "Cachefs-List"
# An answer of another node than the one that was meant is none: its address may be another's by now.
ANSWERED_BY: Final = "Cachefs-Answered-By"
# Where nodes share a secret: the start of the addressee's daemon that is meant, or that answers; a nonce; and what
# proves that who asks, or answers, knows the secret. See cachefs_daemon.cluster.secret.
ADDRESSEE: Final = "Cachefs-Addressee"
NONCE: Final = "Cachefs-Nonce"
PROOF: Final = "Cachefs-Proof"
# The status of an answer to a request that was meant for another start of the daemon.
OTHER_START: Final = 421

STATE: Final = "/state"
NODE: Final = "/node"
COUNTERS: Final = "/counters"
SNAPSHOTS: Final = "/snapshots"
BLOBS: Final = "/blobs"

# Seconds that a poll waits for news where there are few nodes, and at most. With 1,000 nodes each answers ten in a
# second for nothing at the latter.
POLL_SECONDS: Final = 25.0
MOST_POLL_SECONDS: Final = 100.0
FEW_NODES: Final = 256
# Seconds for which changes are gathered before they are sent.
GATHERED: Final = 0.02
# Seconds between two answers that only say how far consumers are.
PROGRESS_SECONDS: Final = 1.0
# Bytes of all values of one node; and of an answer, with names and all that is around the values.
MOST_OF_NODE: Final = 16 << 20
MOST_ANSWER: Final = 3 * MOST_OF_NODE
# Bytes of any other small answer.
MOST_SMALL: Final = 256 << 10

WireChange = tuple[str, str, bytes | None]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Changes of one kind. See cachefs_daemon.sharing.own_part.Page."""

    full: bool
    changes: list[WireChange]
    version: int


class StateAnswer(msgspec.Struct, frozen=True):
    """News of the node that answers."""

    record: NodeRecord
    facts: Part
    # None: the receiver does not follow it.
    progress: Part | None = None


def poll_seconds(nodes: int) -> float:
    """How long a poll waits for news, in a cluster of so many nodes."""
    return min(max(POLL_SECONDS, POLL_SECONDS * nodes / FEW_NODES), MOST_POLL_SECONDS)
