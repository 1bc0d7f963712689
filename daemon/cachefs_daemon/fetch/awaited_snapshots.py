"""Requests of other nodes for blocks of a snapshot that is on its way to this node.

A dataset that is added on one node is known to the others a second later or so, and readers of the first node begin at
once. A home that answered "no such snapshot" meanwhile would leave its blocks to other nodes, and later bring them
from the origin once more. So a request waits here until the snapshot has come: a few seconds where it is on its way,
and an instant where this node has not heard of it, since that news may be on its way too. Each snapshot is waited for
once: later requests are answered at once until it is here.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

# Seconds after the first request for a snapshot during which requests wait: where the snapshot is on its way (a file of
# a million entries is checked in about 3 s), and where this node has not heard of it (news takes 0.1 s).
AWAITED_SECONDS: Final = 4.0
NEWS_SECONDS: Final = 0.3
# Snapshots that are remembered, and blocks that wait, at most: a request beyond these does not wait.
MOST_SNAPSHOTS: Final = 1024
MOST_WAITING: Final = 6144

# Goes on, whether or not the snapshot has come.
GoOn = Callable[[], None]


class AwaitedSnapshots:
    """Used on the event loop."""

    def __init__(self, is_here: Callable[[str], bool], is_coming: Callable[[str], bool]) -> None:
        """is_coming: whether this node is bringing a snapshot, or has news to read that may speak of it."""
        self.is_here = is_here
        self._is_coming = is_coming
        self._since: dict[str, float] = {}  # by snapshot: loop time of the first request
        # By snapshot and number, with what ends the wait (timers of the same moment are equal).
        self._waiting: dict[str, dict[int, tuple[asyncio.TimerHandle, GoOn]]] = {}
        self._count = 0
        self._numbers = itertools.count()

    def wait(self, snapshot: str, until: float, go_on: GoOn) -> bool:
        """Call *go_on* once when the snapshot has come, or at *until* (loop time), or when it has been waited for long
        enough. False where it need not be waited for, or is not any more."""
        if self.is_here(snapshot):
            return False
        loop = asyncio.get_running_loop()
        now = loop.time()
        seconds = AWAITED_SECONDS if self._is_coming(snapshot) else NEWS_SECONDS
        end = min(until, self._first_asked(snapshot, now) + seconds)
        if end <= now or self._count >= MOST_WAITING:
            return False
        number = next(self._numbers)
        timer = loop.call_at(end, self._give_up, snapshot, number)
        self._waiting.setdefault(snapshot, {})[number] = timer, go_on
        self._count += 1
        return True

    def came(self, snapshot: str) -> None:
        """The snapshot is here."""
        self._since.pop(snapshot, None)
        waiting = self._waiting.pop(snapshot, {})
        self._count -= len(waiting)
        for timer, go_on in waiting.values():
            timer.cancel()
            asyncio.get_running_loop().call_soon(go_on)

    def _first_asked(self, snapshot: str, now: float) -> float:
        if len(self._since) >= MOST_SNAPSHOTS and snapshot not in self._since:
            del self._since[next(iter(self._since))]
        return self._since.setdefault(snapshot, now)

    def _give_up(self, snapshot: str, number: int) -> None:
        """End the wait of one request."""
        waiting = self._waiting[snapshot]
        _, go_on = waiting.pop(number)
        self._count -= 1
        if not waiting:
            del self._waiting[snapshot]
        go_on()
