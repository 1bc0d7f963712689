"""The wire format of the control endpoints: paths, headers, messages, and their limits."""

from typing import Final

import msgspec

from cachefs_cluster.membership.view import NodeRecord

CLUSTER: Final = "Cachefs-Cluster"
SENDER: Final = "Cachefs-Node"
# The sender's incarnation: which start of its daemon.
INCARNATION: Final = "Cachefs-Incarnation"
# The ring epoch of a static list, which tells which list the sender has.
LIST: Final = "Cachefs-List"
# The responding node. Responses of other nodes are rejected: an address may belong to another node by now.
RESPONDER: Final = "Cachefs-Answered-By"
# With a shared secret: the incarnation of the addressee in requests, of the responder in responses; a nonce; and the
# proof that the sender knows the secret. See cachefs_cluster.membership.secret.
ADDRESSEE: Final = "Cachefs-Addressee"
NONCE: Final = "Cachefs-Nonce"
PROOF: Final = "Cachefs-Proof"
# Status of the response to a request for another start of the daemon.
OTHER_INCARNATION: Final = 421

STATE: Final = "/state"
NODE: Final = "/node"
COUNTERS: Final = "/counters"
SNAPSHOTS: Final = "/snapshots"
BLOBS: Final = "/blobs"

# Seconds that a poll waits for news in small clusters, and at most. With the latter, each of 1,000 nodes answers ten
# polls a second.
POLL_SECONDS: Final = 25.0
MAX_POLL_SECONDS: Final = 100.0
FEW_NODES: Final = 256
# Seconds for which changes are gathered before they are sent.
GATHER_SECONDS: Final = 0.02
# Least seconds between two responses with nothing but progress.
PROGRESS_SECONDS: Final = 1.0
# Most bytes of all values of one node; and of a response, with names and framing.
MAX_NODE_BYTES: Final = 16 << 20
MAX_RESPONSE: Final = 3 * MAX_NODE_BYTES
# Most bytes of any other small response.
MAX_SMALL_RESPONSE: Final = 256 << 10

WireChange = tuple[str, str, bytes | None]


class StateChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes of one kind (see cachefs_cluster.sharing.local_state.ChangesPage)."""

    full: bool
    changes: list[WireChange]
    version: int


class StateResponse(msgspec.Struct, frozen=True):
    """News of the responding node."""

    record: NodeRecord
    facts: StateChanges
    # None: the receiver does not follow the progress.
    progress: StateChanges | None = None


def poll_seconds(nodes: int) -> float:
    """Return how many seconds a poll waits for news, in a cluster of *nodes* nodes."""
    return min(max(POLL_SECONDS, POLL_SECONDS * nodes / FEW_NODES), MAX_POLL_SECONDS)
