"""Chooses cuts in the space of keys, so that the parts of a listing can be requested in parallel.

An object store lists keys in order after any text, whether that key exists or not. So every cut is valid, and only
decides how long the parts are. How keys are spread is unknown before they are listed. Known are the last keys seen:
their characters, and how far one page of them reaches. The next key differs from the last one in some character, and
cuts are made where other characters could stand there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

# If one digit occurs, the others may occur too.
_DIGITS: Final = frozenset("0123456789")


class KeyRange(msgspec.Struct, frozen=True):
    """A range of keys that is still to be listed."""

    # Keys after this one,
    after: bytes
    # up to and including this one; None: to the end.
    until: bytes | None


EVERYTHING: Final = KeyRange(b"", None)


class RangeCut(msgspec.Struct):
    """A cut between two parts of a listing. Both parts see the same key after it, if the server lists keys in order and
    no client changes them meanwhile."""

    # The largest key that may belong to the part before the cut.
    cut: bytes
    # The last key of the part before the cut, once that part is listed.
    last: bytes | None = None
    # The first key after the cut that each part has seen, or None; known once *last* and *is_begun* are set.
    seen_before: bytes | None = None
    seen_after: bytes | None = None
    is_begun: bool = False

    @property
    def is_known(self) -> bool:
        return self.last is not None and self.is_begun


class ListingCheckpoint:
    """The progress of a listing. The keys listed so far and those left are all keys."""

    def __init__(self, left: Sequence[KeyRange] = (EVERYTHING,), seams: Sequence[RangeCut] = ()) -> None:
        """left, seams: those of the listing to resume."""
        self.resumed_ranges = list(left)  # ranges at the beginning of the listing
        self.resumed_cuts = list(seams)  # cuts of the resumed listing that are not verified yet
        self._remaining_ranges: Callable[[], list[KeyRange]] | None = None
        self._cuts: Mapping[bytes, RangeCut] = {}

    @property
    def is_start(self) -> bool:
        """Whether the listing begins with the first key."""
        return self.resumed_ranges == [EVERYTHING]

    @property
    def remaining_ranges(self) -> list[KeyRange] | None:
        """Ranges that are still to be listed; None if the listing cannot be resumed here."""
        left = self._remaining_ranges() if self._remaining_ranges is not None else None
        return None if left is None or not all(_is_text(one.after) for one in left) else left

    @property
    def unverified_cuts(self) -> list[RangeCut]:
        """Cuts that are not verified yet: keys may have been lost there."""
        return list(self._cuts.values())

    def track(self, left: Callable[[], list[KeyRange]] | None, seams: Mapping[bytes, RangeCut]) -> None:
        """left: returns the ranges that are left from now on; None if the listing cannot be resumed. seams: by cut."""
        self._remaining_ranges = left
        self._cuts = seams


class KeyCharacters:
    """The characters that occur in keys."""

    def __init__(self) -> None:
        self._seen: frozenset[str] = frozenset()
        self._sorted: list[str] = []

    def add_characters_of(self, key: str) -> None:
        if not self._seen.issuperset(key):
            self._seen = self._seen.union(key)
            if self._seen & _DIGITS:
                self._seen |= _DIGITS
            self._sorted = sorted(self._seen)

    def characters_after(self, character: str) -> list[str]:
        """Return the characters after this one, in order; all for ""."""
        return [one for one in self._sorted if one > character]


def common_length(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length


def choose_cuts(last: str, until: str | None, page_width: int, characters: KeyCharacters, most: int) -> list[str]:
    """Return at most *most* cuts between *last*, the last key seen, and *until*, in order.

    page_width: length of the common prefix of the first and the last key of a page. Cuts in later characters would lie
    on the next page.
    """
    start = common_length(last, until) if until is not None else 0
    levels = []
    for depth in range(start, min(page_width + 1, len(last))):
        found = [last[:depth] + one for one in characters.characters_after(last[depth])]
        levels.append([cut for cut in found if until is None or cut < until])
    levels = [level for level in levels if level]
    if not levels:
        return []
    # Most keys differ early, but a whole level may be empty: each deeper level gets one cut.
    deeper = [level[0] for level in levels[1:]][: most // 2]
    return sorted({*_pick_evenly(levels[0], most - len(deeper)), *deeper})


def _pick_evenly(cuts: list[str], most: int) -> list[str]:
    return cuts if len(cuts) <= most else [cuts[number * len(cuts) // most] for number in range(most)]


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True
