"""What the daemon and a peer server of it tell each other over a pipe: frames as on the fetch channel."""

from typing import Final

from cachefs.messages import Message

# Bytes of a frame, at most: 1,000 members take 60 KB.
MOST_TOLD: Final = 16 << 20
MOST_SAID: Final = 1 << 20
# Complaints that a server keeps until it next says something. More are counted.
MOST_COMPLAINTS: Final = 50
# Seconds between two messages of a server, at most: it lives.
SAY_SECONDS: Final = 1.0


class Member(Message, frozen=True, array_like=True):
    """A node that may ask."""

    id: str
    # In its certificate.
    name: str


class Told(Message, frozen=True):
    """What a server has to know. It uses the last one that it was told."""

    # The cluster, this node and this run of it.
    cluster: str
    me: str
    incarnation: str
    # The ring epoch, and whether a larger one is a later one (it is not, where it is a digest of a list).
    epoch: int
    ordered: bool
    # Whoever may ask.
    members: list[Member]


class Served(Message, frozen=True, array_like=True):
    """What one node was given since its server has started."""

    node: str
    # Blocks and bytes out of tiers; blocks that were brought from the origin for it; blocks that it did not get.
    blocks: int
    bytes: int
    fetched: int
    refused: int


class Complaint(Message, frozen=True, array_like=True):
    """Something that people should know of."""

    subject: str
    text: str


class Said(Message, frozen=True):
    """What a server says once a second; the first one says that it is ready."""

    served: list[Served] = []
    complaints: list[Complaint] = []
    # Complaints for which there was no room.
    more: int = 0
    # The latest ring epoch that anybody has named whose view is newer than ours; 0 for none.
    newer_epoch: int = 0
    # Connections that are open now.
    connections: int = 0
