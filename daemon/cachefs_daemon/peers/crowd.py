"""How many connections a peer server lets in: of strangers, from one address, and of one node.

Nobody can keep members out by holding connections. One that has not said who it is goes where there are too many: the
oldest of its address, or of the address with most of them. Members say it within milliseconds.
"""

import socket
import threading
from collections import Counter
from contextlib import suppress
from typing import Final

# Connections of one server process. Each has a thread.
MOST: Final = 2048
# Of those that have not said yet who they are: all, and from one address.
MOST_UNKNOWN: Final = 256
MOST_UNKNOWN_OF_ADDRESS: Final = 64
# Of one member.
MOST_OF_MEMBER: Final = 64


class Caller:
    """A connection that may have to go."""

    def __init__(self, address: str, connection: socket.socket) -> None:
        self.address = address
        self.connection = connection  # with TLS, since its handshake: the one that is encrypted

    def dismiss(self) -> None:
        """Whoever reads from it finds that it has ended."""
        with suppress(OSError):
            # Not the method of encrypted ones, which would have its thread go on without encryption.
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class Crowd:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all = 0
        self._unknown: dict[str, dict[Caller, None]] = {}  # by address, each in order of their coming
        self._members: Counter[str] = Counter()  # by id

    @property
    def size(self) -> int:
        """Connections that are open."""
        return self._all

    def enter(self, caller: Caller) -> Caller | None:
        """A connection has been made. The one that has to go for it, which then still has to `leave`; None where none
        has to. There are too many in all where it is this one, which then has not entered."""
        with self._lock:
            if self._all >= MOST:
                return caller
            self._all += 1
            crowded = self._crowded(caller.address)
            oldest = next(iter(self._unknown[crowded])) if crowded else None
            if oldest is not None:
                self._forget(oldest)
            self._unknown.setdefault(caller.address, {})[caller] = None
            return oldest

    def recognise(self, caller: Caller, node: str) -> str:
        """It is that member. Why it may not stay; empty where it may. It then has to `leave` in both cases."""
        with self._lock:
            self._forget(caller)
            self._members[node] += 1
            if self._members[node] > MOST_OF_MEMBER:
                return f"node {node} has {MOST_OF_MEMBER} connections already"
            return ""

    def leave(self, caller: Caller, node: str) -> None:
        """It has ended. node: empty where it was never recognised."""
        with self._lock:
            self._all -= 1
            self._forget(caller)
            if node:
                self._members[node] -= 1
                if self._members[node] <= 0:
                    del self._members[node]

    def _crowded(self, address: str) -> str:
        """The address whose oldest stranger has to go for another one from *address*; empty where none has to."""
        if len(self._unknown.get(address, ())) >= MOST_UNKNOWN_OF_ADDRESS:
            return address
        if sum(map(len, self._unknown.values())) >= MOST_UNKNOWN:
            return max(self._unknown, key=lambda one: len(self._unknown[one]))
        return ""

    def _forget(self, caller: Caller) -> None:
        """It is no stranger any more. May be called again."""
        strangers = self._unknown.get(caller.address, {})
        strangers.pop(caller, None)
        if not strangers:
            self._unknown.pop(caller.address, None)
