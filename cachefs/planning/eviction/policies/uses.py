"""The order of uses over all tiers of a node, so that a block which moves to another tier keeps its place in it."""

from itertools import count


class Uses:
    """Numbers the uses of blocks. All policies of a node's tiers that go by the last use share one."""

    def __init__(self) -> None:
        # Number of the last use of each block that has left one tier and is in no other yet. A policy that such a block
        # is added to takes the number from here.
        self.between: dict[bytes, int] = {}
        self._numbers = count(1)

    def next(self) -> int:
        """The number of a use that happens now, which is higher than those of all uses before."""
        return next(self._numbers)

    def forget(self, key: bytes) -> None:
        """The block has come into another tier, or has left the node. If it comes from the origin again, that is a new
        use."""
        self.between.pop(key, None)
