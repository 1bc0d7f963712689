"""Reads the items that an iterator still holds: a list that it has begun is all there.

Most samplers compute the order of an epoch when they begin, and give it item by item. `iter(list)`, and `yield from
list` in a generator, keep the list where it can be read without advancing the iterator and without running any code of
the job. Only iterators of Python itself are examined, and those of known libraries (cachefs.hooks.library_iterators).
"""

from functools import partial
from types import GeneratorType
from typing import Any, Final

from cachefs.hooks.library_iterators import reader_of
from cachefs.hooks.rest import Rest, rest_of_items

# Maximum number of nested iterators.
DEPTH: Final = 16


def still_held(iterator: Any) -> Rest | None:
    """Return the samples that a loader's index iterator will still give, or the beginning of them; None where there is
    nothing to read. Raises Unreadable where the items are no sample numbers."""
    return _rest_of(iterator, DEPTH)


def _rest_of(iterator: Any, depth: int) -> Rest | None:
    while depth > 0:
        depth -= 1
        reader = reader_of(iterator)
        if reader is not None:
            return reader(iterator, partial(_rest_of, depth=depth))
        if type(iterator) is not GeneratorType:
            break
        iterator = iterator.gi_yieldfrom
    return rest_of_items(iterator)
