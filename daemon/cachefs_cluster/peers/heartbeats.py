"""Heartbeats for nodes that wait for blocks which the daemon behind a peer server fetches.

An origin may take seconds, so that the lack of a block says little about a peer. Waiting nodes get a heartbeat every
0.1 s while this daemon runs, on one of their connections over each rail; if the daemon or its node hangs, they learn it
in half a second and ask other sources.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from cachefs_cluster.peers.daemon_fetch_client import FetchOutcomes
from cachefs_cluster.peers.protocol import HEARTBEAT_SECONDS

# Seconds within which a live daemon answers. On a machine that is not overloaded, 99 of 100 waits of its loop take 17
# ms at most.
ALIVE_SECONDS: Final = 0.25
# The same for a probe.
RESPONSE_SECONDS: Final = 1.0
# Seconds until the daemon is asked again after it did not answer.
RETRY_SECONDS: Final = 1.0


class Heartbeats:
    """Tracks whether the daemon is alive, and which connection of each waiter sends the heartbeats. A waiter is a node
    over one rail. Thread-safe."""

    def __init__(self, request_message: Callable[[], None]) -> None:
        """request_message: makes the daemon send a message, after which `note_message` is called."""
        self._request_message = request_message
        self._lock = threading.Lock()
        # Queues of waiting connections by waiter. The first connection of each sends the heartbeats.
        self._waiting: dict[str, list[FetchOutcomes]] = {}
        # When the daemon was asked last, and when first since its last answer, in monotonic seconds.
        self._requested_at = self._unanswered_since = 0.0
        self._answered = threading.Event()
        self._answered.set()

    def add_waiter(self, waiter: str, coming: FetchOutcomes) -> None:
        """Add a connection of the waiter that waits for the daemon."""
        with self._lock:
            self._waiting.setdefault(waiter, []).append(coming)

    def remove_waiter(self, waiter: str, coming: FetchOutcomes) -> None:
        """Remove a connection. If it sent the heartbeats, wake another one to send them from now on."""
        with self._lock:
            waiting = self._waiting[waiter]
            spoke = waiting[0] is coming
            waiting.remove(coming)
            if not waiting:
                del self._waiting[waiter]
            elif spoke:
                waiting[0].put(None)

    def is_sender(self, waiter: str, coming: FetchOutcomes) -> bool:
        """Return whether this connection sends the heartbeats."""
        with self._lock:
            return self._waiting[waiter][0] is coming

    def note_message(self) -> None:
        """Record a message of the daemon."""
        self._answered.set()

    def is_daemon_answering(self) -> bool:
        """Ask the daemon now, and return whether it answers within RESPONSE_SECONDS."""
        self._request_if_due(time.monotonic(), 0.0)
        return self._answered.wait(RESPONSE_SECONDS)

    def is_daemon_alive(self, now: float) -> bool:
        """Return whether the daemon seems alive. Asks it, unless it was asked a moment ago. now: monotonic seconds."""
        self._request_if_due(now, HEARTBEAT_SECONDS / 2)
        return self._answered.is_set() or now - self._unanswered_since < ALIVE_SECONDS

    def _request_if_due(self, now: float, pause: float) -> None:
        """Ask the daemon, unless it owes an answer, or was asked less than *pause* seconds ago."""
        with self._lock:
            has_response = self._answered.is_set()
            asks = now - self._requested_at >= (pause if has_response else RETRY_SECONDS)
            if asks:
                self._requested_at = now
                if has_response:
                    self._unanswered_since = now
                self._answered.clear()
        if asks:
            self._request_message()
