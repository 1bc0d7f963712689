"""Signs that the daemon behind a peer server lives, for nodes that wait for blocks which it brings.

An origin may take seconds, so that nothing has come yet says little. Whoever waits is told every 0.1 s, on one of its
connections, that this daemon still runs; where it hangs, or the whole node does, those who wait learn it in half a
second and ask elsewhere.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from cachefs_daemon.peers.daemon_fetches import Coming
from cachefs_daemon.peers.protocol import SIGN_SECONDS

# Seconds in which the daemon answers while it lives. Its loop waits for 17 ms at most in 99 of 100 cases on a machine
# that is not overloaded.
LIVES_SECONDS: Final = 0.25
# The same where a probe asks.
ANSWER_SECONDS: Final = 1.0
# Seconds until it is asked again where it does not.
AGAIN_SECONDS: Final = 1.0


class Signs:
    """Thread-safe."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """ask: has the daemon say something, and `heard` be called then."""
        self._ask = ask
        self._lock = threading.Lock()
        # By id of the node: where its connections wait. The first of them sends the signs.
        self._waiting: dict[str, list[Coming]] = {}
        # When the daemon was asked last, and when first since it has answered, in monotonic seconds.
        self._asked = self._unanswered = 0.0
        self._answered = threading.Event()
        self._answered.set()

    def enter(self, node: str, coming: Coming) -> None:
        """A connection of that node waits for the daemon there."""
        with self._lock:
            self._waiting.setdefault(node, []).append(coming)

    def leave(self, node: str, coming: Coming) -> None:
        """It waits no more. Another one sends the signs from now on, and is woken for it."""
        with self._lock:
            waiting = self._waiting[node]
            spoke = waiting[0] is coming
            waiting.remove(coming)
            if not waiting:
                del self._waiting[node]
            elif spoke:
                waiting[0].put(None)

    def speaks(self, node: str, coming: Coming) -> bool:
        """Does this one send the signs?"""
        with self._lock:
            return self._waiting[node][0] is coming

    def heard(self) -> None:
        """The daemon has said something."""
        self._answered.set()

    def answers(self) -> bool:
        """Does the daemon, within a moment? It is asked now."""
        self._ask_now(time.monotonic(), 0.0)
        return self._answered.wait(ANSWER_SECONDS)

    def lives(self, now: float) -> bool:
        """Does the daemon, as far as is known? It is asked, unless it was a moment ago. now: monotonic seconds."""
        self._ask_now(now, SIGN_SECONDS / 2)
        return self._answered.is_set() or now - self._unanswered < LIVES_SECONDS

    def _ask_now(self, now: float, pause: float) -> None:
        """Ask the daemon, unless it owes an answer, or gave one to what was asked so many seconds ago."""
        with self._lock:
            is_answered = self._answered.is_set()
            asks = now - self._asked >= (pause if is_answered else AGAIN_SECONDS)
            if asks:
                self._asked = now
                if is_answered:
                    self._unanswered = now
                self._answered.clear()
        if asks:
            self._ask()
