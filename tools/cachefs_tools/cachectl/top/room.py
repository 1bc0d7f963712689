"""Shares lines of the terminal among lists."""

from collections.abc import Sequence


def shared(room: int, wanted: Sequence[int], first: int) -> list[int]:
    """How many of *room* lines each list gets, of as many as it wants: all alike, but the one with number *first*, on
    which the user works, gets up to half of them before."""
    room, given = max(0, room), [0] * len(wanted)
    given[first] = min(wanted[first], (room + 1) // 2)
    while sum(given) < room:
        hungry = [at for at, most in enumerate(wanted) if given[at] < most]
        if not hungry:
            break
        poorest = min(hungry, key=lambda at: (given[at], at))
        given[poorest] += 1
    return given


def window(cursor: int, count: int, room: int, top: int) -> int:
    """The number of the first item that is shown, of *count*, so that the cursor is among the *room* that are. top: the
    one that was first until now."""
    top = min(top, max(0, count - room))
    return max(0, min(max(top, cursor - room + 1), cursor))
