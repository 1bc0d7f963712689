"""Guesses of what a sampler of the job's own is going to give.

Nobody runs it a second time. But what it has given may be found, in the same order, in a list that it refers to, or in
the epoch before. Then it is expected to go on there. More is said of a guess the longer it was right: a sampler that
only seems to go through a list costs little.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy

from cachefs.hooks.order import AnyOrder
from cachefs.hooks.sequences import numbers_of, sequences

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
        return True

    def guess(self, iterator: Any, length: int) -> AnyOrder | None:
        """The samples that are expected now, out of the loader's *iterator*, of *length* that there are; None where
        nothing can be guessed."""
        if self._order is None and self._is_time_to_look():
            found = self._look(iterator)
            if found is not None and 0 <= int(found.min()) <= int(found.max()) < length:
                self._order, self._come, self._said = found, 0, 0
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

    def _look(self, iterator: Any) -> AnyOrder | None:
        begun = time.monotonic()
        lists = list(sequences(iterator, self._samplers))
        found = [self._used_up(items) for items in lists] if self._ends else []
        if not any(one is not None for one in found):
            known = lists if self._last_epoch is None else [self._last_epoch, *lists]
            for items in known:
                found.append(after(items, self._run))
                if time.monotonic() > begun + LOOK_SECONDS:
                    break
        self._ends = [_ends_of(items) for items in lists]
        self._since_ends = 0
        self._spent += time.monotonic() - begun
        return max((one for one in found if one is not None and len(one)), key=len, default=None)

    def _used_up(self, items: Any) -> AnyOrder | None:
        """What is left of a list from which the sampler takes what it gives, at one of its ends."""
        drawn = self._since_ends
        if not 0 < drawn <= len(self._run):
            return None
        run = self._run[-drawn:]
        now = _ends_of(items)
        for then in self._ends:
            for forwards, (before, after_it) in ((True, (then.first, now.first)), (False, (then.last, now.last))):
                rest = before[drawn : drawn + SHORTEST_RUN]
                taken = numpy.array_equal(before[:drawn], run) and len(rest)
                if taken and numpy.array_equal(after_it[: len(rest)], rest):
                    return numbers_of(items if forwards else _backwards(items))
        return None


def after(items: Any, run: Sequence[int]) -> AnyOrder | None:
    """What comes after these samples in a sequence that has them, in this order, at one place; or before them, where it
    has them backwards. None where it does not, or nothing comes."""
    run = list(run)
    if type(items) in (list, tuple) and items and set(map(type, items)) == {int}:
        items = list(items)
        place, back = _place_in_list(run, items), None
        if place is None:
            back = _place_in_list(run[::-1], items)
    else:
        numbers = numbers_of(items)
        if numbers is None:
            return None
        items = numbers
        place, back = _place_of(run, numbers), None
        if place is None:
            back = _place_of(run[::-1], numbers)
    if place is not None:
        return numpy.asarray(items[place + len(run) :], dtype=numpy.int64)
    return None if back is None else numpy.asarray(items[:back][::-1], dtype=numpy.int64)


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
    none: AnyOrder = numpy.empty(0, dtype=numpy.int64)
    first, last = numbers_of(items[:ENDS]), numbers_of(_backwards(items[-ENDS:]))
    return _Ends(none if first is None else first[:ENDS], none if last is None else last[:ENDS])


def _backwards(items: Any) -> Any:
    return items[::-1]
