"""Guesses the order of a sampler of the job's own, which cannot be run a second time.

The samples that it has given may be found, in the same order, in a list that it refers to, or in the previous epoch.
Then it is expected to continue there. The longer a guess was right, the more of it is published: a sampler that only
seems to go through a list costs little.

The lists and arrays examined are those that its iterators, the frames of its generators and its attributes refer to.
They are read without running code of the job, and within bounds.
"""

import contextlib
import gc
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any, Final

import numpy

from cachefs.hooks.order.foresee import SampleOrder, array_in
from cachefs.hooks.order.remaining import (
    MAX_NUMBERS,
    SEQUENCE_ITERATORS,
    RemainingSamples,
    UnreadableItems,
    read_numbers,
    sequence_and_position,
)
from cachefs.publishing import clock
from cachefs.publishing.job_objects import attributes_of, is_in_memory

# Maximum number of objects examined, and of items in all sequences. A batch in a list counts as one item: lists are
# read in pieces (cachefs.hooks.order.remaining).
MAX_OBJECTS: Final = 256
MAX_ITEMS: Final = 4 << 20
_DEPTH: Final = 8
_NOT_ENTERED: Final = (ModuleType, FunctionType, CodeType, type)
# Maximum and minimum number of the latest samples that are searched for.
LONGEST_RUN: Final = 512
SHORTEST_RUN: Final = 4
# Ratio of the samples that are published to those that have come as guessed.
GROWTH: Final = 8
# Number of wrong guesses after which a loader's order is not guessed any more.
MAX_WRONG: Final = 2
# Maximum number of searches in an epoch: after the first batch, and each time that the number of batches has doubled.
MAX_SEARCHES: Final = 5
# Maximum seconds of all searches in an epoch, about.
SEARCH_SECONDS: Final = 0.2
# Maximum number of samples of an epoch kept to compare with the next one: 8 bytes each.
MAX_EPOCH_SAMPLES: Final = 4 << 20
# Numbers at each end of a list that are kept, to detect that the sampler consumes it.
END_LENGTH: Final = 1024
# Maximum number of places in a list compared with a run of samples.
_MAX_POSITIONS: Final = 64


def candidate_sequences(iterator: Any, samplers: tuple[Any, ...]) -> Iterator[Any]:
    """Yield lists, tuples, ranges, double-ended queues and arrays of integers, each once, of two items or more.

    iterator: of a loader's samples or batches; samplers: those that made it.
    """
    waiting: deque[tuple[Any, int]] = deque((one, 0) for one in (iterator, *samplers))
    seen: dict[int, Any] = {}
    items = 0
    while waiting and len(seen) < MAX_OBJECTS:
        thing, depth = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        found = as_sequence(thing)
        if type(found) is numpy.ndarray and not is_in_memory(found):
            continue
        if found is not None:
            items += found.size if type(found) is numpy.ndarray else len(found)
            if len(found) > 1 and items <= MAX_ITEMS:
                yield found
        elif depth < _DEPTH:
            if type(thing) is zip:
                yield from _zipped_rows(thing)
            waiting.extend((one, depth + 1) for one in _next_objects(thing))


def as_sequence(thing: Any) -> Any:
    """Return the thing itself, or a copy that can be sliced; None where it is no readable sequence."""
    if type(thing) in (list, tuple, range):
        # Iterators in a tuple are those of an iterator of C.
        return None if type(thing) is tuple and thing and _is_iterator(thing[0]) else thing
    if type(thing) is deque:
        return list(thing) if len(thing) <= MAX_ITEMS else None
    array = array_in(thing)
    return array if array is not None and array.ndim else None


def _next_objects(thing: Any) -> list[Any]:
    """Return the objects to examine next behind this one."""
    if type(thing) in SEQUENCE_ITERATORS:
        found = sequence_and_position(thing)
        return [found[0]] if found is not None else []
    if type(thing) is tuple:
        return list(thing)
    if type(thing) is CellType:
        return gc.get_referents(thing)
    if _is_iterator(thing) and type(thing).__module__ in ("builtins", "itertools"):
        return [one for one in gc.get_referents(thing) if _is_examined_referent(one)]
    return [
        one
        for name, one in attributes_of(thing).items()
        if as_sequence(one) is not None or _is_examined_attribute(name, one)
    ]


def _is_examined_referent(thing: Any) -> bool:
    """Return whether to examine an object that a generator's frame refers to."""
    if as_sequence(thing) is not None or _is_iterator(thing) or type(thing) in (CellType, tuple):
        return True
    return _has(thing, "__iter__") and _is_object(thing)


def _is_examined_attribute(name: str, thing: Any) -> bool:
    """Return whether to examine an attribute of a sampler or an iterator: other iterators and samplers are."""
    return _is_iterator(thing) or ("sampler" in name and _is_object(thing))


def _is_object(thing: Any) -> bool:
    return type(thing).__module__ != "builtins" and not issubclass(type(thing), _NOT_ENTERED)


