"""What an iterator already holds of what it is going to give: a list that it has begun is all there.

Most samplers compute the order of an epoch when they begin, and give it item by item. `iter(list)`, and `yield from
list` in a generator, keep the list where it can be read without advancing the iterator and without running any code of
the job: only iterators of Python itself are looked into, and torch's BatchSampler.
"""

import gc
import sys
from types import GeneratorType
from typing import Any, Final

import numpy

from cachefs.hooks.order import MAX_SAMPLES, AnyOrder, numbers_in

_LISTS: Final[tuple[type, ...]] = (type(iter([])), type(iter(())))
_RANGE: Final = type(iter(range(0)))
# Generators that give what others give, one inside the other, at most.
_DEPTH: Final = 16


def still_held(iterator: Any, whole_batches: int = 1) -> AnyOrder | None:
    """The samples that a loader's index iterator will still give, as far as that can be read: shape (n,), int64. None
    where nothing can be read, or what is there is no sample numbers.

    whole_batches: samples of a batch, where a last one that is smaller is dropped, else 1.
    """
    items = _remaining(_inside_batches(iterator))
    if items is None:
        return None
    if type(items) is range:
        samples = numpy.arange(items.start, items.stop, items.step, dtype=numpy.int64)
    else:
        numbers = numbers_in(items)
        if numbers is None:
            return None
        samples = numpy.array(numbers, dtype=numpy.int64)
    return samples[: len(samples) // whole_batches * whole_batches]


def _inside_batches(iterator: Any) -> Any:
    """The iterator of single samples that torch's BatchSampler makes batches of; any other iterator itself."""
    if type(iterator) is not GeneratorType:
        return iterator
    batch_sampler = sys.modules["torch"].utils.data.BatchSampler
    if iterator.gi_code is not batch_sampler.__iter__.__code__:
        return iterator
    # What its frame refers to, found without making a frame object or a copy of its variables.
    kinds = (*_LISTS, _RANGE, GeneratorType)
    inside = {id(one): one for one in gc.get_referents(iterator) if type(one) in kinds}
    return inside.popitem()[1] if len(inside) == 1 else None


def _remaining(iterator: Any) -> list[Any] | tuple[Any, ...] | range | None:
    """The items that are left in what *iterator* is giving now, the first MAX_SAMPLES of them."""
    for _ in range(_DEPTH):
        if type(iterator) is not GeneratorType:
            break
        iterator = iterator.gi_yieldfrom
    if type(iterator) not in (*_LISTS, _RANGE):
        return None
    _, (items,), *place = iterator.__reduce__()
    begun = place[0] if place and place[0] is not None else 0
    # A range may have any length.
    return items[begun : begun + MAX_SAMPLES] if type(items) in (list, tuple, range) else None
