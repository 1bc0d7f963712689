"""Finds how many items an object has without running code of the job.

A job's `__len__` may count calls, ask a database or raise, and torch itself does not call the `__len__` of a dataset
behind a batch sampler. This module reads the length of containers written in C, of torch's and Hugging Face's own
datasets, and of classes whose `__len__` only reads attributes, as nearly all do. The length of any other object is
unknown until its samples are drawn.
"""

import dis
import operator
import sys
from collections import deque
from types import FunctionType
from typing import Any, Final

import numpy

from cachefs.publishing.attributes import MISSING, attributes_of, class_member, stored_or_missing

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
