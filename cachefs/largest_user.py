"""Finds the user who loses a part of the shared room where it is full: the one who holds most.

So no user takes the room of others: with as many users as there is room for, each keeps an equal part.
"""

from collections.abc import Iterable


def find_largest_user(holdings: Iterable[tuple[int | None, int]], user: int | None, size: int) -> int | None:
    """Return the user with the largest sum of *holdings*, once *user* has taken *size* more; *user* in case of a
    tie."""
    together: dict[int | None, int] = {user: size}
    for owner, part in holdings:
        together[owner] = together.get(owner, 0) + part
    return max(together, key=lambda one: (together[one], one == user))