def _is_iterator(thing: Any) -> bool:
    return type(thing) is GeneratorType or (_has(thing, "__next__") and not issubclass(type(thing), _NOT_ENTERED))


def _has(thing: Any, method: str) -> bool:
    return any(method in vars(kind) for kind in type(thing).__mro__)


def _zipped_rows(rows: Any) -> Iterator[Any]:
    """Yield the items of a zip of iterators over sequences, as rows of an array."""
    _, columns = rows.__reduce__()[:2]
    found = [sequence_and_position(column) if type(column) in SEQUENCE_ITERATORS else None for column in columns]
    if len(found) < 2 or None in found:
        return
    height = min(len(one[0]) for one in found if one is not None)
    if height * len(found) > MAX_ITEMS:
        return
    with contextlib.suppress(UnreadableItems):
        numbers = [read_numbers(one[0]).samples for one in found if one is not None]
        height = min(map(len, numbers))
        yield numpy.stack([one[:height] for one in numbers], axis=1)


@dataclass(frozen=True, slots=True)
class _ListEnds:
    """The beginning of a list, and of the reversed list."""

    first: SampleOrder
    last: SampleOrder


class OrderPrediction:
    """The guesses for one loader."""

    def __init__(self, samplers: tuple[Any, ...]) -> None:
        """samplers: of the loader."""
        self._samplers = samplers
        self._wrong = 0
        self._is_trusted = False  # whether the guess of the last epoch was right to the end
        self._last_epoch: SampleOrder | None = None
        self._reset()

    def _reset(self) -> None:
        self._epoch_samples = array("q")
        self._latest_samples: list[int] = []
        self._batches = 0
        self._searches = 0
        self._search_seconds = 0.0  # seconds
        self._ends: list[_ListEnds] = []
        self._since_ends = 0  # samples drawn since `_ends` was read
        self._predicted: SampleOrder | None = None  # the expected samples, from where they were found
        self._is_complete = True  # whether they are the whole rest of the list in which they were found
        # The list in which the run was found last, by identity, and its first batch to search for the next run.
        self._next_search = (0, 0)
        self._drawn = 0  # samples of `_predicted` that were drawn
        self._published = 0  # samples of `_predicted` that were published

    @property
    def is_predicting(self) -> bool:
        return self._predicted is not None

    def begin_epoch(self) -> None:
        """Begin an epoch."""
        if self._predicted is not None:
            self._is_trusted = len(self._predicted) - self._drawn <= len(self._predicted) // 10
        if len(self._epoch_samples):
            self._last_epoch = numpy.array(self._epoch_samples, dtype=numpy.int64)
        self._reset()

    def check_drawn(self, numbers: Sequence[int]) -> bool:
        """Record drawn samples. Return False where others were guessed; then the guess is dropped."""
        self._batches += 1
        self._since_ends += len(numbers)
        self._latest_samples = [*self._latest_samples, *numbers][-LONGEST_RUN:]
        if len(self._epoch_samples) < MAX_EPOCH_SAMPLES:
            self._epoch_samples.extend(numbers)
        if self._predicted is None:
            return True
        if not numpy.array_equal(self._predicted[self._drawn : self._drawn + len(numbers)], numbers):
            self._predicted = None
            self._wrong += 1
            self._is_trusted = False
            return False
        self._drawn += len(numbers)
        if self._drawn >= len(self._predicted) and not self._is_complete:
            # All was right so far: the next part of the list may take as long as this one.
            self._predicted, self._search_seconds = None, 0.0
            self._searches = max(0, self._searches - 1)
        return True

    def predict_order(self, iterator: Any, length: int) -> SampleOrder | None:
        """Return the samples now expected from the loader's *iterator*, with numbers below *length*; None without a
        guess."""
        if self._predicted is None and self._is_search_due():
            found = self._search_lists(iterator)
            if found is not None and 0 <= int(found.samples.min()) <= int(found.samples.max()) < length:
                self._predicted, self._is_complete, self._drawn, self._published = (
                    found.samples,
                    found.is_complete,
                    0,
                    0,
                )
                return self._publish_next(len(self._latest_samples))
        return None

    def extend_published(self) -> SampleOrder | None:
        """Return the expected samples after the published ones, once more may be published than before."""
        if self._predicted is None or 2 * self._drawn < self._published or self._published == len(self._predicted):
            return None
        return self._publish_next(self._drawn)

    def _publish_next(self, seen: int) -> SampleOrder:
        assert self._predicted is not None
        begun = self._published
        self._published = (
            len(self._predicted) if self._is_trusted else min(len(self._predicted), begun + GROWTH * max(1, seen))
        )
        return self._predicted[begun : self._published]

    # --- searching
    # -------------------------------------------------------------------------------------------------------

    def _is_search_due(self) -> bool:
        is_over = self._wrong >= MAX_WRONG or self._searches >= MAX_SEARCHES or self._search_seconds >= SEARCH_SECONDS
        if is_over or len(self._latest_samples) < SHORTEST_RUN:
            return False
        if self._batches < 1 << self._searches:
            return False
        self._searches += 1
        return True

    def _search_lists(self, iterator: Any) -> RemainingSamples | None:
        begun = clock.monotonic()
        lists = list(candidate_sequences(iterator, self._samplers))
        found = [self._search_consumed(items) for items in lists] if self._ends else []
        if not any(one is not None for one in found):
            known = lists if self._last_epoch is None else [self._last_epoch, *lists]
            for items in known:
                found.append(self._search_list(items))
                if clock.monotonic() > begun + SEARCH_SECONDS:
                    break
        self._ends = [_ends_of(items) for items in lists]
        self._since_ends = 0
        self._search_seconds += clock.monotonic() - begun
        fitting = [one for one in found if one is not None and len(one.samples)]
        return max(fitting, key=lambda remaining: len(remaining.samples), default=None)

    def _search_list(self, items: Any) -> RemainingSamples | None:
        """Return what comes after the run in a list. Searches only the part of the list where the run should be."""
        begin = self._next_search[1] if self._next_search[0] == id(items) else 0
        found = samples_after(items, self._latest_samples, begin)
        if found is not None and found.sizes is not None and not found.is_complete:
            # The end of this part is where the next run ends.
            ends = numpy.cumsum(found.sizes[::-1])
            behind = int(numpy.searchsorted(ends, LONGEST_RUN)) + 1
            self._next_search = (id(items), begin + max(0, len(found.sizes) - behind))
        return found

    def _search_consumed(self, items: Any) -> RemainingSamples | None:
        """Return the rest of a list that the sampler consumes from one of its ends."""
        drawn = self._since_ends
        if not SHORTEST_RUN <= drawn <= len(self._latest_samples):  # a single sample may equal an end by chance
            return None
        run = self._latest_samples[-drawn:]
        now = _ends_of(items)
        for then in self._ends:
            for forwards, (before, after_it) in ((True, (then.first, now.first)), (False, (then.last, now.last))):
                following = before[drawn : drawn + SHORTEST_RUN]
                taken = numpy.array_equal(before[:drawn], run) and len(following)
                if taken and numpy.array_equal(after_it[: len(following)], following):
                    return _read_or_none(items if forwards else _reversed(items))
        return None


