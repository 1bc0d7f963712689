"""Messages between the daemon and a peer server over a pipe, framed as on the fetch channel."""

from typing import Final

import msgspec

from cachefs.messages import Message
from cachefs_cluster.membership.view import ClusterView

# Most bytes of a frame: 1,000 members take 60 KB.
MAX_STATE_BYTES: Final = 16 << 20
MAX_REPORT_BYTES: Final = 1 << 20
# Complaints that a server keeps until its next message. Further ones are only counted.
MAX_FAULTS: Final = 50
# Most seconds between two messages of a live server.
REPORT_SECONDS: Final = 1.0
# Seconds between two reports of served blocks to the daemon, and most blocks in one report. Copies change hands by
# these reports; blocks that are not reported are found out as the other nodes read on.
SERVED_REPORT_SECONDS: Final = 0.1
MAX_SERVED_KEYS: Final = 32768


class ServerStateMessage(Message, frozen=True):
    """The state that a server needs. The last message received applies."""

    # Name of the cluster, and its view as the daemon knows it. None: unchanged; the daemon is alive.
    cluster: str
    view: ClusterView | None = None
    # The cluster's secret, sent with the view; empty without one.
    secret: bytes = b""


class ServedTotals(msgspec.Struct, frozen=True, array_like=True):
    """Counts what one node was served since the server started."""

    node: str
    # Blocks and bytes; those of the blocks that were fetched from the origin for the node; blocks that it did not get.
    blocks: int = 0
    bytes: int = 0
    fetched: int = 0
    refused: int = 0


class ServerFault(Message, frozen=True, array_like=True):
    """A problem for the daemon's error log."""

    subject: str
    text: str


class ServerReport(Message, frozen=True):
    """A message of a server: a full one every second, the first of which tells that it is ready; and brief ones in
    between, with the blocks that other nodes received, or with the question whether the daemon is alive."""

    brief: bool = False
    # Asks for a `ServerStateMessage`, as proof that the daemon is alive.
    asks: bool = False
    # By id of the node: keys of the blocks that it received since the last message, concatenated.
    handed: dict[str, bytes] = msgspec.field(default_factory=dict)
    served: tuple[ServedTotals, ...] = ()
    complaints: tuple[ServerFault, ...] = ()
    # Complaints that did not fit.
    more: int = 0
    # Has a node with a newer view asked?
    is_behind: bool = False
    connections: int = 0
