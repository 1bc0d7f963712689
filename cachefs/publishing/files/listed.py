"""Finds the columns that a dataset lists in its attributes and in those of its member objects.

No property and no other code of the job's is run: only dictionaries and slots of objects are read, and the entries of
containers whose type is exactly one of Python's, numpy's, pandas' or torch's own.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import PurePath
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Final, cast

import numpy
from numpy.typing import NDArray

from cachefs.publishing import clock
from cachefs.publishing.job_exceptions import is_from_job, suppress_own
from cachefs.publishing.job_objects import (
    MISSING,
    class_member,
    classes_of,
    is_in_memory,
    members_of,
    module_of,
    stored_attributes,
)

# Maximum numbers of objects, and of all their attributes; maximum depth: dataset.reader.base.samples has 3.
MAX_OBJECTS: Final = 64
MAX_ATTRIBUTES: Final = 1024
MAX_DEPTH: Final = 3
# Maximum number of columns taken, of their rows, and of bytes in all of them; the seconds after which no further column
# is begun, and the processor seconds for one column: a column of a million texts takes 0.1 s, and one of other objects
# 0.6.
MAX_COLUMNS: Final = 16
MAX_ROWS: Final = 1 << 24
MAX_BYTES: Final = 256 << 20
COLUMNS_SECONDS: Final = 0.5
COLUMN_SECONDS: Final = 2.0
# Seconds in which the rows of a dataset that is a dictionary are taken; and rows of any container between two looks at
# the clock.
ROW_SECONDS: Final = 0.2
ROWS_PER_PIECE: Final = 1 << 16
# Maximum number of columns from the entries of a tuple or a dictionary.
MAX_PARTS: Final = 8
# Maximum number of directories taken from a dataset.
MAX_ROOTS: Final = 16

# The name of a column that is the dataset itself.
ITEMS: Final = "items"

ColumnValues = Sequence[str] | NDArray[numpy.int64]


@dataclass(frozen=True)
class ListedColumn:
    """A column as it lies in the dataset."""

    # Attribute path in the dataset, such as `reader.samples.0`.
    name: str
    rows: int
    first_entry: str | int
    # Returns the entries: texts, or numbers of shape (rows,), int64; None where they are of different kinds, or take
    # longer than a time limit (see `column_deadline`).
    take_entries: Callable[[float], ColumnValues | None]


@dataclass(frozen=True)
class DatasetListing:
    """The columns, candidate root directories and rows of a dataset."""

    listed_columns: tuple[ListedColumn, ...]
    # Texts that may be directories, in the order in which they were found.
    roots: tuple[str, ...]
    # A list of the samples where the dataset is a dictionary keyed by sample number; any other dataset itself.
    rows: Any = None

    def take_columns(self, length: int) -> dict[str, ColumnValues]:
        """Return the columns that may tell which files the samples are. length: number of samples."""
        taken: dict[str, ColumnValues] = {}
        room, deadline = MAX_BYTES, clock.monotonic() + COLUMNS_SECONDS
        for source in sorted(self.listed_columns, key=lambda source: _importance(source, length)):
            size = source.rows * (len(source.first_entry) + 1 if isinstance(source.first_entry, str) else 8)
            # Columns of numbers are of use only where they have one row for each sample.
            if source.rows > MAX_ROWS or size > room or (isinstance(source.first_entry, int) and source.rows != length):
                continue
            if len(taken) == MAX_COLUMNS or clock.monotonic() > deadline:
                break
            values = source.take_entries(column_deadline())
            # The estimate above is from the first text, which may be shorter than all others.
            if values is not None and (size := _size(values)) <= room:
                taken[source.name] = values
                room -= size
        return taken


def column_deadline() -> float:
    """Return the time limit for a column that is begun now, in seconds of `clock.thread_time`."""
    return clock.thread_time() + COLUMN_SECONDS


def _size(values: ColumnValues) -> int:
    """Return the approximate size in bytes."""
    return values.nbytes if isinstance(values, numpy.ndarray) else len(values) + sum(map(len, values))


def _importance(source: ListedColumn, length: int) -> tuple[bool, bool, bool]:
    is_text = isinstance(source.first_entry, str)
    return source.rows != length, not (is_text and os.sep in str(source.first_entry)), not is_text


def read_listing(dataset: Any) -> DatasetListing:
    """Return the columns and root directories found in the dataset."""
    sources: list[ListedColumn] = []
    roots: list[str] = []
    rows = _rows_of(dataset)
    sources += islice(_columns_in(ITEMS, rows), MAX_COLUMNS)
    for name, value in _attributes(dataset):
        text = text_of(value)
        if text is not None:
            if len(roots) < MAX_ROOTS and len(text) < 4096 and "\0" not in text and text not in roots:
                roots.append(text)
        else:
            sources += islice(_columns_in(name, value), MAX_COLUMNS)
    return DatasetListing(tuple(sources), tuple(roots), rows)


def _rows_of(dataset: Any) -> Any:
    """Return the samples as a list, where the dataset is a dictionary keyed by sample number, its first sample has a
    path and taking all of them is fast enough; any other dataset as it is."""
    if type(dataset) is not dict or not 0 < len(dataset) <= MAX_ROWS:
        return dataset
    firsts = (source.first_entry for source in _columns_of_list(ITEMS, [next(iter(dataset.values()))]))
    if not any(isinstance(first, str) and os.sep in first for first in firsts):
        return dataset
    with suppress_own(RuntimeError, KeyError):  # another thread changes the dictionary
        return _rows_by_number(dataset, clock.monotonic() + ROW_SECONDS) or dataset
    return dataset


def _rows_by_number(dataset: dict[Any, Any], deadline: float) -> list[Any] | None:
    """Return the rows of a dictionary keyed by row number; None where it has other keys, or the time is over."""
    keys = iter(dataset)
    for _ in range(0, len(dataset), ROWS_PER_PIECE):
        # Comparing a key of another type may run code of the job's.
        if clock.monotonic() > deadline or set(map(type, islice(keys, ROWS_PER_PIECE))) != {int}:
            return None
    rows: list[Any] = []
    for begin in range(0, len(dataset), ROWS_PER_PIECE):
        numbers = range(begin, min(begin + ROWS_PER_PIECE, len(dataset)))
        if clock.monotonic() > deadline or not all(map(dataset.__contains__, numbers)):
            return None
        rows += map(dataset.__getitem__, numbers)
    return rows


# --- objects ----------------------------------------------------------------------------------------------------------


def _attributes(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes of the dataset and its member objects, breadth first; then globals of `__getitem__`."""
    waiting = deque([("", dataset, 0)])
    seen = {id(dataset)}
    attributes = 0
    while waiting:
        prefix, owner, depth = waiting.popleft()
        for name, value in (
            stored_attributes(owner)
            if depth
            else (*stored_attributes(owner), *_class_attributes(owner), *_used_globals(owner))
        ):
            attributes += 1
            if attributes > MAX_ATTRIBUTES:
                return
            yield prefix + name, value
            if depth < MAX_DEPTH and len(seen) < MAX_OBJECTS and id(value) not in seen and _is_examined(value):
                seen.add(id(value))
                waiting.append((f"{prefix}{name}.", value, depth + 1))


