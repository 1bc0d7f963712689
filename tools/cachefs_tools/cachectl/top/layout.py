"""Divides lines of the terminal among lists."""

from collections.abc import Sequence


def divide_lines(room: int, wanted: Sequence[int], first: int) -> list[int]:
    """Return the lines of *room* for each list: equal parts up to what each wants, but up to half for list *first*,
    which has the cursor."""
    room, given = max(0, room), [0] * len(wanted)
    given[first] = min(wanted[first], (room + 1) // 2)
    while sum(given) < room:
        hungry = [at for at, most in enumerate(wanted) if given[at] < most]
        if not hungry:
            break
        poorest = min(hungry, key=lambda at: (given[at], at))
        given[poorest] += 1
    return given


def first_visible(cursor: int, count: int, room: int, top: int) -> int:
    """Return the number of the first visible item of *count*, so that the cursor is among *room* visible ones. top: the
    previous first item."""
    top = min(top, max(0, count - room))
    return max(0, min(max(top, cursor - room + 1), cursor))
