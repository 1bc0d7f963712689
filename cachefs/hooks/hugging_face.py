"""Finds the files of a streamed Hugging Face dataset, and the order in which its epochs open them.

The dataset is a chain of iterables. The last one has the files among the arguments of its reader (`data_files` after
`load_dataset`, as ordered by `shuffle`); the others pass on its items. Each epoch shuffles the files anew, with a
generator made from its number; nodes and workers then take turns.
"""

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy

from cachefs.hooks.order.foresee import array_in
from cachefs.hooks.shards import interleave, local_path
from cachefs.publishing.files.listed import text_of
from cachefs.publishing.job_objects import attributes_of
from cachefs.publishing.pure import VersionRange, is_installed, qualified_name

_DATASETS: Final = VersionRange("datasets", (2, 21), (5, 0))
_MODULE: Final = "datasets.iterable_dataset"
# Iterables that read files, and those that change neither the files nor their order.
_READING_ITERABLES: Final = ("ExamplesIterable", "ArrowExamplesIterable")
_PASS_THROUGH_ITERABLES: Final = (
    "MappedExamplesIterable", "FilteredExamplesIterable", "FormattedExamplesIterable", "TypedExamplesIterable",
    "RebatchedArrowExamplesIterable", "BufferShuffledExamplesIterable", "SelectColumnsIterable",
)  # fmt: skip
# Maximum number of files, and of iterables in a chain. A file takes 7 us as each epoch begins.
MAX_SHARDS: Final = 1 << 17
MAX_ITERABLES: Final = 32


@dataclass(frozen=True)
class HuggingFaceShards:
    """The state of a dataset as an epoch begins."""

    files: tuple[str, ...]
    # The file that each of the library's shards reads: several shards where `reshard` has cut files.
    file_numbers: tuple[int, ...]
    # The dataset's number of the epoch.
    epoch: int
    # The generator passed to `shuffle`, where each epoch shuffles the files; None where `shuffle` has done so already.
    generator: numpy.random.Generator | None
    # Whether each epoch but number 0 shuffles the files again.
    has_shuffled_epochs: bool
    rank: int
    world_size: int

    def epoch_orders(self, earlier_epochs: int, workers: int, *, keeps_workers: bool) -> list[list[int]]:
        # The documented way is to set the epoch before each one: a job that has not done so by the second one never
        # will.
        following = self.epoch + (self.epoch >= earlier_epochs)
        return [self._epoch_order(self.epoch, workers), self._epoch_order(following, workers)]

    def _epoch_order(self, epoch: int, workers: int) -> list[int]:
        shards = list(range(len(self.file_numbers)))
        generator = self._epoch_generator(epoch)
        if generator is not None:
            generator.shuffle(shards)
        # Where nodes cannot share the shards equally, each reads all shards, and skips the others' examples.
        if self.world_size and len(shards) % self.world_size == 0:
            shards = shards[self.rank :: self.world_size]
        opened = interleave(shards[worker :: max(1, workers)] for worker in range(max(1, workers)))
        return list(dict.fromkeys(self.file_numbers[one] for one in opened))

    def _epoch_generator(self, epoch: int) -> numpy.random.Generator | None:
        if self.generator is None:
            return numpy.random.default_rng(epoch) if self.has_shuffled_epochs and epoch else None
        generator = copy.deepcopy(self.generator)
        if epoch == 0:
            return generator
        seed = int(generator.integers(0, 1 << 63)) - epoch
        return numpy.random.default_rng(seed if seed >= 0 else seed + (1 << 63))


def shards_of(dataset: Any) -> HuggingFaceShards | None:
    """Return the shards of a Hugging Face stream; None for other datasets, where files are not on this machine, and
    where their order does not follow from the dataset."""
    if _MODULE not in sys.modules or not is_installed(_DATASETS):
        return None
    if qualified_name(type(dataset)) != f"{_MODULE}.IterableDataset":
        return None
    own = attributes_of(dataset)
    epoch, shared = _epoch_number(own.get("_epoch")), own.get("_distributed")
    listed = _file_of_each_shard(own.get("_ex_iterable"))
    if listed is None or epoch is None or _is_resumed(own.get("_starting_state_dict"), epoch):
        return None
    rank, world_size = (attributes_of(shared).get(name, 0) for name in ("rank", "world_size"))
    is_lazy = "_shuffling" in own
    generator = attributes_of(own["_shuffling"]).get("generator") if is_lazy and own["_shuffling"] is not None else None
    if {type(rank), type(world_size)} != {int} or not (generator is None or type(generator) is numpy.random.Generator):
        return None
    files = tuple(dict.fromkeys(listed))
    numbers = {path: number for number, path in enumerate(files)}
    read = tuple(numbers[path] for path in listed)
    return HuggingFaceShards(files, read, epoch, generator, not is_lazy, rank, world_size)


def _is_resumed(state: Any, epoch: int) -> bool:
    """Return whether this epoch resumes from a checkpoint, and so does not read its first files. Before version 3.6
    every epoch does, and the state names none."""
    return state is not None and (type(state) is not dict or state.get("epoch", epoch) == epoch)


def _epoch_number(value: Any) -> int | None:
    """Return a number, also from a tensor that persistent workers share."""
    if type(value) is int:
        return value
    array = array_in(value)
    return int(array) if array is not None and array.ndim == 0 else None


def _file_of_each_shard(iterable: Any) -> list[str] | None:
    """Return the file of each shard, in the order of an epoch without shuffling."""
    for _ in range(MAX_ITERABLES):
        module, _, name = qualified_name(type(iterable)).rpartition(".")
        if module != _MODULE:
            return None
        if name in _READING_ITERABLES:
            arguments = attributes_of(iterable).get("kwargs")
            return _first_file_list(arguments) if type(arguments) is dict else None
        if name not in _PASS_THROUGH_ITERABLES:
            return None
        iterable = attributes_of(iterable).get("ex_iterable")
    return None


def _first_file_list(arguments: dict[str, Any]) -> list[str] | None:
    """Return the first list of files among a reader's arguments, all of whose lists have one entry per shard."""
    lists = [value for value in arguments.values() if type(value) is list]
    if len(set(map(len, lists))) != 1 or not 0 < len(lists[0]) <= MAX_SHARDS:
        return None
    for entries in lists:
        if _path_in_entry(entries[0]):
            paths = list(map(_path_in_entry, entries))
            return paths if all(paths) else None
    return None


def _path_in_entry(entry: Any) -> str:
    """Return the path in an entry, which may be a generator of the paths below one (FilesIterable); "" without one. The
    part after "::" is the file that contains the others."""
    text = text_of(entry)
    if text is None:
        texts = list(islice(_nested_texts(attributes_of(entry).get("args")), 2))
        text = texts[0] if len(texts) == 1 else ""
    path = text.rpartition("::")[2]
    # The library makes paths absolute. Other texts passed to a generator may be anything.
    return local_path(path) if path.startswith(("/", "file:")) else ""


def _nested_texts(value: Any) -> Iterator[str]:
    for one in value if type(value) in (tuple, list) else ():
        yield from [one] if type(one) is str else _nested_texts(one)