def _class_attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes of the object's class and of its bases."""
    for kind in classes_of(owner):
        if not module_of(kind).startswith(("torch", "typing", "builtins", "abc")):
            for name, value in list(members_of(kind).items()):
                if _is_one_of(type(value), list, tuple, str, numpy.ndarray) and not name.startswith("__"):
                    yield name, value


def _used_globals(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the module globals that `__getitem__` of the object's class uses."""
    for kind in classes_of(owner):
        method = members_of(kind).get("__getitem__")
        if type(method) is FunctionType:
            for name in method.__code__.co_names:
                if name in method.__globals__:
                    yield name, method.__globals__[name]
            return


def _is_examined(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, (type, ModuleType, PurePath)):
        return False
    module = module_of(kind)
    return bool(module) and (module.startswith("torch.utils.data") or module.split(".")[0] not in _SKIPPED_MODULES)


def _is_one_of(kind: type, *kinds: type) -> bool:
    return any(kind is one for one in kinds)


# Modules whose objects have no columns, or only columns that are found otherwise. This file avoids isinstance, which
# may ask an object for its `__class__`, which may be a property of the job's.
_SKIPPED_MODULES: Final = frozenset(
    ["builtins", "numpy", "pandas", "torch", "logging", "threading", "re", "functools", "pathlib", "random", "PIL"]
)


# --- containers -------------------------------------------------------------------------------------------------------


def _columns_in(name: str, value: Any) -> Iterator[ListedColumn]:
    """Yield the columns in an attribute."""
    kind = type(value)
    if _is_one_of(kind, list, tuple):
        yield from _columns_of_list(name, value)
    elif kind is numpy.ndarray:
        yield from _columns_of_array(name, value)
    elif _is_library_type(value, "pandas", "DataFrame"):
        for number, label in enumerate(islice(value.columns.tolist(), MAX_COLUMNS)):
            if _is_one_of(type(label), str, int, tuple):
                yield from _column_of_series(
                    f"{name}.{label}" if type(label) is str else f"{name}.{number}", value.iloc[:, number]
                )
    elif _is_library_type(value, "pandas", "Series"):
        yield from _column_of_series(name, value)
    elif _is_library_type(value, "torch", "Tensor"):
        yield from _columns_of_tensor(name, value)
    elif kind is range and 0 < len(value) <= MAX_ROWS:
        yield ListedColumn(name, len(value), value[0], lambda _: numpy.arange(value.start, value.stop, value.step))


def _is_library_type(value: Any, module: str, name: str) -> bool:
    """Return whether the value is exactly of this type, of a library that is loaded."""
    # Read `__dict__` directly: the module may be lazy, and import itself on first access.
    names = object.__getattribute__(sys.modules[module], "__dict__") if module in sys.modules else {}
    return type(value) is names.get(name)


def _columns_of_list(name: str, entries: Sequence[Any]) -> Iterator[ListedColumn]:
    if not 0 < len(entries) <= MAX_ROWS:
        return
    first = entries[0]
    kind = type(first)
    if issubclass(kind, (list, tuple)) and any(
        class_member(kind, "__getitem__") is class_member(one, "__getitem__") for one in (list, tuple)
    ):
        for part, value in enumerate(first[:MAX_PARTS]):
            yield from _column_of_part(f"{name}.{part}", entries, value, kind, itemgetter(part))
    elif kind is dict:
        for key, value in islice(first.items(), MAX_PARTS):
            if _is_one_of(type(key), str, int):
                yield from _column_of_part(f"{name}.{key}", entries, value, kind, itemgetter(key))
    elif (entry := _entry_value(first)) is not None:
        yield ListedColumn(name, len(entries), entry, partial(take_values, entries, partial(_convert_entries, first)))
    else:
        for key, value in islice(stored_attributes(first), MAX_PARTS):
            found = class_member(kind, key)
            # Skip attributes that the class would compute.
            if found is MISSING or _is_one_of(type(found), MemberDescriptorType, *_DEFAULT_TYPES):
                yield from _column_of_part(f"{name}.{key}", entries, value, kind, _attribute_getter(key))


# Types of class attributes with the name of an instance attribute: a default value, or None.
_DEFAULT_TYPES: Final = (type(None), str, int, float, bool)


def _attribute_getter(name: str) -> Callable[[Any], Any]:
    """Return a getter of an instance attribute. Avoids `__dict__`: Python makes and keeps a dictionary for each object
    asked for its `__dict__`, 100 bytes for each of millions of rows."""
    return lambda owner: object.__getattribute__(owner, name)


def _column_of_part(
    name: str, entries: Sequence[Any], first: Any, kind: type, part: Callable[[Any], Any]
) -> Iterator[ListedColumn]:
    """Yield a column of one part of each entry. All entries must be of type *kind*."""
    entry = _entry_value(first)
    if entry is None:
        return

    def values(piece: Sequence[Any]) -> ColumnValues | None:
        if _type_ids(piece) != {id(kind)}:
            return None
        try:
            return _convert_entries(first, list(map(part, piece)))
        except (IndexError, KeyError, AttributeError) as error:  # an entry lacks the part
            if is_from_job(error):
                raise
            return None

    yield ListedColumn(name, len(entries), entry, partial(take_values, entries, values))


def _columns_of_array(name: str, entries: Any) -> Iterator[ListedColumn]:
    if entries.dtype.names is not None or not 0 < len(entries.shape) <= 2 or not 0 < len(entries) <= MAX_ROWS:
        return
    if not is_in_memory(entries):
        return
    if entries.ndim == 2:
        for part in range(entries.shape[1] if entries.shape[1] <= MAX_PARTS else 0):
            yield from _columns_of_array(f"{name}.{part}", entries[:, part])
        return
    kind = entries.dtype.kind
    if (kind in "USO" and entries.dtype.itemsize * len(entries) > 4 * MAX_BYTES) or kind not in "USOiu":
        return
    first = entries[0]
    if kind in "iu":
        yield ListedColumn(name, len(entries), int(first), lambda _: entries.astype(numpy.int64))
    elif (entry := _entry_value(first)) is not None:
        yield ListedColumn(
            name,
            len(entries),
            entry,
            partial(take_values, entries, lambda piece: _convert_entries(first, piece.tolist())),
        )


def _column_of_series(name: str, series: Any) -> Iterator[ListedColumn]:
    """Yield a column of pandas. Reads its values only where its type is one of texts, numbers or objects."""
    if not 0 < len(series) <= MAX_ROWS or type(series.dtype).__name__ not in _COLUMN_TYPES:
        return
    if getattr(series.dtype, "kind", "O") not in "OUiu":
        return
    first = series.iloc[0]
    entry = _entry_value(first)
    if entry is not None:

        def take(deadline: float) -> ColumnValues | None:
            return take_values(series.to_numpy(), lambda piece: _convert_entries(first, piece.tolist()), deadline)

        yield ListedColumn(name, len(series), entry, take)


# Column types of pandas that are read, and of numpy: object, and whole numbers.
_COLUMN_TYPES: Final = frozenset(
    ["StringDtype", "ObjectDType", "CategoricalDtype", "Int64DType", "Int32DType", "Int16DType", "Int8DType",
     "UInt64DType", "UInt32DType", "UInt16DType", "UInt8DType"]
)  # fmt: skip


def _columns_of_tensor(name: str, tensor: Any) -> Iterator[ListedColumn]:
    torch = sys.modules["torch"]
    if torch._C._len_torch_dispatch_stack() or tensor.device.type != "cpu" or tensor.ndim != 1:
        return
    if tensor.dtype in (torch.int64, torch.int32) and tensor.layout == torch.strided and not tensor.requires_grad:
        with torch._C.DisableTorchFunction():
            yield from _columns_of_array(name, tensor.numpy())


# --- entries ----------------------------------------------------------------------------------------------------------


def text_of(value: Any) -> str | None:
    """Return a str, bytes or path as text; None for any other value."""
    if _is_one_of(type(value), str, numpy.str_):
        return str(value)
    if issubclass(type(value), PurePath) and module_of(type(value)).startswith("pathlib"):
        return str(value)
    if _is_one_of(type(value), bytes, numpy.bytes_):
        return os.fsdecode(bytes(value))
    return None


def texts_of(entries: Sequence[Any]) -> list[str | None]:
    """Return the text of each entry, None in place of an entry that is no text."""
    return list(entries) if _type_ids(entries) == {id(str)} else list(map(text_of, entries))


def _entry_value(value: Any) -> str | int | None:
    """Return a value as a text or a number; None for any other value."""
    return int(value) if _is_number(type(value)) else text_of(value)


def _is_number(kind: type) -> bool:
    return kind is int or (issubclass(kind, numpy.integer) and module_of(kind) == "numpy")


def _type_ids(entries: Sequence[Any]) -> set[int]:
    """Return the identities of the types of all entries."""
    return set(map(id, map(type, entries)))


def take_values(entries: Any, values: Callable[[Any], ColumnValues | None], deadline: float) -> ColumnValues | None:
    """Return the values of all entries, in pieces that *values* converts; None where a piece cannot be converted, or
    `clock.thread_time` passes the *deadline*."""
    found: list[ColumnValues] = []
    for begin in range(0, len(entries), ROWS_PER_PIECE):
        if clock.thread_time() > deadline or (piece := values(entries[begin : begin + ROWS_PER_PIECE])) is None:
            return None
        found.append(piece)
    if found and isinstance(found[0], numpy.ndarray):
        return numpy.concatenate(found)
    return list(chain.from_iterable(cast(list[list[str]], found)))


def _convert_entries(first: Any, entries: Sequence[Any]) -> ColumnValues | None:
    """Return all entries, which must be of the kind of the first one. Texts may be missing in between."""
    kinds = _type_ids(entries)
    if isinstance(_entry_value(first), int):
        if kinds != {id(int)} and not all(map(_is_number, map(type, entries))):
            return None
        try:
            return numpy.array(entries, dtype=numpy.int64)
        except OverflowError:
            return None
    if kinds == {id(str)}:
        return list(entries)
    texts = [("" if entry is None or type(entry) is float else text_of(entry)) for entry in entries]
    return None if None in texts else texts  # type: ignore[return-value]


def join_texts(texts: Iterable[str]) -> bytes | None:
    """Return the texts separated by NUL; None where a text has a NUL in it, or cannot be a file name."""
    listed = texts if isinstance(texts, list) else list(texts)
    try:
        found = "\0".join(listed).encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return None
    return found if found.count(b"\0") == len(listed) - 1 else None
