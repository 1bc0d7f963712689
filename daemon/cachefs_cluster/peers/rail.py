"""The client's state of one rail: one of the addresses of a peer, with its connections, health and measurements."""

from dataclasses import dataclass, field
from typing import Final

from cachefs.backoff import Backoff
from cachefs.planning.requests.rails import RailRate
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers.connection import PeerConnection

# Seconds to the first probe after a failure, and the longest pause between probes; pauses double. Up to a quarter is
# added at random, so that the nodes of a cluster do not probe in step.
FIRST_PAUSE: Final = 0.25
MAX_PAUSE: Final = 30.0
_SPREAD: Final = 0.25


class RailHealth:
    """The health of one rail: whether it gets requests.

    A dead rail must not cost a timeout per requested block, so one failure of its connection stops all requests over
    it. It is then probed, on a separate connection and with growing pauses, and gets requests again once a probe
    succeeds. *now* is in seconds of one monotonic clock, *chance* a random number from 0 to 1.
    """

    __slots__ = ("_probes", "is_out_of_use", "probe_at", "reason")

    def __init__(self) -> None:
        self.is_out_of_use = False
        self.reason = ""  # why it gets no requests
        self.probe_at = 0.0  # when to probe it next, while it gets no requests
        self._probes = Backoff(FIRST_PAUSE, MAX_PAUSE)

    def note_failure(self, reason: str, now: float, chance: float) -> bool:
        """Record that a connection could not be made, broke, or fell silent. Return whether the rail was in use."""
        first = not self.is_out_of_use
        if first:
            self.is_out_of_use, self.reason = True, reason
            self._schedule_probe(now, chance)
        return first

    def note_probe(self, *, alive: bool, now: float, chance: float) -> None:
        """Record the end of a probe. Until the peer answers a request too, its next failure gets a longer pause."""
        if alive:
            self.is_out_of_use = False
        else:
            self._schedule_probe(now, chance)

    def note_response(self) -> None:
        """Record that the peer answered a request."""
        self.is_out_of_use = False
        self._probes.reset()

    def _schedule_probe(self, now: float, chance: float) -> None:
        self.probe_at = now + self._probes.note_failure(now) * (1 + _SPREAD * chance)


@dataclass(slots=True, eq=False)
class Rail:
    """State of one rail."""

    # The peer's record, with this address only.
    record: NodeRecord
    health: RailHealth = field(default_factory=RailHealth)
    # Idle connections, the last used at the end; and the number being opened.
    idle_connections: list[PeerConnection] = field(default_factory=list)
    connecting_count: int = 0
    rate: RailRate = field(default_factory=RailRate)
    # When it was last used, in loop time.
    used_at: float = 0.0
    # The network card of this node that its last connection goes through; "" before the first one.
    card: str = ""
    # Bytes of blocks that have arrived over it.
    received_bytes: int = 0
    # It is silent, and is being probed: other rails are preferred.
    is_suspect: bool = False

    def close_idle(self) -> None:
        """Close all idle connections."""
        for connection in self.idle_connections:
            connection.abort()
        self.idle_connections.clear()
