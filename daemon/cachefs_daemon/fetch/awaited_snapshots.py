"""Requests of other nodes for blocks of a snapshot that is on its way to this node.

A dataset that is added on one node is known to the others a second later or so, and readers of the first node begin at
once. A home that answered "no such snapshot" meanwhile would leave its blocks to other nodes, and later bring them
from the origin once more. So a request waits here until the snapshot has come: a few seconds where it is on its way,
and an instant where this node has not heard of it, since that news may be on its way too. Each snapshot is waited for
once: later requests are answered at once until it is here.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class _Wait:
    """A request that waits."""

    go_on: GoOn
    # Loop time of the first request for the snapshot, and at which this one is answered at the latest.
    since: float
    until: float
    timer: asyncio.TimerHandle = field(init=False)


class AwaitedSnapshots:
    """Used on the event loop."""

    def __init__(self, is_here: Callable[[str], bool], is_coming: Callable[[str], bool]) -> None:
        """is_coming: whether this node is bringing a snapshot."""
        self.is_here = is_here
        self._is_coming = is_coming
        self._since: dict[str, float] = {}  # by snapshot: loop time of the first request
        self._waiting: dict[str, set[_Wait]] = {}  # by snapshot
        self._count = 0

    def wait(self, snapshot: str, until: float, go_on: GoOn) -> bool:
        """Call *go_on* once when the snapshot has come, or at *until* (loop time), or when it has been waited for long
        enough. False where it need not be waited for, or is not any more."""
        if self.is_here(snapshot):
            return False
        now = asyncio.get_running_loop().time()
        one = _Wait(go_on, self._first_asked(snapshot, now), until)
        if self._end(snapshot, one) <= now or self._count >= MOST_WAITING:
            return False
        self._waiting.setdefault(snapshot, set()).add(one)
        self._count += 1
        self._wait_on(snapshot, one, now)
        return True

    def came(self, snapshot: str) -> None:
        """The snapshot is here."""
        self._since.pop(snapshot, None)
        waiting = self._waiting.pop(snapshot, set())
        self._count -= len(waiting)
        for one in waiting:
            one.timer.cancel()
            asyncio.get_running_loop().call_soon(one.go_on)

    def _first_asked(self, snapshot: str, now: float) -> float:
        if len(self._since) >= MOST_SNAPSHOTS and snapshot not in self._since:
            del self._since[next(iter(self._since))]
        return self._since.setdefault(snapshot, now)

    def _end(self, snapshot: str, one: _Wait) -> float:
        """When a request for the snapshot waits no longer, in loop time, as it looks now."""
        return min(one.until, one.since + (AWAITED_SECONDS if self._is_coming(snapshot) else NEWS_SECONDS))

    def _wait_on(self, snapshot: str, one: _Wait, now: float) -> None:
        """Look again after a while, since the snapshot may be on its way then, or not any more."""
        when = min(self._end(snapshot, one), now + NEWS_SECONDS)
        one.timer = asyncio.get_running_loop().call_at(when, self._look, snapshot, one)

    def _look(self, snapshot: str, one: _Wait) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._end(snapshot, one):
            self._wait_on(snapshot, one, now)
            return
        waiting = self._waiting[snapshot]
        waiting.discard(one)
        self._count -= 1
        if not waiting:
            del self._waiting[snapshot]
        one.go_on()
