"""The order of uses over all tiers of a node, so that a block keeps its position when it moves to another tier."""

from itertools import count


class UseOrder:
    """Numbers the uses of blocks. Shared by all policies of a node's tiers that go by the last use."""

    def __init__(self) -> None:
        # Last use of each block that has left one tier and is in no other yet. A policy that takes such a block adopts
        # the number.
        self.moving_uses: dict[bytes, int] = {}
        self._numbers = count(1)

    def next_use(self) -> int:
        """Return the number of a use that happens now, higher than all numbers before."""
        return next(self._numbers)

    def forget_use(self, key: bytes) -> None:
        """Forget the last use of a block that has come into another tier, or has left the node. A later fetch is a new
        use."""
        self.moving_uses.pop(key, None)
