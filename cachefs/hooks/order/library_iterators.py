"""Reads what iterators still hold: those of libraries' samplers, and those of Python itself.

A generator is recognised by its code object, which has to be that of the library's own function; an iterator with a
class by its class. Only attributes set by the library itself are read. Iterators of other versions than the listed ones
are left alone, like any unknown iterator.

Most samplers compute the order of an epoch when they begin, and give it item by item. `iter(list)`, and `yield from
list` in a generator, keep the list where it can be read without advancing the iterator and without running any code of
the job.

`SamplerRepeats` detects where an endless sampler begins another epoch: loaders that never end their workers use one
batch sampler again and again, and an epoch is one such pass.
"""

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CodeType, GeneratorType
from typing import Any, Final

import numpy

from cachefs.hooks.order.remaining import (
    SEQUENCE_ITERATORS,
    RemainingSamples,
    read_numbers,
    read_sequence_iterator,
    referents_of_kinds,
)
from cachefs.publishing.job_objects import attributes_of
from cachefs.publishing.pure import TORCHDATA, VersionRange, is_installed, qualified_name

# Reads the rest of a nested iterator.
InnerReader = Callable[[Any], RemainingSamples | None]
IteratorReader = Callable[[Any, InnerReader], RemainingSamples | None]

_NESTED: Final = ".<locals>."
# Maximum number of nested iterators.
MAX_DEPTH: Final = 16


def reader_for(iterator: Any) -> IteratorReader | None:
    """Return the function that reads the rest of this iterator; None where it is none of a known library."""
    if type(iterator) is GeneratorType:
        for known in _GENERATORS.get(iterator.gi_code.co_qualname, ()):
            if known.has_code(iterator.gi_code):
                return known.reader
        return None
    found = _CLASSES.get(qualified_name(type(iterator)))
    return found.reader if found is not None and is_installed(found.versions) else None


def batch_sampler_of(iterator: Any) -> Any:
    """Return the batch sampler of torch that a generator goes through; None where it goes through something else."""
    if not any(known.has_code(iterator.gi_code) for known in _BATCHES):
        return None
    return _method_owner(iterator, sys.modules["torch"].utils.data.BatchSampler)


def count_skipped(iterator: Any) -> int:
    """Return the number of samples that a new iterator skips, as a checkpoint says that they were given before."""
    if qualified_name(type(iterator)) != _TORCHDATA_BATCHES or not is_installed(TORCHDATA):
        return 0
    yielded = attributes_of(iterator).get("samples_yielded")
    return yielded if type(yielded) is int and yielded > 0 else 0


@dataclass(frozen=True, slots=True)
class _KnownIterator:
    reader: IteratorReader
    versions: VersionRange
    module: str = ""

    def has_code(self, code: CodeType) -> bool:
        """Return whether *code* is that of the function with its name in this module."""
        found: Any = sys.modules.get(self.module)
        if found is None or not is_installed(self.versions):
            return False
        name, _, inner = code.co_qualname.partition(_NESTED)
        for part in name.split("."):
            found = vars(found).get(part)
            if found is None:
                return False
        outer = getattr(found, "__code__", None)
        return code is outer if not inner else outer is not None and code in outer.co_consts


# --- torch ------------------------------------------------------------------------------------------------------------


def _read_torch_batches(iterator: Any, inner: InnerReader) -> RemainingSamples | None:
    """Read BatchSampler.__iter__, which has one iterator of samples."""
    sampler = _method_owner(iterator, sys.modules["torch"].utils.data.BatchSampler)
    return _read_batches(_single(_readable_iterators(iterator)), attributes_of(sampler), inner)


def _read_batches(samples: Any, sampler: dict[str, Any], inner: InnerReader) -> RemainingSamples | None:
    size, drop_last = sampler.get("batch_size"), sampler.get("drop_last")
    remaining = inner(samples) if samples is not None else None
    if remaining is None or type(size) is not int or size < 1 or remaining.sizes is not None:
        return None
    return remaining.in_batches(size, drop_last=bool(drop_last))


# --- torchdata --------------------------------------------------------------------------------------------------------


def _read_torchdata_batches(iterator: Any, inner: InnerReader) -> RemainingSamples | None:
    own = attributes_of(iterator)
    return _read_batches(own.get("sampler_iter"), own, inner)


def _read_torchdata_random(iterator: Any, inner: InnerReader) -> RemainingSamples | None:
    """Read a random iterator, which goes through one permutation after the other; later ones are not drawn yet."""
    own = attributes_of(iterator)
    order, position = own.get("perm"), own.get("perm_index")
    number, yielded = own.get("num_samples"), own.get("yielded")
    if type(order) is not list or not isinstance(position, int) or not isinstance(number, int):
        return None
    if not 0 <= position < len(order) or not isinstance(yielded, int):
        return None
    remaining = read_numbers(order, position)
    return None if remaining.sizes is not None else remaining.first_samples(number - yielded)


