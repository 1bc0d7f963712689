"""Finds lists and arrays that a sampler of the job's own may be going through: those that its iterators, the frames of
its generators and its attributes refer to. Reads them without running code of the job, and within bounds."""

import contextlib
import gc
from collections import deque
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any, Final

import numpy

from cachefs.hooks.order import array_in
from cachefs.hooks.rest import OVER_SEQUENCES, Unreadable, items_behind, read
from cachefs.publishing.attributes import fields
from cachefs.publishing.in_memory import is_in_memory

# Maximum number of objects examined, and of items in all sequences. A batch in a list counts as one item: lists are
# read in pieces (cachefs.hooks.rest).
MOST_OBJECTS: Final = 256
MOST_ITEMS: Final = 4 << 20
_DEPTH: Final = 8
_NOT_ENTERED: Final = (ModuleType, FunctionType, CodeType, type)


def sequences(iterator: Any, samplers: tuple[Any, ...]) -> Iterator[Any]:
    """Yield lists, tuples, ranges, double-ended queues and arrays of integers, each once, of two items or more.

    iterator: of a loader's samples or batches; samplers: those that made it.
    """
    waiting: deque[tuple[Any, int]] = deque((one, 0) for one in (iterator, *samplers))
    seen: dict[int, Any] = {}
    items = 0
    while waiting and len(seen) < MOST_OBJECTS:
        thing, depth = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        found = as_sequence(thing)
        if type(found) is numpy.ndarray and not is_in_memory(found):
            continue
        if found is not None:
            items += found.size if type(found) is numpy.ndarray else len(found)
            if len(found) > 1 and items <= MOST_ITEMS:
                yield found
        elif depth < _DEPTH:
            if type(thing) is zip:
                yield from _in_turns(thing)
            waiting.extend((one, depth + 1) for one in _behind(thing))


def as_sequence(thing: Any) -> Any:
    """Return the thing itself, or a copy that can be sliced; None where it is no readable sequence."""
    if type(thing) in (list, tuple, range):
        # Iterators in a tuple are those of an iterator of C.
        return None if type(thing) is tuple and thing and _is_iterator(thing[0]) else thing
    if type(thing) is deque:
        return list(thing) if len(thing) <= MOST_ITEMS else None
    array = array_in(thing)
    return array if array is not None and array.ndim else None


def _behind(thing: Any) -> list[Any]:
    """Return the objects to examine next behind this one."""
    if type(thing) in OVER_SEQUENCES:
        found = items_behind(thing)
        return [found[0]] if found is not None else []
    if type(thing) is tuple:
        return list(thing)
    if type(thing) is CellType:
        return gc.get_referents(thing)
    if _is_iterator(thing) and type(thing).__module__ in ("builtins", "itertools"):
        return [one for one in gc.get_referents(thing) if _is_worth_a_look(one)]
    return [one for name, one in fields(thing).items() if as_sequence(one) is not None or _is_entered(name, one)]


def _is_worth_a_look(thing: Any) -> bool:
    """Return whether to examine an object that a generator's frame refers to."""
    if as_sequence(thing) is not None or _is_iterator(thing) or type(thing) in (CellType, tuple):
        return True
    return _has(thing, "__iter__") and _is_object(thing)


def _is_entered(name: str, thing: Any) -> bool:
    """Return whether to examine an attribute of a sampler or an iterator: other iterators and samplers are."""
    return _is_iterator(thing) or ("sampler" in name and _is_object(thing))


def _is_object(thing: Any) -> bool:
    return type(thing).__module__ != "builtins" and not issubclass(type(thing), _NOT_ENTERED)


def _is_iterator(thing: Any) -> bool:
    return type(thing) is GeneratorType or (_has(thing, "__next__") and not issubclass(type(thing), _NOT_ENTERED))


def _has(thing: Any, method: str) -> bool:
    return any(method in vars(kind) for kind in type(thing).__mro__)


def _in_turns(rows: Any) -> Iterator[Any]:
    """Yield the items of a zip of iterators over sequences, as rows of an array."""
    _, columns = rows.__reduce__()[:2]
    found = [items_behind(one) if type(one) in OVER_SEQUENCES else None for one in columns]
    if len(found) < 2 or None in found:
        return
    height = min(len(one[0]) for one in found if one is not None)
    if height * len(found) > MOST_ITEMS:
        return
    with contextlib.suppress(Unreadable):
        numbers = [read(one[0]).samples for one in found if one is not None]
        height = min(map(len, numbers))
        yield numpy.stack([one[:height] for one in numbers], axis=1)
