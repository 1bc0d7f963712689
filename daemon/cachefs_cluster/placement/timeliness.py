"""Decides whether the orders of an epoch and of the next one were known in time.

A sampler that determines all epochs is known from the start. Orders that are published one by one arrive as an epoch
begins, and not on all nodes at the same moment. Copies change hands while an epoch is read; if only some nodes used the
orders, blocks would be lost. Therefore one node, the first among the readers, announces for each epoch whether it knew
the orders in time. Blocks read before that stay where they are, and so do all blocks in an epoch without announcement.
"""

from typing import Final

# First and last of the consecutive epochs that a node has announced: copies change hands in them.
Settled = tuple[int, int]
NOTHING_SETTLED: Final[Settled] = (-1, -1)
# Position in an epoch, from 0 to 1, up to which the announcing node has to know the orders; and up to which all others
# have to receive the announcement. Blocks read before ANNOUNCED_UNTIL stay where they are.
KNOWN_UNTIL: Final = 0.05
ANNOUNCED_UNTIL: Final = 0.1


def extend_settled(announced: Settled, number: int) -> Settled:
    """Return *announced*, extended by epoch *number*."""
    first, last = announced
    return (first if first >= 0 and last == number - 1 else number), number


def own_verdict(number: int, position: tuple[int, float]) -> bool:
    """Return whether the announcing node, at *position* (epoch, fraction), may let copies change hands in epoch
    *number*, if the orders are known now."""
    return position <= (number, KNOWN_UNTIL)


def verdict_of(number: int, announced: Settled, position: tuple[int, float]) -> bool | None:
    """Return the verdict on any other node; None if the announcing node may still announce it. announced: its
    announcement; position: of the slowest reader."""
    first, last = announced
    if first <= number <= last:
        return True
    return False if number < last or position > (number, ANNOUNCED_UNTIL) else None
