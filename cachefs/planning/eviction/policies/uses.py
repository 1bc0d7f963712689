"""The order of uses over all tiers of a node, so that a block which moves to another tier keeps its place in it."""

from itertools import count


class Uses:
    """between: the number of the last use of blocks that have left one tier and are in no other yet: who adds
    one takes it from here."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.between: dict[bytes, int] = {}

    def next(self) -> int:
        return next(self._numbers)

    def forget(self, key: bytes) -> None:
        """The block has come into another tier, or is gone: if it comes from the origin again, that is a new use."""
        self.between.pop(key, None)
