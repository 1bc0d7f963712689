"""Reads the job's objects without running a property, `__getattr__`, `__len__` or any other code of the job.

**Lengths** (`length_of`). A `__len__` of a job may count calls, ask a database or raise, and torch does not call the
`__len__` of a dataset behind a batch sampler. This module reads the length of containers written in C, of torch's and
Hugging Face's own datasets, and of classes whose `__len__` only reads attributes, as nearly all do. The length of any
other object is unknown until its samples are drawn.

**Arrays** (`is_in_memory`). A mapped file may lie on a mount: reading it in the middle of the job would wait for the
origin.
"""

import dis
import operator
import sys
from collections import deque
from collections.abc import Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final

import numpy
from numpy.typing import NDArray

# Path prefixes of mappings that are memory.
_MEMORY: Final = (b"/dev/shm/", b"/memfd:", b"/dev/zero", b"/SYSV", b"[")
# Stands for an attribute that an object does not have, or that only code of the job can compute.
MISSING: Final = object()
# Maximum depth of nested objects.
_DEPTH: Final = 8
# `__len__` methods in C; a class derived from one of these containers may inherit one.
_CONTAINER_METHODS: Final[tuple[Any, ...]] = tuple(
    vars(kind)["__len__"] for kind in (list, tuple, dict, set, frozenset, range, str, bytes, bytearray, deque)
)
# Instructions that neither push a value nor take one.
_IGNORED_INSTRUCTIONS: Final = frozenset(["RESUME", "PRECALL", "PUSH_NULL", "CACHE", "NOP"])
_LOAD_LOCAL: Final = frozenset(["LOAD_FAST", "LOAD_FAST_BORROW"])
_LOAD_CONSTANT: Final = frozenset(["LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST"])
_OPERATIONS: Final = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}


def is_in_memory(array: NDArray[Any]) -> bool:
    """Return whether the array is in memory. array: a plain ndarray. Takes 0.2 us, and some ms for a tensor."""
    base: Any = array
    while type(base) is numpy.ndarray:
        base = base.base
    if base is None or type(base) in (bytes, bytearray):
        return True
    # A tensor does not tell where its numbers are.
    return type(base).__module__ == "torch" and not _is_mapped(int(array.__array_interface__["data"][0]))


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            span, _, _, _, inode, *path = line.split(maxsplit=5)
            begin, _, end = span.partition(b"-")
            if int(begin, 16) <= address < int(end, 16):
                return inode != b"0" and not (path and path[0].startswith(_MEMORY))
    return False


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the object's `__dict__`; empty where the object has none, or a property in its place."""
    for kind in classes_of(thing):
        described = members_of(kind).get("__dict__")
        if described is not None and type(described) is not GetSetDescriptorType:
            return {}
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def stored_attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of attributes stored in the object: in its `__dict__` and in slots."""
    yield from ((name, value) for name, value in list(attributes_of(thing).items()) if type(name) is str)
    for kind in classes_of(thing):
        for name, member in list(members_of(kind).items()):
            if type(member) is MemberDescriptorType and module_of(kind) != "builtins":
                try:
                    value = member.__get__(thing)
                except AttributeError:
                    continue
                yield name, value


def stored_or_missing(thing: Any, name: str) -> Any:
    """Return one attribute stored in an object or in its class; MISSING where code would compute it."""
    if class_member(type(thing), "__getattribute__") is not object.__getattribute__:
        return MISSING
    found = class_member(type(thing), name)
    if type(found) is MemberDescriptorType:
        try:
            return found.__get__(thing)
        except AttributeError:
            return MISSING
    if class_member(type(found), "__set__") is not MISSING:
        return MISSING  # a property
    own = attributes_of(thing)
    if name in own:
        return own[name]
    return MISSING if class_member(type(found), "__get__") is not MISSING else found  # a method, or a default value


def stored_or_none(thing: Any, name: str) -> Any:
    """Return one attribute like `stored_or_missing`, with None in place of MISSING."""
    value = stored_or_missing(thing, name)
    return None if value is MISSING else value


def class_member(kind: type, name: str) -> Any:
    """Return the member *name* of a class or of its bases, in method resolution order; MISSING where none has it."""
    for owner in type.__dict__["__mro__"].__get__(kind):
        members = members_of(owner)
        if name in members:
            return members[name]
    return MISSING


def classes_of(thing: Any) -> tuple[type, ...]:
    """Return the class of an object and its bases. Runs no code of a metaclass of the job's."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(type(thing))
    return found


