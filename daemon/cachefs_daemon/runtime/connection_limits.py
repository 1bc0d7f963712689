"""Limits the connections of a server: of unknown callers, from one address, of one member, and in all.

No client keeps members out by holding connections, and members do not keep each other out. Where there are too many, a
connection without a request in progress is closed: the oldest one of an unidentified caller, from the address with most
of them; else the member's that has been idle for longest.
"""

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class LimitedConnection(Protocol):
    """A connection, with the address by which it is limited."""

    address: str  # the client's address


Limited = TypeVar("Limited", bound=LimitedConnection)


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Upper bounds on connections."""

    # In all.
    total: int
    # Of callers that have not identified themselves: all, and from one address.
    unknown: int
    unknown_of_address: int
    # Of one member.
    of_member: int


class ConnectionLimits(Generic[Limited]):
    """Decides which connections to close; its user closes them. Thread-safe."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        self.bounds = bounds
        self._lock = threading.Lock()
        self._unknown: dict[str, dict[Limited, None]] = {}  # by address, each in order of arrival
        self._known: dict[Limited, str] = {}  # id of the member
        self._idle: OrderedDict[Limited, None] = OrderedDict()  # of members, the longest idle first
        self._members: Counter[str] = Counter()  # by id
        self._dismissed: set[Limited] = set()  # to be closed, with `remove` still to come

    def __len__(self) -> int:
        """Return how many connections are open."""
        with self._lock:
            return self._unknown_count() + len(self._known) + len(self._dismissed)

    def add(self, connection: Limited) -> Limited | None:
        """Register a new connection. Return the one to close for it, which still has to `remove`, or None. The result
        is *connection* itself, which is then not registered, where all others have requests in progress."""
        with self._lock:
            leaves = self._oldest_unknown(self._address_to_trim(connection.address))
            if leaves is None and self._unknown_count() + len(self._known) >= self.bounds.total:
                leaves = self._oldest_unknown(self._address_with_most()) or next(iter(self._idle), None)
                if leaves is None:
                    return connection
            if leaves is not None:
                self._forget(leaves)
                self._dismissed.add(leaves)
            self._unknown.setdefault(connection.address, {})[connection] = None
            return leaves

    def identify(self, connection: Limited, member: str) -> bool:
        """Register that the caller is that member, and in use. Return whether it may stay; if not, it has to
        `remove`."""
        with self._lock:
            if connection in self._dismissed or connection in self._known:
                return True
            if self._members[member] >= self.bounds.of_member:
                return False
            self._forget(connection)
            self._known[connection] = member
            self._members[member] += 1
            return True

    def mark_idle(self, connection: Limited) -> None:
        """Mark a member's connection as idle."""
        with self._lock:
            if connection in self._known:
                self._idle[connection] = None
                self._idle.move_to_end(connection)

    def mark_busy(self, connection: Limited) -> None:
        """Mark a member's connection as in use again."""
        with self._lock:
            self._idle.pop(connection, None)

    def remove(self, connection: Limited) -> None:
        """Remove a connection that has ended. May be called again."""
        with self._lock:
            self._forget(connection)
            self._dismissed.discard(connection)

    def _unknown_count(self) -> int:
        return sum(map(len, self._unknown.values()))

    def _address_to_trim(self, address: str) -> str:
        """Return the address whose oldest unknown caller has to go for another one from *address*; "" where none."""
        if len(self._unknown.get(address, ())) >= self.bounds.unknown_of_address:
            return address
        return self._address_with_most() if self._unknown_count() >= self.bounds.unknown else ""

    def _address_with_most(self) -> str:
        return max(self._unknown, key=lambda one: len(self._unknown[one]), default="")

    def _oldest_unknown(self, address: str) -> Limited | None:
        return next(iter(self._unknown.get(address, ())), None)

    def _forget(self, connection: Limited) -> None:
        unknown = self._unknown.get(connection.address, {})
        unknown.pop(connection, None)
        if not unknown:
            self._unknown.pop(connection.address, None)
        self._idle.pop(connection, None)
        if (member := self._known.pop(connection, None)) is not None:
            self._members[member] -= 1
            if not self._members[member]:
                del self._members[member]
