"""Snapshots that other nodes ask for, and that are still on their way to this one.

A dataset that is added on one node is known to the others a second later or so, and readers of the first node begin at
once. A home that said "no such snapshot" meanwhile would have every block read from the origin by each node that wants
it. So what is asked for waits here, for a few seconds in all.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

# Seconds from the first question for a snapshot until it is not waited for any more: a file of a million entries is
# checked in about 3 s. And until that is forgotten.
AWAITED_SECONDS: Final = 4.0
FORGOTTEN_SECONDS: Final = 60.0
# Snapshots that are remembered, and blocks that wait, at most: whoever asks for more is told that there are none.
MOST_SNAPSHOTS: Final = 256
MOST_WAITING: Final = 6144

# Goes on, whether or not the snapshot has come.
GoOn = Callable[[], None]


class AwaitedSnapshots:
    """Used on the event loop."""

    def __init__(self, is_here: Callable[[str], bool]) -> None:
        self._is_here = is_here
        self._since: dict[str, float] = {}  # by snapshot: loop time of the first question
        # By snapshot and number, with what ends the wait (timers of the same moment are equal).
        self._waiting: dict[str, dict[int, tuple[asyncio.TimerHandle, GoOn]]] = {}
        self._count = 0
        self._numbers = itertools.count()

    def wait(self, snapshot: str, until: float, go_on: GoOn) -> bool:
        """Call *go_on* once when the snapshot has come, or at *until* (loop time), or when it has been waited for long
        enough. False where it need not be waited for, or is not any more."""
        if self._is_here(snapshot):
            return False
        loop = asyncio.get_running_loop()
        now = loop.time()
        end = min(until, self._first_asked(snapshot, now) + AWAITED_SECONDS)
        if end <= now or self._count >= MOST_WAITING:
            return False
        number = next(self._numbers)
        timer = loop.call_at(end, self._give_up, snapshot, number)
        self._waiting.setdefault(snapshot, {})[number] = timer, go_on
        self._count += 1
        return True

    def came(self, snapshot: str) -> None:
        """It is here."""
        self._since.pop(snapshot, None)
        waiting = self._waiting.pop(snapshot, {})
        self._count -= len(waiting)
        for timer, go_on in waiting.values():
            timer.cancel()
            asyncio.get_running_loop().call_soon(go_on)

    def _first_asked(self, snapshot: str, now: float) -> float:
        since = self._since.get(snapshot, now)
        if now - since > FORGOTTEN_SECONDS:
            since = now
        if len(self._since) >= MOST_SNAPSHOTS and snapshot not in self._since:
            del self._since[next(iter(self._since))]
        self._since[snapshot] = since
        return since

    def _give_up(self, snapshot: str, number: int) -> None:
        """The time of one that waits is over."""
        waiting = self._waiting[snapshot]
        _, go_on = waiting.pop(number)
        self._count -= 1
        if not waiting:
            del self._waiting[snapshot]
        go_on()