def members_of(kind: type) -> Any:
    """Return the namespace of a class itself, without its bases."""
    return type.__dict__["__dict__"].__get__(kind)


def module_of(kind: type) -> str:
    """Return the module name of a class; "" where `__module__` is not a string."""
    module = type.__dict__["__module__"].__get__(kind)
    return module if type(module) is str else ""


def length_of(thing: Any, depth: int = _DEPTH) -> int | None:
    """Return the number of items; None where only code of the job can compute it. depth: limit of nested objects."""
    kind = type(thing)
    if kind is numpy.ndarray:
        return len(thing) if thing.ndim else None
    method = class_member(kind, "__len__")
    if any(method is found for found in _CONTAINER_METHODS):
        return int(method(thing))
    if any(_is_exactly(thing, module, name) for module, name in _LIBRARY_CLASSES):
        return _length_in_library(thing)
    if type(method) is not FunctionType or not depth:
        return None
    returned = _evaluate_method(method, thing, depth - 1)
    return returned if type(returned) is int and returned >= 0 else None


def _evaluate_method(method: FunctionType, owner: Any, depth: int) -> Any:
    """Compute the result of a method that only reads attributes, takes lengths and adds, subtracts, multiplies or
    divides whole numbers; None for any other method."""
    stack: list[Any] = []
    for step in dis.get_instructions(method):
        name = step.opname
        if name in _IGNORED_INSTRUCTIONS:
            continue
        if name == "RETURN_VALUE":
            return stack.pop()
        value = _evaluate_instruction(step, stack, method, owner, depth)
        if value is MISSING or value is None:
            return None
        if name == "RETURN_CONST":
            return value
        stack.append(value)
    return None


def _evaluate_instruction(step: dis.Instruction, stack: list[Any], method: FunctionType, owner: Any, depth: int) -> Any:
    """Pop an instruction's operands from the stack, and return the value that it pushes; MISSING if unknown."""
    name = step.opname
    if name in _LOAD_LOCAL:
        return owner if (step.argval,) == method.__code__.co_varnames[:1] else MISSING
    if name in _LOAD_CONSTANT:
        return step.argval
    if name == "LOAD_GLOBAL":
        return method.__globals__.get(step.argval, len if step.argval == "len" else MISSING)
    if name == "LOAD_ATTR":
        return stored_or_missing(stack.pop(), step.argval)
    if name == "CALL" and step.argval == 1:
        argument, function = stack.pop(), stack.pop()
        return length_of(argument, depth) if function is len else MISSING
    if name == "BINARY_OP" and step.argrepr in _OPERATIONS:
        right, left = stack.pop(), stack.pop()
        is_known = type(left) is type(right) is int and (right or step.argrepr != "//")
        return _OPERATIONS[step.argrepr](left, right) if is_known else MISSING
    return MISSING


def _length_in_library(thing: Any) -> int | None:
    own = attributes_of(thing)
    if _is_exactly(thing, "torch", "Tensor"):
        return int(thing.shape[0]) if len(thing.shape) else None
    if "cumulative_sizes" in own:
        sizes = own["cumulative_sizes"]
        return sizes[-1] if type(sizes) is list and sizes and type(sizes[-1]) is int else None
    if "tensors" in own:
        tensors = own["tensors"]
        return length_of(tensors[0]) if type(tensors) is tuple and tensors else None
    table = own.get("_indices") if own.get("_indices") is not None else own.get("_data")
    rows = getattr(table, "num_rows", None)
    return rows if type(rows) is int else None


# Modules and names of library classes whose `__len__` returns neither an attribute nor the length of one.
_LIBRARY_CLASSES: Final = (
    ("torch", "Tensor"),
    ("torch.utils.data.dataset", "ConcatDataset"),
    ("torch.utils.data.dataset", "TensorDataset"),
    ("datasets.arrow_dataset", "Dataset"),
)


def _is_exactly(thing: Any, module: str, name: str) -> bool:
    names = object.__getattribute__(sys.modules[module], "__dict__") if module in sys.modules else {}
    return type(thing) is names.get(name)
