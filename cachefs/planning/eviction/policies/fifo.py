"""Evicts the block that came first."""

from cachefs.planning.eviction.policies.lru import Lru


class Fifo(Lru):
    """First in, first out: an `Lru` in which only the arrival of a block is a use."""

    def note_accessed(self, key: bytes) -> None:
        """Ignore uses."""
