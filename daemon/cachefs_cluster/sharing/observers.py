"""Observers: the clients that may read this node's state, or send it commands."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Observers:
    """Names of observers, in lower case, as in certificates or, without TLS, in headers."""

    readers: frozenset[str] = frozenset()
    # Schedulers, which may also read.
    commanders: frozenset[str] = frozenset()

    @classmethod
    def from_names(cls, observers: Sequence[str], schedulers: Sequence[str]) -> "Observers":
        """Make the sets from the configured names."""
        may_order = frozenset(name.lower() for name in schedulers)
        return cls(frozenset(name.lower() for name in observers) | may_order, may_order)

    def identify(self, claimed: str, proven: frozenset[str] | None) -> str:
        """Return the client's name, or "" if it may not even read. claimed: the name in its header; proven: the names
        in its certificate, None without TLS."""
        name = claimed.lower()
        return name if name in self.readers and (proven is None or name in proven) else ""


NO_OBSERVERS = Observers()
