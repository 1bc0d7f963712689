"""What an iterator of Python itself still gives, read without advancing it."""

import gc
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, Final

import numpy

from cachefs.hooks.order import MAX_SAMPLES, AnyOrder, array_in, numbers_in

# Iterators of Python itself that are over something: `iter` of a list, a tuple, a range, and of what has items only, as
# numpy's arrays.
OVER_SEQUENCES: Final[tuple[type, ...]] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter(range(1 << 70))), type(iter(numpy.arange(0))),
)  # fmt: skip
# Arrays, or tensors, of a list of them that are read at once.
MOST_ARRAYS: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class Rest:
    """What an iterator will still give, or the beginning of it."""

    samples: AnyOrder  # shape (n,)
    # Samples of each of the batches, shape (batches,); None where it gives samples one by one.
    sizes: AnyOrder | None = None

    def in_batches(self, size: int, *, drop_last: bool) -> "Rest":
        """The same in batches of *size*."""
        whole, last = divmod(len(self.samples), size)
        sizes = numpy.full(whole + (last > 0 and not drop_last), size, dtype=numpy.int64)
        if len(sizes) > whole:
            sizes[-1] = last
        return Rest(self.samples[: int(sizes.sum())], sizes)

    def beginning(self, samples: int) -> "Rest":
        """As far as the first so many samples go, where they come one by one."""
        return Rest(self.samples[: max(0, samples)], self.sizes)


def items_behind(iterator: Any) -> tuple[Any, int] | None:
    """(what one of OVER_SEQUENCES goes through, items of it that it has given); None where it has ended."""
    _, (items, *_), *place = iterator.__reduce__()
    if type(items) not in (list, tuple, range):
        items = array_in(items)
    if items is None:
        return None
    return items, int(place[0]) if place and place[0] is not None else 0


def inside(iterator: Any, kinds: tuple[type, ...] = (GeneratorType, *OVER_SEQUENCES)) -> list[Any]:
    """What an iterator of C, or the frame of a generator, refers to of these *kinds*, found without making a frame
    object or a copy of its variables."""
    return list({id(one): one for one in gc.get_referents(iterator) if type(one) in kinds}.values())


def rest_of_items(iterator: Any) -> Rest | None:
    if type(iterator) not in OVER_SEQUENCES:
        return None
    found = items_behind(iterator)
    if found is None or found[1] >= len(found[0]):
        return None
    items, begun = found
    # A range may have any length. A tensor gives one tensor for each of its numbers, which take 3 us each.
    is_of_arrays = type(items) in (list, tuple) and array_in(items[begun]) is not None
    most = MOST_ARRAYS if is_of_arrays else MAX_SAMPLES
    return _as_rest(items[begun : begun + most])


def _as_rest(items: Any) -> Rest | None:
    if type(items) is range:
        return Rest(numpy.arange(items.start, items.stop, items.step, dtype=numpy.int64))
    numbers = numbers_in(items)
    if numbers is None:
        return None
    samples = numpy.array(numbers, dtype=numpy.int64)
    if len(samples) == len(items) and not _is_batch(items[0]):
        return Rest(samples)
    sizes = numpy.fromiter((len(one) if _is_batch(one) else 1 for one in items), dtype=numpy.int64)
    return Rest(samples, sizes) if int(sizes.sum()) == len(samples) else None


def _is_batch(item: Any) -> bool:
    if type(item) in (list, tuple):
        return True
    array = array_in(item)
    return array is not None and array.ndim > 0
