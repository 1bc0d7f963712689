"""Were the orders of an epoch and of the next one known in time?

A sampler that determines all epochs is known from the start. Orders that are published one by one come as an epoch
begins, and not to all nodes at the same moment. Copies change hands while an epoch is read; so where some nodes took
the orders into account and others did not, blocks would be lost. Therefore one node, the first of those that read, says
of each epoch whether it knew the orders in time. What is read before that stays where it is, and so does everything in
an epoch of which that node says nothing.
"""

from typing import Final

# The epochs in a row of which a node has said that copies change hands in them: the first and the last.
Settled = tuple[int, int]
NOTHING_SETTLED: Final[Settled] = (-1, -1)
# The place of an epoch, from 0 to 1, up to which the node that says so has to know the orders; and up to which all
# others have to hear of it. What is read before the latter stays where it is.
IN_TIME: Final = 0.05
LATE: Final = 0.1


def extended(said: Settled, number: int) -> Settled:
    """The same, and copies change hands in epoch *number* too."""
    first, last = said
    return (first if first >= 0 and last == number - 1 else number), number


def own_verdict(number: int, place: tuple[int, float]) -> bool:
    """Of the node that says so, which is itself at *place*, an epoch and a part of it: may copies change hands in epoch
    *number*, if the orders are known now?"""
    return place <= (number, IN_TIME)


def verdict_of(number: int, said: Settled, place: tuple[int, float]) -> bool | None:
    """Of any other node. said: by that node; place: of the slowest reader. None: that one may still say something."""
    first, last = said
    if first <= number <= last:
        return True
    return False if number < last or place > (number, LATE) else None
