"""The interface of all kinds of membership."""

from collections.abc import Callable
from typing import Protocol

from cachefs_cluster.membership.view import ClusterView, NodeRecord, State

Listener = Callable[[ClusterView], None]


class Membership(Protocol):
    """Tells which nodes are in the cluster, and announces this node. Used on the event loop, but for `view`."""

    @property
    def view(self) -> ClusterView:
        """The cluster as it is known now. May be read from any thread."""

    def add_listener(self, callback: Listener) -> None:
        """Call *callback*, on the event loop, with each new view."""

    async def start(self) -> None:
        """Learn the first view, or go on without it if the source does not answer within seconds.

        Raises ConfigError if another running node has this node's id.
        """

    async def announce(self, state: State) -> None:
        """Announce the state of this node. A source that is away learns it as soon as it is back."""

    async def refresh(self) -> None:
        """Ask the source for changes, since a peer reported a newer epoch. Takes at most a second, and does nothing if
        the source was asked a moment ago."""

    def note_response(self, node_id: str, incarnation: str = "") -> None:
        """Note that a peer answered, with this incarnation. For memberships without another source of liveness."""

    def note_silence(self, node_id: str) -> None:
        """Note that a peer did not answer. For the same memberships."""

    def note_record(self, record: NodeRecord) -> None:
        """Note the record that a peer sent of itself. For the same memberships."""

    async def leave(self) -> None:
        """Leave the cluster after this node has handed over all its blocks, while its daemon goes on: its record is
        removed, and the view has no other node from then on. Only a restarted daemon joins again. In a static list the
        node stays a member, on which nothing is placed."""

    async def stop(self) -> None:
        """Remove this node's record at once: the daemon ends. May be called at any time, and again."""
