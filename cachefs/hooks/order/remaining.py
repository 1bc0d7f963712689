"""Reads the remaining items of Python's own iterators without advancing them.

A list is read from one place on, in pieces, until MAX_NUMBERS are read or READ_SECONDS are over, since the job waits
meanwhile. The result is then only the beginning, and the rest of the list is read when the job comes there.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from types import GeneratorType
from typing import Any, Final

import numpy

from cachefs.hooks.order.foresee import SampleOrder, array_in, numbers_in
from cachefs.publishing import clock
from cachefs.publishing.job_objects import is_in_memory

# Types of Python's own iterators over a sequence: `iter` of a list, a tuple, a range, and of an object with
# `__getitem__` only, such as numpy's arrays.
SEQUENCE_ITERATORS: Final[tuple[type, ...]] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter(range(1 << 70))), type(iter(numpy.arange(0))),
)  # fmt: skip
# Maximum number of numbers read at once, and the seconds after which no further piece is begun.
MAX_NUMBERS: Final = 4 << 20
READ_SECONDS: Final = 0.1
# Maximum items of a piece, and growth from one piece to the next.
_PIECE: Final = 1 << 14
_GROWTH: Final = 8


class UnreadableItems(Exception):
    """Raised for a list whose items are no sample numbers. Reading it again would fail at the same cost."""


@dataclass(frozen=True, slots=True)
class RemainingSamples:
    """The remaining items of an iterator, or the beginning of them."""

    samples: SampleOrder  # shape (n,)
    # Samples of each batch, shape (batches,); None where the samples come one by one.
    sizes: SampleOrder | None = None
    # Whether nothing is left out after these samples.
    is_complete: bool = True

    def in_batches(self, size: int, *, drop_last: bool) -> "RemainingSamples":
        """Return the same samples in batches of *size*."""
        full_batches, last = divmod(len(self.samples), size)
        sizes = numpy.full(full_batches + (last > 0 and self.is_complete and not drop_last), size, dtype=numpy.int64)
        if len(sizes) > full_batches:
            sizes[-1] = last
        return RemainingSamples(self.samples[: int(sizes.sum())], sizes, self.is_complete)

    def first_samples(self, samples: int) -> "RemainingSamples":
        """Return the first *samples* of them, where they come one by one."""
        is_complete = self.is_complete or samples <= len(self.samples)
        return RemainingSamples(self.samples[: max(0, samples)], self.sizes, is_complete)


def sequence_and_position(iterator: Any) -> tuple[Any, int] | None:
    """Return (sequence, items given) of one of SEQUENCE_ITERATORS; None where the iterator has ended."""
    _, (items, *_), *position = iterator.__reduce__()
    if type(items) not in (list, tuple, range):
        items = array_in(items)
    if items is None:
        return None
    return items, int(position[0]) if position and position[0] is not None else 0


def referents_of_kinds(iterator: Any, kinds: tuple[type, ...] = (GeneratorType, *SEQUENCE_ITERATORS)) -> list[Any]:
    """Return the objects of these *kinds* that an iterator of C, or a generator's frame, refers to, without making a
    frame object or a copy of its variables."""
    return list({id(one): one for one in gc.get_referents(iterator) if type(one) in kinds}.values())


def read_sequence_iterator(iterator: Any) -> RemainingSamples | None:
    """Return the rest of one of SEQUENCE_ITERATORS; None for other iterators, and ended ones. Raises
    UnreadableItems."""
    if type(iterator) not in SEQUENCE_ITERATORS:
        return None
    found = sequence_and_position(iterator)
    if found is None or found[1] >= len(found[0]):
        return None
    return read_numbers(*found)


def read_numbers(items: Any, begin: int = 0, max_numbers: int | None = None) -> RemainingSamples:
    """Return the sample numbers of a list, tuple, range or array from item *begin* on.

    Raises UnreadableItems where the first item is neither a number nor a batch of numbers; a later one ends the result.
    """
    max_numbers = MAX_NUMBERS if max_numbers is None else max_numbers
    if type(items) is range:
        part = items[begin : begin + max_numbers]
        numbers = numpy.arange(part.start, part.stop, part.step, dtype=numpy.int64)
        return RemainingSamples(numbers, None, begin + len(part) >= len(items))
    array = array_in(items)
    if array is not None:
        return _read_array(array, begin, max_numbers)
    if begin >= len(items):
        return RemainingSamples(numpy.empty(0, dtype=numpy.int64))
    first = _numbers_in_piece(items[begin : begin + 1])
    if first is None or len(first[0]) > max_numbers:
        raise UnreadableItems
    return _read_pieces(items, begin, max_numbers, is_batched=_is_batch(items[begin]))


def _read_array(array: Any, begin: int, most: int) -> RemainingSamples:
    if array.ndim not in (1, 2) or not is_in_memory(array):
        raise UnreadableItems
    width = int(numpy.prod(array.shape[1:]))
    rows = array[begin : begin + max(1, most // max(1, width))]
    sizes = numpy.full(len(rows), width, dtype=numpy.int64) if array.ndim > 1 else None
    return RemainingSamples(numpy.asarray(rows.reshape(-1), dtype=numpy.int64), sizes, begin + len(rows) >= len(array))


def _read_pieces(items: Sequence[Any], begin: int, most: int, *, is_batched: bool) -> RemainingSamples:
    samples: list[SampleOrder] = []
    sizes: list[SampleOrder] = []
    count, position, length = 0, begin, 1
    deadline = clock.monotonic() + READ_SECONDS
    while position < len(items) and count < most and (not samples or clock.monotonic() < deadline):
        taken = items[position : position + length]
        found = _numbers_in_piece(taken)
        if found is None or (not is_batched and set(map(type, taken)) != {int} and any(map(_is_batch, taken))):
            break
        samples.append(found[0])
        sizes.append(found[1])
        count += len(found[0])
        position += len(taken)
        # As many items as have about as many numbers as a piece of single numbers.
        each = max(1, len(found[0]) // len(taken))
        length = max(1, min(_GROWTH * length, _PIECE // each, (most - count) // each))
    return RemainingSamples(
        numpy.concatenate(samples), numpy.concatenate(sizes) if is_batched else None, is_complete=position >= len(items)
    )


def _numbers_in_piece(items: Sequence[Any]) -> tuple[SampleOrder, SampleOrder] | None:
    """Return the numbers in some items, and the count in each; None where there is anything else."""
    kinds = set(map(type, items))
    if kinds == {int}:
        numbers = _array_of(items)
        return None if numbers is None else (numbers, numpy.ones(len(items), dtype=numpy.int64))
    if kinds <= {list, tuple}:
        flat = list(chain.from_iterable(items))
        if set(map(type, flat)) == {int}:
            numbers = _array_of(flat)
            return None if numbers is None else (numbers, numpy.fromiter(map(len, items), dtype=numpy.int64))
    parts = [_numbers_in_item(item) for item in items]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    return numpy.concatenate(found), numpy.fromiter(map(len, found), dtype=numpy.int64)


def _array_of(numbers: Sequence[int]) -> SampleOrder | None:
    try:
        return numpy.array(numbers, dtype=numpy.int64)
    except OverflowError:
        return None


def _numbers_in_item(item: Any) -> SampleOrder | None:
    array = array_in(item)
    if array is not None and array.ndim == 1:
        return numpy.asarray(array, dtype=numpy.int64)
    numbers = numbers_in(item)
    return None if numbers is None else _array_of(numbers)


def _is_batch(item: Any) -> bool:
    if type(item) in (list, tuple):
        return True
    array = array_in(item)
    return array is not None and array.ndim > 0
