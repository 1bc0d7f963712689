"""Finds lists and arrays that a sampler of the job's own may be going through: those that its iterators, the frames of
its generators and its attributes refer to. Reads them without running code of the job, and within bounds."""

import contextlib
import gc
from collections import deque
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any, Final

import numpy

from cachefs.hooks.order.foresee import array_in
from cachefs.hooks.order.remaining import SEQUENCE_ITERATORS, UnreadableItems, read_numbers, sequence_and_position
from cachefs.publishing.attributes import attributes_of
from cachefs.publishing.in_memory import is_in_memory

# Maximum number of objects examined, and of items in all sequences. A batch in a list counts as one item: lists are
# read in pieces (cachefs.hooks.order.remaining).
MAX_OBJECTS: Final = 256
MAX_ITEMS: Final = 4 << 20
_DEPTH: Final = 8
_NOT_ENTERED: Final = (ModuleType, FunctionType, CodeType, type)


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
    found = [sequence_and_position(one) if type(one) in SEQUENCE_ITERATORS else None for one in columns]
    if len(found) < 2 or None in found:
        return
    height = min(len(one[0]) for one in found if one is not None)
    if height * len(found) > MAX_ITEMS:
        return
    with contextlib.suppress(UnreadableItems):
        numbers = [read_numbers(one[0]).samples for one in found if one is not None]
        height = min(map(len, numbers))
        yield numpy.stack([one[:height] for one in numbers], axis=1)
