"""Which user loses a part of the room that all users share, where it is full: the one who has most of it.

So no user takes the room of others: with as many users as there is room for, each keeps an equal part.
"""

from collections.abc import Iterable


def largest(parts: Iterable[tuple[int | None, int]], user: int | None, size: int) -> int | None:
    """Returns the user whose *parts* of the room are the largest together, once *user* has taken *size* more. Of
    several who have as much, it is *user*, if *user* is one of them."""
    together: dict[int | None, int] = {user: size}
    for owner, part in parts:
        together[owner] = together.get(owner, 0) + part
    return max(together, key=lambda one: (together[one], one == user))
