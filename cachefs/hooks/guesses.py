"""Guesses of what a sampler of the job's own is going to give.

Nobody runs it a second time. But what it has given may be found, in the same order, in a list that it refers to, or in
the epoch before. Then it is expected to go on there. More is said of a guess the longer it was right: a sampler that
only seems to go through a list costs little.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy

from cachefs.hooks.order import AnyOrder
from cachefs.hooks.rest import MOST_NUMBERS, Rest, Unreadable, read
from cachefs.hooks.sequences import sequences
from cachefs.publishing import clock

# Samples that are looked for, the latest; and how many there have to be.
LONGEST_RUN: Final = 512
SHORTEST_RUN: Final = 4
# So many times as many samples are said as have come as they were guessed.
GROWTH: Final = 8
# Guesses of a loader that may turn out to be wrong.
MOST_WRONG: Final = 2
# A list is looked for after the first batch of an epoch, and again each time when twice as many have come, so often.
LOOKS: Final = 5
# Seconds that this may take in an epoch, about.
LOOK_SECONDS: Final = 0.2
# Samples of an epoch that are kept, to compare the next one with: 8 bytes each.
MOST_KEPT: Final = 4 << 20
# Numbers at each end of a list that are kept, to see whether it is used up.
ENDS: Final = 1024
# Places in a list at which a run of samples is looked for.
_PLACES: Final = 64


@dataclass(frozen=True, slots=True)
class _Ends:
    """The beginning of a list, and that of the same list backwards."""

    first: AnyOrder
    last: AnyOrder


class Guesses:
    """What is guessed of one loader."""

    def __init__(self, samplers: tuple[Any, ...]) -> None:
        """samplers: of the loader."""
        self._samplers = samplers
        self._wrong = 0
        self._is_trusted = False  # was the guess of the last epoch right to the end?
        self._last_epoch: AnyOrder | None = None
        self._begin()

    def _begin(self) -> None:
        self._kept = array("q")
        self._run: list[int] = []
        self._batches = 0
        self._looks = 0
        self._spent = 0.0  # seconds
        self._ends: list[_Ends] = []
        self._since_ends = 0  # samples drawn since they were kept
        self._order: AnyOrder | None = None  # that is expected, from where it was found
        self._is_whole = True  # does nothing come behind it in the list in which it was found?
        # The list in which the run was found last, by identity, and from which of its batches on to look for the next.
        self._place = (0, 0)
        self._come = 0  # samples of it that have come
        self._said = 0  # and that were said

    @property
    def is_guessing(self) -> bool:
        return self._order is not None

    def begin(self) -> None:
        """An epoch begins."""
        if self._order is not None:
            self._is_trusted = len(self._order) - self._come <= len(self._order) // 10
        if len(self._kept):
            self._last_epoch = numpy.array(self._kept, dtype=numpy.int64)
        self._begin()

    def saw(self, numbers: Sequence[int]) -> bool:
        """These samples were drawn. False where others were guessed: the guess is given up."""
        self._batches += 1
        self._since_ends += len(numbers)
        self._run = [*self._run, *numbers][-LONGEST_RUN:]
        if len(self._kept) < MOST_KEPT:
            self._kept.extend(numbers)
        if self._order is None:
            return True
        if not numpy.array_equal(self._order[self._come : self._come + len(numbers)], numbers):
            self._order = None
            self._wrong += 1
            self._is_trusted = False
            return False
        self._come += len(numbers)
        if self._come >= len(self._order) and not self._is_whole:
            # All was right so far: the next part of the list costs what this one did.
            self._order, self._spent = None, 0.0
            self._looks = max(0, self._looks - 1)
        return True

    def guess(self, iterator: Any, length: int) -> AnyOrder | None:
        """The samples that are expected now, out of the loader's *iterator*, of *length* that there are; None where
        nothing can be guessed."""
        if self._order is None and self._is_time_to_look():
            found = self._look(iterator)
            if found is not None and 0 <= int(found.samples.min()) <= int(found.samples.max()) < length:
                self._order, self._is_whole, self._come, self._said = found.samples, found.is_whole, 0, 0
                return self._say(len(self._run))
        return None

    def more(self) -> AnyOrder | None:
        """The samples that are expected after those that were said, once more may be said than before."""
        if self._order is None or 2 * self._come < self._said or self._said == len(self._order):
            return None
        return self._say(self._come)

    def _say(self, seen: int) -> AnyOrder:
        assert self._order is not None
        begun = self._said
        self._said = len(self._order) if self._is_trusted else min(len(self._order), begun + GROWTH * max(1, seen))
        return self._order[begun : self._said]

    # --- where it is found ----------------------------------------------------------------------------------------

    def _is_time_to_look(self) -> bool:
        is_over = self._wrong >= MOST_WRONG or self._looks >= LOOKS or self._spent >= LOOK_SECONDS
        if is_over or len(self._run) < SHORTEST_RUN:
            return False
        if self._batches < 1 << self._looks:
            return False
        self._looks += 1
        return True

    def _look(self, iterator: Any) -> Rest | None:
        begun = clock.monotonic()
        lists = list(sequences(iterator, self._samplers))
        found = [self._used_up(items) for items in lists] if self._ends else []
        if not any(one is not None for one in found):
            known = lists if self._last_epoch is None else [self._last_epoch, *lists]
            for items in known:
                found.append(self._after(items))
                if clock.monotonic() > begun + LOOK_SECONDS:
                    break
        self._ends = [_ends_of(items) for items in lists]
        self._since_ends = 0
        self._spent += clock.monotonic() - begun
        fitting = [one for one in found if one is not None and len(one.samples)]
        return max(fitting, key=lambda rest: len(rest.samples), default=None)

    def _after(self, items: Any) -> Rest | None:
        """What comes after the run in a list, of which the part is looked through where the run should be."""
        begin = self._place[1] if self._place[0] == id(items) else 0
        found = after(items, self._run, begin)
        if found is not None and found.sizes is not None and not found.is_whole:
            # The next run ends where this part does.
            ends = numpy.cumsum(found.sizes[::-1])
            behind = int(numpy.searchsorted(ends, LONGEST_RUN)) + 1
            self._place = (id(items), begin + max(0, len(found.sizes) - behind))
        return found

    def _used_up(self, items: Any) -> Rest | None:
        """What is left of a list from which the sampler takes what it gives, at one of its ends."""
        drawn = self._since_ends
        if not SHORTEST_RUN <= drawn <= len(self._run):  # a single one may come from an end by chance
            return None
        run = self._run[-drawn:]
        now = _ends_of(items)
        for then in self._ends:
            for forwards, (before, after_it) in ((True, (then.first, now.first)), (False, (then.last, now.last))):
                rest = before[drawn : drawn + SHORTEST_RUN]
                taken = numpy.array_equal(before[:drawn], run) and len(rest)
                if taken and numpy.array_equal(after_it[: len(rest)], rest):
                    return _read(items if forwards else _backwards(items))
        return None


def after(items: Any, run: Sequence[int], begin: int = 0) -> Rest | None:
    """What comes after these samples in a sequence that has them, in this order, at one place; or before them, where it
    has them backwards. None where it does not, or nothing comes.

    A list of batches is looked through from the batch *begin* on, as far as it is read at once; the sizes of the result
    are then those of all batches that were read.
    """
    run = list(run)
    if type(items) in (list, tuple) and items and set(map(type, items)) == {int}:
        items = list(items)
        place, back = _place_in_list(run, items), None
        if place is None:
            back = _place_in_list(run[::-1], items)
        if place is not None:
            return _read(items, place + len(run))
        return None if back is None else _read(items[max(0, back - MOST_NUMBERS) : back][::-1])
    rest = _read(items, begin)
    if rest is None:
        return None
    place = _place_of(run, rest.samples)
    if place is not None:
        return Rest(rest.samples[place + len(run) :], rest.sizes, rest.is_whole)
    back = _place_of(run[::-1], rest.samples)
    return None if back is None else Rest(rest.samples[:back][::-1], None, not begin)


def _read(items: Any, begin: int = 0) -> Rest | None:
    try:
        return read(items, begin)
    except Unreadable:
        return None


def _place_in_list(run: list[int], items: list[int]) -> int | None:
    """Where a list of integers has this run, if that is one place. An array is not made of it: that takes 0.1 us for
    each of them."""
    found: list[int] = []
    place = -1
    for _ in range(_PLACES):
        try:
            place = items.index(run[0], place + 1)
        except ValueError:
            return found[0] if len(found) == 1 else None
        if items[place : place + len(run)] == run:
            found.append(place)
    return None


def _place_of(run: Sequence[int], numbers: AnyOrder) -> int | None:
    """Where *numbers* has this run, if that is one place."""
    wanted = numpy.array(run, dtype=numpy.int64)
    if len(numbers) < len(wanted):
        return None
    places = numpy.flatnonzero(numbers[: len(numbers) - len(wanted) + 1] == wanted[0])
    if len(places) > _PLACES:
        return None
    found = [int(one) for one in places if numpy.array_equal(numbers[one : one + len(wanted)], wanted)]
    return found[0] if len(found) == 1 else None


def _ends_of(items: Any) -> _Ends:
    return _Ends(_first_numbers(items[:ENDS]), _first_numbers(_backwards(items[-ENDS:])))


def _first_numbers(items: Any) -> AnyOrder:
    try:
        return read(items, most=ENDS).samples[:ENDS]
    except Unreadable:
        return numpy.empty(0, dtype=numpy.int64)


def _backwards(items: Any) -> Any:
    return items[::-1]
