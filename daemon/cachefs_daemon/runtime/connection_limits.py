"""How many connections a server keeps: of unknown callers, from one address, of one member, and in all.

No client keeps members out by holding connections, and members do not keep each other out. Where there are too many, a
connection goes that nothing is asked on: the oldest one of a caller that has not said who it is, from the address with
most of them; else the member's that has been idle for longest.
"""

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Caller(Protocol):
    """A connection."""

    address: str  # where it is from


One = TypeVar("One", bound=Caller)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Connections, at most."""

    # In all.
    total: int
    # Of callers that have not said yet who they are: all, and from one address.
    unknown: int
    unknown_of_address: int
    # Of one member.
    of_member: int


class ConnectionLimits(Generic[One]):
    """Thread-safe. It only decides: its user closes what has to go."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._lock = threading.Lock()
        self._unknown: dict[str, dict[One, None]] = {}  # by address, each in order of their coming
        self._known: dict[One, str] = {}  # id of the member
        self._idle: OrderedDict[One, None] = OrderedDict()  # of members, those first that have been idle for longest
        self._members: Counter[str] = Counter()  # by id
        self._dismissed: set[One] = set()  # that have to go, and still have to `leave`

    def __len__(self) -> int:
        """Return how many connections are open."""
        with self._lock:
            return self._unknown_count() + len(self._known) + len(self._dismissed)

    def enter(self, caller: One) -> One | None:
        """A connection has been made. Returns the one that has to go for it, which still has to `leave`; None where
        none has to. It is *caller* itself, which has not entered then, where something is asked on all others."""
        with self._lock:
            leaves = self._oldest_unknown(self._crowded(caller.address))
            if leaves is None and self._unknown_count() + len(self._known) >= self.bounds.total:
                leaves = self._oldest_unknown(self._most_crowded()) or next(iter(self._idle), None)
                if leaves is None:
                    return caller
            if leaves is not None:
                self._forget(leaves)
                self._dismissed.add(leaves)
            self._unknown.setdefault(caller.address, {})[caller] = None
            return leaves

    def recognise(self, caller: One, member: str) -> bool:
        """The caller is that member, and asks for something. Returns whether it may stay; it has to `leave` if not."""
        with self._lock:
            if caller in self._dismissed or caller in self._known:
                return True
            if self._members[member] >= self.bounds.of_member:
                return False
            self._forget(caller)
            self._known[caller] = member
            self._members[member] += 1
            return True

    def rest(self, caller: One) -> None:
        """Nothing is asked any more on a member's connection."""
        with self._lock:
            if caller in self._known:
                self._idle[caller] = None
                self._idle.move_to_end(caller)

    def use(self, caller: One) -> None:
        """Something is asked again on a member's connection."""
        with self._lock:
            self._idle.pop(caller, None)

    def leave(self, caller: One) -> None:
        """A connection has ended. May be called again."""
        with self._lock:
            self._forget(caller)
            self._dismissed.discard(caller)

    def _unknown_count(self) -> int:
        return sum(map(len, self._unknown.values()))

    def _crowded(self, address: str) -> str:
        """Return the address whose oldest unknown caller has to go for another one from *address*; "" where none."""
        if len(self._unknown.get(address, ())) >= self.bounds.unknown_of_address:
            return address
        return self._most_crowded() if self._unknown_count() >= self.bounds.unknown else ""

    def _most_crowded(self) -> str:
        return max(self._unknown, key=lambda one: len(self._unknown[one]), default="")

    def _oldest_unknown(self, address: str) -> One | None:
        return next(iter(self._unknown.get(address, ())), None)

    def _forget(self, caller: One) -> None:
        unknown = self._unknown.get(caller.address, {})
        unknown.pop(caller, None)
        if not unknown:
            self._unknown.pop(caller.address, None)
        self._idle.pop(caller, None)
        if (member := self._known.pop(caller, None)) is not None:
            self._members[member] -= 1
            if not self._members[member]:
                del self._members[member]
