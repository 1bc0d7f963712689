"""What the daemon and a peer server of it tell each other over a pipe: frames as on the fetch channel."""

from typing import Final

import msgspec

from cachefs.messages import Message
from cachefs_daemon.cluster.view import ClusterView

# Bytes of a frame, at most: 1,000 members take 60 KB.
MOST_TOLD: Final = 16 << 20
MOST_SAID: Final = 1 << 20
# Complaints that a server keeps until it next says something. More are counted.
MOST_COMPLAINTS: Final = 50
# Seconds between two messages of a server, at most: it lives.
SAY_SECONDS: Final = 1.0
# Seconds after which the daemon learns which blocks others were given, and how many of them it learns in one message.
# Copies change hands by that; what it does not learn it finds out as the others read on.
HANDED_SECONDS: Final = 0.1
MOST_HANDED: Final = 32768


class Told(Message, frozen=True):
    """What a server has to know. It uses the last one that it was told."""

    # Name of the cluster, and the cluster as its daemon knows it. None: as before; the daemon lives.
    cluster: str
    view: ClusterView | None = None
    # The cluster's secret, with the view; empty where there is none.
    secret: bytes = b""


class Served(msgspec.Struct, frozen=True, array_like=True):
    """What one node was given since its server has started."""

    node: str
    # Blocks and bytes; of these blocks, those that were brought from the origin for it; blocks that it did not get.
    blocks: int = 0
    bytes: int = 0
    fetched: int = 0
    refused: int = 0


class Complaint(Message, frozen=True, array_like=True):
    """Something that people should know of."""

    subject: str
    text: str


class Said(Message, frozen=True):
    """What a server says once a second; the first one says that it is ready. Between these, as soon as others have got
    blocks, only which (brief); and while others wait for blocks that the daemon brings, whether it lives."""

    brief: bool = False
    # Does the daemon live? It answers with a `Told`.
    asks: bool = False
    # By id of the node, the keys of the blocks that it has got since the last message, one after the other.
    handed: dict[str, bytes] = msgspec.field(default_factory=dict)
    served: tuple[Served, ...] = ()
    complaints: tuple[Complaint, ...] = ()
    # Complaints for which there was no room.
    more: int = 0
    # Has somebody asked whose view is newer than ours?
    is_behind: bool = False
    # Connections that are open now.
    connections: int = 0
