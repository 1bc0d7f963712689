"""The wire format of the control endpoints: paths, headers, messages, and their limits."""

from typing import Final

import msgspec

from cachefs_daemon.cluster.view import NodeRecord

CLUSTER: Final = "Cachefs-Cluster"
SENDER: Final = "Cachefs-Node"
# The sender's incarnation: which start of its daemon.
INCARNATION: Final = "Cachefs-Incarnation"
# The ring epoch of a static list, which tells which list the sender has.
LIST: Final = "Cachefs-List"
# The responding node. Responses of other nodes are rejected: an address may belong to another node by now.
ANSWERED_BY: Final = "Cachefs-Answered-By"
# With a shared secret: the incarnation of the addressee in requests, of the responder in responses; a nonce; and the
# proof that the sender knows the secret. See cachefs_daemon.cluster.secret.
ADDRESSEE: Final = "Cachefs-Addressee"
NONCE: Final = "Cachefs-Nonce"
PROOF: Final = "Cachefs-Proof"
# Status of the response to a request for another start of the daemon.
OTHER_START: Final = 421

STATE: Final = "/state"
NODE: Final = "/node"
COUNTERS: Final = "/counters"
SNAPSHOTS: Final = "/snapshots"
BLOBS: Final = "/blobs"

# Seconds that a poll waits for news in small clusters, and at most. With the latter, each of 1,000 nodes answers ten
# polls a second.
POLL_SECONDS: Final = 25.0
MOST_POLL_SECONDS: Final = 100.0
FEW_NODES: Final = 256
# Seconds for which changes are gathered before they are sent.
GATHERED: Final = 0.02
# Least seconds between two responses with nothing but progress.
PROGRESS_SECONDS: Final = 1.0
# Most bytes of all values of one node; and of a response, with names and framing.
MOST_OF_NODE: Final = 16 << 20
MOST_ANSWER: Final = 3 * MOST_OF_NODE
# Most bytes of any other small response.
MOST_SMALL: Final = 256 << 10

WireChange = tuple[str, str, bytes | None]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Changes of one kind (see cachefs_daemon.sharing.own_part.Page)."""

    full: bool
    changes: list[WireChange]
    version: int


class StateAnswer(msgspec.Struct, frozen=True):
    """News of the responding node."""

    record: NodeRecord
    facts: Part
    # None: the receiver does not follow the progress.
    progress: Part | None = None


def poll_seconds(nodes: int) -> float:
    """Return how many seconds a poll waits for news, in a cluster of *nodes* nodes."""
    return min(max(POLL_SECONDS, POLL_SECONDS * nodes / FEW_NODES), MOST_POLL_SECONDS)
