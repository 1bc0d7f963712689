"""Evict what came first."""

from cachefs.planning.eviction.policies.lru import Lru


class Fifo(Lru):
    def accessed(self, key: bytes) -> None:
        """Use makes no difference."""
