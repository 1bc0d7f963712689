"""Guesses the order of a sampler of the job's own, which cannot be run a second time.

The samples that it has given may be found, in the same order, in a list that it refers to, or in the previous epoch.
Then it is expected to continue there. The longer a guess was right, the more of it is published: a sampler that only
seems to go through a list costs little.
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

# Maximum and minimum number of the latest samples that are searched for.
LONGEST_RUN: Final = 512
SHORTEST_RUN: Final = 4
# Ratio of the samples that are published to those that have come as guessed.
GROWTH: Final = 8
# Number of wrong guesses after which a loader's order is not guessed any more.
MOST_WRONG: Final = 2
# Maximum number of searches in an epoch: after the first batch, and each time that the number of batches has doubled.
LOOKS: Final = 5
# Maximum seconds of all searches in an epoch, about.
LOOK_SECONDS: Final = 0.2
# Maximum number of samples of an epoch kept to compare with the next one: 8 bytes each.
MOST_KEPT: Final = 4 << 20
# Numbers at each end of a list that are kept, to detect that the sampler consumes it.
ENDS: Final = 1024
# Maximum number of places in a list compared with a run of samples.
_PLACES: Final = 64


@dataclass(frozen=True, slots=True)
class _Ends:
    """The beginning of a list, and of the reversed list."""

    first: AnyOrder
    last: AnyOrder


class Guesses:
    """The guesses for one loader."""

    def __init__(self, samplers: tuple[Any, ...]) -> None:
        """samplers: of the loader."""
        self._samplers = samplers
        self._wrong = 0
        self._is_trusted = False  # whether the guess of the last epoch was right to the end
        self._last_epoch: AnyOrder | None = None
        self._begin()

    def _begin(self) -> None:
        self._kept = array("q")
        self._run: list[int] = []
        self._batches = 0
        self._looks = 0
        self._spent = 0.0  # seconds
        self._ends: list[_Ends] = []
        self._since_ends = 0  # samples drawn since `_ends` was read
        self._order: AnyOrder | None = None  # the expected samples, from where they were found
        self._is_whole = True  # whether they are the whole rest of the list in which they were found
        # The list in which the run was found last, by identity, and its first batch to search for the next run.
        self._place = (0, 0)
        self._come = 0  # samples of `_order` that were drawn
        self._said = 0  # samples of `_order` that were published

    @property
    def is_guessing(self) -> bool:
        return self._order is not None

    def begin(self) -> None:
        """Begin an epoch."""
        if self._order is not None:
            self._is_trusted = len(self._order) - self._come <= len(self._order) // 10
        if len(self._kept):
            self._last_epoch = numpy.array(self._kept, dtype=numpy.int64)
        self._begin()

    def saw(self, numbers: Sequence[int]) -> bool:
        """Record drawn samples. Return False where others were guessed; then the guess is dropped."""
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
            # All was right so far: the next part of the list may take as long as this one.
            self._order, self._spent = None, 0.0
            self._looks = max(0, self._looks - 1)
        return True

    def guess(self, iterator: Any, length: int) -> AnyOrder | None:
        """Return the samples now expected from the loader's *iterator*, with numbers below *length*; None without a
        guess."""
        if self._order is None and self._is_time_to_look():
            found = self._look(iterator)
            if found is not None and 0 <= int(found.samples.min()) <= int(found.samples.max()) < length:
                self._order, self._is_whole, self._come, self._said = found.samples, found.is_whole, 0, 0
                return self._say(len(self._run))
        return None

    def more(self) -> AnyOrder | None:
        """Return the expected samples after the published ones, once more may be published than before."""
        if self._order is None or 2 * self._come < self._said or self._said == len(self._order):
            return None
        return self._say(self._come)

    def _say(self, seen: int) -> AnyOrder:
        assert self._order is not None
        begun = self._said
        self._said = len(self._order) if self._is_trusted else min(len(self._order), begun + GROWTH * max(1, seen))
        return self._order[begun : self._said]

    # --- searching
    # -------------------------------------------------------------------------------------------------------

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
        """Return what comes after the run in a list. Searches only the part of the list where the run should be."""
        begin = self._place[1] if self._place[0] == id(items) else 0
        found = after(items, self._run, begin)
        if found is not None and found.sizes is not None and not found.is_whole:
            # The end of this part is where the next run ends.
            ends = numpy.cumsum(found.sizes[::-1])
            behind = int(numpy.searchsorted(ends, LONGEST_RUN)) + 1
            self._place = (id(items), begin + max(0, len(found.sizes) - behind))
        return found

    def _used_up(self, items: Any) -> Rest | None:
        """Return the rest of a list that the sampler consumes from one of its ends."""
        drawn = self._since_ends
        if not SHORTEST_RUN <= drawn <= len(self._run):  # a single sample may equal an end by chance
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
    """Return what comes after these samples in a sequence that has them, in this order, at one place; or before them,
    where it has them reversed. None where it does not, or nothing comes.

    In a list of batches, searches from the batch *begin* on, as far as one read goes; the sizes of the result are those
    of all batches that were read.
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
    """Return the run's place in a list, if there is only one. Avoids an array, which takes 0.1 us per integer."""
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
    """Return the place of the run in *numbers*, if there is only one."""
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
