"""Reads the items that an iterator still holds: a list that it has begun is all there.

Most samplers compute the order of an epoch when they begin, and give it item by item. `iter(list)`, and `yield from
list` in a generator, keep the list where it can be read without advancing the iterator and without running any code of
the job. Only iterators of Python itself are examined, and those of known libraries
(cachefs.hooks.order.library_iterators).
"""

from functools import partial
from types import GeneratorType
from typing import Any, Final

from cachefs.hooks.order.library_iterators import reader_for
from cachefs.hooks.order.remaining import RemainingSamples, read_sequence_iterator

# Maximum number of nested iterators.
MAX_DEPTH: Final = 16


def read_iterator(iterator: Any) -> RemainingSamples | None:
    """Return the samples that a loader's index iterator will still give, or the beginning of them; None where there is
    nothing to read. Raises UnreadableItems where the items are no sample numbers."""
    return _read_nested(iterator, MAX_DEPTH)


def _read_nested(iterator: Any, depth: int) -> RemainingSamples | None:
    while depth > 0:
        depth -= 1
        reader = reader_for(iterator)
        if reader is not None:
            return reader(iterator, partial(_read_nested, depth=depth))
        if type(iterator) is not GeneratorType:
            break
        iterator = iterator.gi_yieldfrom
    return read_sequence_iterator(iterator)
