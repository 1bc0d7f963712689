"""Evict what came first."""

from cachefs.planning.eviction.policies.lru import Lru


class Fifo(Lru):
    """First in, first out: an `Lru` to which only the coming of a block is a use."""

    def accessed(self, key: bytes) -> None:
        """Use makes no difference."""
