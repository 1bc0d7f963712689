"""Where to cut the space of keys, so that the parts of a listing can be asked for at the same time.

An object store lists keys in order from any text on, whether there is such a key or not. So any cut is right: it only
decides how long the parts are. Nobody knows how keys are spread before they are listed. What is known are the last
keys seen: the characters in them, and how far a page of them gets. The name of the next key differs from the last one
in some character, and the cuts are made where other characters could stand there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

# Where one digit stands, the others may, too.
_DIGITS: Final = frozenset("0123456789")


class KeyRange(msgspec.Struct, frozen=True):
    """Keys that are still to be listed."""

    # Those after this one,
    after: bytes
    # up to and including this one; None: to the end.
    until: bytes | None


EVERYTHING: Final = KeyRange(b"", None)


class Seam(msgspec.Struct):
    """Where keys were cut. Both parts see the same key behind it, if the server lists keys in order and nobody changes
    them meanwhile."""

    # The last key of the part before it may be this one.
    cut: bytes
    # The last key of the part before it, once that has been listed.
    last: bytes | None = None
    # What each of the parts has seen behind it; None: no key. Both are known once *last* and *is_begun* are set.
    seen_before: bytes | None = None
    seen_after: bytes | None = None
    is_begun: bool = False

    @property
    def is_known(self) -> bool:
        return self.last is not None and self.is_begun


class ListingPlace:
    """How far a listing is. What has come so far, and what is left now, are all keys."""

    def __init__(self, left: Sequence[KeyRange] = (EVERYTHING,), seams: Sequence[Seam] = ()) -> None:
        """left, seams: those of a listing that somebody goes on with."""
        self.first = list(left)  # where the listing begins
        self.first_seams = list(seams)  # and of which of its cuts it is not known yet whether keys were lost there
        self._left: Callable[[], list[KeyRange]] | None = None
        self._seams: Mapping[bytes, Seam] = {}

    @property
    def is_start(self) -> bool:
        """Whether the listing begins with the first key."""
        return self.first == [EVERYTHING]

    @property
    def left(self) -> list[KeyRange] | None:
        """What is still to be listed; None where nobody could go on from here."""
        left = self._left() if self._left is not None else None
        return None if left is None or not all(_is_text(one.after) for one in left) else left

    @property
    def seams(self) -> list[Seam]:
        """Cuts at which it is not known yet whether keys were lost."""
        return list(self._seams.values())

    def follow(self, left: Callable[[], list[KeyRange]] | None, seams: Mapping[bytes, Seam]) -> None:
        """left: tells what is left, from now on; None where nobody could go on. seams: those that are left, by cut."""
        self._left = left
        self._seams = seams


class Characters:
    """The characters that keys are made of."""

    def __init__(self) -> None:
        self._seen: frozenset[str] = frozenset()
        self._sorted: list[str] = []

    def see(self, key: str) -> None:
        if not self._seen.issuperset(key):
            self._seen = self._seen.union(key)
            if self._seen & _DIGITS:
                self._seen |= _DIGITS
            self._sorted = sorted(self._seen)

    def after(self, character: str) -> list[str]:
        """Those after this one, in order; of an empty text, all."""
        return [one for one in self._sorted if one > character]


def common_length(one: str, other: str) -> int:
    """Of how many characters both begin alike."""
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length


def cuts(last: str, until: str | None, page_width: int, characters: Characters, most: int) -> list[str]:
    """At most so many texts between *last*, the last key seen, and *until*, in order.

    page_width: of how many characters the first and the last key of a page begin alike. Cuts in what comes behind these
    would lie on the next page.
    """
    start = common_length(last, until) if until is not None else 0
    levels = []
    for depth in range(start, min(page_width + 1, len(last))):
        found = [last[:depth] + one for one in characters.after(last[depth])]
        levels.append([cut for cut in found if until is None or cut < until])
    levels = [level for level in levels if level]
    if not levels:
        return []
    # Keys that differ early are most, but a whole level may be empty: each deeper one gets a cut.
    deeper = [level[0] for level in levels[1:]][: most // 2]
    return sorted({*_evenly(levels[0], most - len(deeper)), *deeper})


def _evenly(cuts: list[str], most: int) -> list[str]:
    return cuts if len(cuts) <= most else [cuts[number * len(cuts) // most] for number in range(most)]


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True
