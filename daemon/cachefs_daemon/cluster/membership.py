"""What every kind of membership gives to the other parts of a node; the kind that is none."""

from collections.abc import Callable
from typing import Protocol

from cachefs_daemon.cluster.view import ClusterView, NodeRecord, State

Listener = Callable[[ClusterView], None]


class Membership(Protocol):
    """Tells who is in the cluster, and tells the cluster of this node. Used on the event loop, but for `view`."""

    @property
    def view(self) -> ClusterView:
        """The cluster as it is known now. May be asked from any thread."""

    def listen(self, callback: Listener) -> None:
        """Call *callback*, on the event loop, with each view from the next one on."""

    async def start(self) -> None:
        """Learn the first view, or go on without it where its source does not answer within seconds.

        Raises ConfigError where another node that runs has this node's id.
        """

    async def announce(self, state: State) -> None:
        """Tell the cluster the state of this node. Where the source is away it learns it as soon as it is back."""

    async def refresh(self) -> None:
        """Ask the source, since a peer said that our epoch is old. Takes at most a second, and nothing where it was
        asked a moment ago."""

    def heard(self, node_id: str, incarnation: str = "") -> None:
        """A peer has answered, which gave this incarnation. For memberships that learn from nobody else who is up."""

    def lost(self, node_id: str) -> None:
        """A peer has not answered. For the same."""

    def learned(self, record: NodeRecord) -> None:
        """What a peer says of itself. For the same."""

    async def leave(self) -> None:
        """This node has given away all that it kept, and is no member any more, while its daemon goes on: its record
        goes, and from then on the view has no other node. Only a daemon that is started anew joins again. With a list
        it stays a member, on which nothing is placed."""

    async def stop(self) -> None:
        """The daemon ends: this node's record goes at once. It may be called at any time, and again."""


class NoMembership:
    """A node that is in no cluster. It opens no port and starts nothing."""

    view = ClusterView()

    def listen(self, callback: Listener) -> None: ...

    async def start(self) -> None: ...

    async def announce(self, state: State) -> None: ...

    async def refresh(self) -> None: ...

    def heard(self, node_id: str, incarnation: str = "") -> None: ...

    def lost(self, node_id: str) -> None: ...

    def learned(self, record: NodeRecord) -> None: ...

    async def leave(self) -> None: ...

    async def stop(self) -> None: ...
