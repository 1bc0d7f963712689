"""Connections to the control endpoint: those that have not said yet who they are, and those of each member.

Nobody can keep members out by holding connections: one that does not say who it is has to go after a while, and before
that where there are many, from the address with most of them first.
"""

import asyncio
from collections import Counter
from typing import Final, Protocol

# Connections that have not said who they are, and seconds that each may take.
MOST_UNKNOWN: Final = 64
UNKNOWN_SECONDS: Final = 10.0
# Connections of each member. It has one for its poll, and a few for snapshots, orders and counters.
OF_MEMBER: Final = 32


class Visitor(Protocol):
    """A connection."""

    address: str  # where it is from

    def dismiss(self, why: str) -> None:
        """Close it; `Visitors.leave` may follow at once, or later."""


class Visitors:
    """Used on the event loop."""

    def __init__(self) -> None:
        # In order of their coming; and what dismisses them.
        self._unknown: dict[Visitor, asyncio.TimerHandle] = {}
        self._known: dict[Visitor, str] = {}  # id of the member
        self._members: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._unknown) + len(self._known)

    def enter(self, visitor: Visitor) -> None:
        """A connection has been made."""
        if len(self._unknown) >= MOST_UNKNOWN:
            addresses = Counter(one.address for one in self._unknown)
            _, crowded = max((count, address) for address, count in addresses.items())
            oldest = next(one for one in self._unknown if one.address == crowded)
            self.leave(oldest)
            oldest.dismiss(f"{MOST_UNKNOWN} connections have not said who they are, and most of them are from there")
        why = f"it has not said within {UNKNOWN_SECONDS:.0f} s who it is"
        loop = asyncio.get_running_loop()
        self._unknown[visitor] = loop.call_later(UNKNOWN_SECONDS, visitor.dismiss, why)

    def recognise(self, visitor: Visitor, node: str) -> bool:
        """A member has asked for something on that connection. False where it has too many of them."""
        if visitor in self._known:
            return True
        timer = self._unknown.get(visitor)
        if timer is None:
            return True  # it is closed already
        if self._members[node] >= OF_MEMBER:
            return False
        timer.cancel()
        del self._unknown[visitor]
        self._known[visitor] = node
        self._members[node] += 1
        return True

    def leave(self, visitor: Visitor) -> None:
        """It is closed. May be called again."""
        if (timer := self._unknown.pop(visitor, None)) is not None:
            timer.cancel()
        if (node := self._known.pop(visitor, None)) is not None:
            self._members[node] -= 1
            if not self._members[node]:
                del self._members[node]
