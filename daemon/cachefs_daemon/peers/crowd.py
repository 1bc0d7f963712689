"""How many connections a peer server lets in: of strangers, from one address, and of one node."""

import threading
from collections import Counter
from typing import Final

# Connections of one server process. Each has a thread.
MOST: Final = 2048
# Of those that have not said yet who they are: all, and from one address. Members connect, greet and go on; whoever
# opens connections only to hold them takes these.
MOST_UNKNOWN: Final = 256
MOST_UNKNOWN_OF_ADDRESS: Final = 64
# Of one member.
MOST_OF_MEMBER: Final = 64


class Crowd:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all = 0
        self._unknown: Counter[str] = Counter()  # by address
        self._members: Counter[str] = Counter()  # by id

    @property
    def size(self) -> int:
        """Connections that are open."""
        return self._all

    def enter(self, address: str) -> str:
        """A connection from there. Why it may not stay; empty where it may."""
        with self._lock:
            if self._unknown[address] >= MOST_UNKNOWN_OF_ADDRESS:
                return f"{MOST_UNKNOWN_OF_ADDRESS} connections from there have not said who they are"
            if self._unknown.total() >= MOST_UNKNOWN:
                return f"{MOST_UNKNOWN} connections have not said who they are"
            if self._all >= MOST:
                return f"there are {MOST} connections already"
            self._all += 1
            self._unknown[address] += 1
            return ""

    def recognise(self, address: str, node: str) -> str:
        """It is that member. Why it may not stay; empty where it may. It then has to `leave` in both cases."""
        with self._lock:
            self._drop(self._unknown, address)
            self._members[node] += 1
            if self._members[node] > MOST_OF_MEMBER:
                return f"node {node} has {MOST_OF_MEMBER} connections already"
            return ""

    def leave(self, address: str, node: str) -> None:
        """It has ended. node: empty where it was never recognised."""
        with self._lock:
            self._all -= 1
            if node:
                self._drop(self._members, node)
            else:
                self._drop(self._unknown, address)

    @staticmethod
    def _drop(counts: "Counter[str]", key: str) -> None:
        counts[key] -= 1
        if counts[key] <= 0:
            del counts[key]