def _read_torchdata_distributed(iterator: Any, inner: InnerReader) -> RemainingSamples | None:
    """Read an iterator that gives the items of DistributedSampler, from the middle on."""
    return inner(_single(referents_of_kinds(iterator, SEQUENCE_ITERATORS)))


# --- Accelerate -------------------------------------------------------------------------------------------------------


def _enumerated_and_position(iterator: Any) -> tuple[Any, int] | None:
    """Return (what a generator enumerates, how many items it has had)."""
    found = _single(referents_of_kinds(iterator, (enumerate,)))
    if found is None:
        return None
    _, (items, begun) = found.__reduce__()
    return items, int(begun)


def _read_accelerate_skipping(iterator: Any, inner: InnerReader) -> RemainingSamples | None:
    found = _enumerated_and_position(iterator)
    return inner(found[0]) if found is not None else None


def _read_accelerate_shard(iterator: Any, inner: InnerReader) -> RemainingSamples | None:
    """Read an iterator that gives, of each group of batches, the one for this process. Leaves out the replacements for
    batches missing from the last group."""
    found, shard = _enumerated_and_position(iterator), _batch_sampler_shard(iterator)
    remaining = inner(found[0]) if found is not None else None
    if found is None or remaining is None or remaining.sizes is None or shard is None:
        return None
    processes, index = shard["num_processes"], shard["process_index"]
    first = -found[1] % processes  # batches until the next group begins
    if first:
        return None
    ends = numpy.cumsum(remaining.sizes)
    chosen = [
        number for number in range(index, len(ends) // processes * processes, processes)
        if shard["batch_size"] is None or remaining.sizes[number - index + processes - 1] == shard["batch_size"]
    ]  # fmt: skip
    return _select_batches(remaining, [(int(ends[one] - remaining.sizes[one]), int(ends[one])) for one in chosen])


def _read_accelerate_split(iterator: Any, inner: InnerReader) -> RemainingSamples | None:
    """Read an iterator that gives, of each batch, the part for this process."""
    found, shard = _enumerated_and_position(iterator), _batch_sampler_shard(iterator)
    remaining = inner(found[0]) if found is not None else None
    if remaining is None or remaining.sizes is None or shard is None or type(shard["batch_size"]) is not int:
        return None
    part = shard["batch_size"] // shard["num_processes"]
    starts = numpy.cumsum(remaining.sizes) - remaining.sizes
    chosen = [int(one) for one in starts[remaining.sizes == shard["batch_size"]] + part * shard["process_index"]]
    return _select_batches(remaining, [(start, start + part) for start in chosen])


def _batch_sampler_shard(iterator: Any) -> dict[str, Any] | None:
    shard = attributes_of(_method_owner(iterator, sys.modules["accelerate.data_loader"].BatchSamplerShard))
    numbers = shard.get("num_processes"), shard.get("process_index")
    return shard if all(type(one) is int for one in numbers) and "batch_size" in shard else None


def _select_batches(remaining: RemainingSamples, ranges: list[tuple[int, int]]) -> RemainingSamples:
    samples = [remaining.samples[start:end] for start, end in ranges]
    sizes = numpy.array([len(sample) for sample in samples], dtype=numpy.int64)
    return RemainingSamples(
        numpy.concatenate(samples) if samples else remaining.samples[:0], sizes, remaining.is_complete
    )


# --- Lightning --------------------------------------------------------------------------------------------------------


def _read_lightning_wrapper(iterator: Any, inner: InnerReader) -> RemainingSamples | None:
    """Read an iterator that goes through indices, and gives the items of a list at these."""
    indices = inner(_single(referents_of_kinds(iterator, SEQUENCE_ITERATORS)))
    wrappers = [cell.cell_contents for cell in referents_of_kinds(iterator, (_Cell,)) if _is_filled(cell)]
    dataset = attributes_of(attributes_of(_single(wrappers)).get("dataset"))
    samples = dataset.get("_sampler_list")
    if indices is None or indices.sizes is not None or type(samples) is not list:
        return None
    chosen = indices.samples.tolist()
    if not chosen or not 0 <= min(chosen) <= max(chosen) < len(samples):
        return None
    remaining = read_numbers([samples[index] for index in chosen])
    return (
        RemainingSamples(remaining.samples, None, remaining.is_complete and indices.is_complete)
        if remaining.sizes is None
        else None
    )


def _read_lightning_batches(iterator: Any, inner: InnerReader) -> RemainingSamples | None:
    return inner(attributes_of(iterator).get("_iterator"))


_Cell: Final = type((lambda one: lambda: one)(0).__closure__[0])  # type: ignore[index]


def _is_filled(cell: Any) -> bool:
    return bool(gc.get_referents(cell))


# ----------------------------------------------------------------------------------------------------------------------


def _method_owner(iterator: Any, kind: type) -> Any:
    """Return the object whose method a generator runs."""
    return _single([one for one in gc.get_referents(iterator) if issubclass(type(one), kind)])


def _readable_iterators(iterator: Any) -> list[Any]:
    """Return the iterators in a generator's frame that can be read."""
    found = {id(one): one for one in gc.get_referents(iterator) if _can_be_read(one)}
    return list(found.values())


def _can_be_read(thing: Any) -> bool:
    return type(thing) in (GeneratorType, *SEQUENCE_ITERATORS) or qualified_name(type(thing)) in _CLASSES


def _single(things: list[Any]) -> Any:
    return things[0] if len({id(one) for one in things}) == 1 else None


_TORCH: Final = VersionRange("torch", (1, 8), (3, 0))
_ACCELERATE: Final = VersionRange("accelerate", (0, 21), (2, 0))
_FABRIC: Final = VersionRange("lightning_fabric", (1, 9), (3, 0))
_LIGHTNING: Final = VersionRange("lightning", (2, 0), (3, 0))
_PYTORCH_LIGHTNING: Final = VersionRange("pytorch_lightning", (1, 6), (3, 0))
_TORCHDATA_BATCHES: Final = "torchdata.stateful_dataloader.sampler._BatchSamplerIterator"
_TORCHDATA_RANDOM: Final = "torchdata.stateful_dataloader.sampler._StatefulRandomSamplerIterator"
_WRAPPER: Final = "DistributedSamplerWrapper.__iter__.<locals>.<genexpr>"

_BATCHES: Final = (_KnownIterator(_read_torch_batches, _TORCH, "torch.utils.data.sampler"),)

# By the qualified name of the code.
_GENERATORS: Final[dict[str, tuple[_KnownIterator, ...]]] = {
    "BatchSampler.__iter__": _BATCHES,
    "StatefulDistributedSampler.__iter__": (
        _KnownIterator(_read_torchdata_distributed, TORCHDATA, "torchdata.stateful_dataloader.sampler"),
    ),
    "SkipBatchSampler.__iter__": (_KnownIterator(_read_accelerate_skipping, _ACCELERATE, "accelerate.data_loader"),),
    "BatchSamplerShard._iter_with_no_split": (
        _KnownIterator(_read_accelerate_shard, _ACCELERATE, "accelerate.data_loader"),
    ),
    "BatchSamplerShard._iter_with_split": (
        _KnownIterator(_read_accelerate_split, _ACCELERATE, "accelerate.data_loader"),
    ),
    _WRAPPER: (
        _KnownIterator(_read_lightning_wrapper, _LIGHTNING, "lightning.fabric.utilities.distributed"),
        _KnownIterator(_read_lightning_wrapper, _FABRIC, "lightning_fabric.utilities.distributed"),
    ),
    f"Unrepeated{_WRAPPER}": (
        _KnownIterator(_read_lightning_wrapper, _LIGHTNING, "lightning.pytorch.overrides.distributed"),
        _KnownIterator(_read_lightning_wrapper, _PYTORCH_LIGHTNING, "pytorch_lightning.overrides.distributed"),
    ),
}
# By the qualified name of the class.
_CLASSES: Final[dict[str, _KnownIterator]] = {
    _TORCHDATA_BATCHES: _KnownIterator(_read_torchdata_batches, TORCHDATA),
    _TORCHDATA_RANDOM: _KnownIterator(_read_torchdata_random, TORCHDATA),
    "lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper": _KnownIterator(
        _read_lightning_batches, _LIGHTNING
    ),
    "pytorch_lightning.overrides.distributed._IndexBatchSamplerWrapper": _KnownIterator(
        _read_lightning_batches, _PYTORCH_LIGHTNING
    ),
}


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


class SamplerRepeats:
    """The passes of one sampler's iterator."""

    def __init__(self) -> None:
        # The generator that goes through the batch sampler now. A weak reference, since the job may see when it ends.
        self._current: weakref.ref[Any] | None = None
        self._sampler: weakref.ref[Any] | None = None

    def has_begun_pass(self, iterator: Any) -> bool:
        """Return whether *iterator* has just begun another pass of its batch sampler. Takes 3 us."""
        if type(iterator) is not GeneratorType or reader_for(iterator) is not None:
            return False
        inside = [one for one in gc.get_referents(iterator) if type(one) is GeneratorType]
        sampler = batch_sampler_of(inside[0]) if len(set(map(id, inside))) == 1 else None
        if sampler is None or (self._current is not None and self._current() is inside[0]):
            return False
        is_same = self._sampler is not None and self._sampler() is sampler
        self._current, self._sampler = weakref.ref(inside[0]), weakref.ref(sampler)
        return is_same