def samples_after(items: Any, run: Sequence[int], begin: int = 0) -> RemainingSamples | None:
    """Return what comes after these samples in a sequence that has them, in this order, at one place; or before them,
    where it has them reversed. None where it does not, or nothing comes.

    In a list of batches, searches from the batch *begin* on, as far as one read goes; the sizes of the result are those
    of all batches that were read.
    """
    run = list(run)
    if type(items) in (list, tuple) and items and set(map(type, items)) == {int}:
        items = list(items)
        position, back = _find_in_list(run, items), None
        if position is None:
            back = _find_in_list(run[::-1], items)
        if position is not None:
            return _read_or_none(items, position + len(run))
        return None if back is None else _read_or_none(items[max(0, back - MAX_NUMBERS) : back][::-1])
    remaining = _read_or_none(items, begin)
    if remaining is None:
        return None
    position = _find_in_array(run, remaining.samples)
    if position is not None:
        return RemainingSamples(remaining.samples[position + len(run) :], remaining.sizes, remaining.is_complete)
    back = _find_in_array(run[::-1], remaining.samples)
    return None if back is None else RemainingSamples(remaining.samples[:back][::-1], None, not begin)


def _read_or_none(items: Any, begin: int = 0) -> RemainingSamples | None:
    try:
        return read_numbers(items, begin)
    except UnreadableItems:
        return None


def _find_in_list(run: list[int], items: list[int]) -> int | None:
    """Return the run's place in a list, if there is only one. Avoids an array, which takes 0.1 us per integer."""
    found: list[int] = []
    position = -1
    for _ in range(_MAX_POSITIONS):
        try:
            position = items.index(run[0], position + 1)
        except ValueError:
            return found[0] if len(found) == 1 else None
        if items[position : position + len(run)] == run:
            found.append(position)
    return None


def _find_in_array(run: Sequence[int], numbers: SampleOrder) -> int | None:
    """Return the place of the run in *numbers*, if there is only one."""
    wanted = numpy.array(run, dtype=numpy.int64)
    if len(numbers) < len(wanted):
        return None
    positions = numpy.flatnonzero(numbers[: len(numbers) - len(wanted) + 1] == wanted[0])
    if len(positions) > _MAX_POSITIONS:
        return None
    found = [int(one) for one in positions if numpy.array_equal(numbers[one : one + len(wanted)], wanted)]
    return found[0] if len(found) == 1 else None


def _ends_of(items: Any) -> _ListEnds:
    return _ListEnds(_first_numbers(items[:END_LENGTH]), _first_numbers(_reversed(items[-END_LENGTH:])))


def _first_numbers(items: Any) -> SampleOrder:
    try:
        return read_numbers(items, max_numbers=END_LENGTH).samples[:END_LENGTH]
    except UnreadableItems:
        return numpy.empty(0, dtype=numpy.int64)


def _reversed(items: Any) -> Any:
    return items[::-1]
