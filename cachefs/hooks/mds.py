"""Finds the shards of a mosaicml-streaming dataset (MDS, as its `index.json` lists them), and their order.

Which sample each worker of each rank reads when follows from the dataset's seed, the number of the epoch and the
numbers of nodes, ranks and workers. The library computes the order from the dataset's attributes, with generators that
it makes for that. This module calls the library once more, with a copy of the attributes, where it has nothing to warn
of.
"""

import inspect
import json
import logging
import os
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from cachefs.hooks.shards import local_path
from cachefs.publishing.job_objects import attributes_of
from cachefs.publishing.pure import VersionRange, is_installed

_STREAMING: Final = VersionRange("streaming", (0, 8), (0, 14))
_MODULE: Final = "streaming.base.dataset"
# Methods of a dataset that determine which samples are read; none of them may be of a derived class.
_LIBRARY_METHODS: Final = ("__iter__", "_get_work", "_resume", "resample_streams", "prepare_shard")
# Maximum numbers of samples and shards of a dataset whose order is computed, in each rank and while the job waits: 0.3
# us and 250 bytes for a sample, and 15 us for a shard; and maximum number of samples for which the order of the next
# epoch is computed too.
MAX_SAMPLES: Final = 3 << 19
MAX_SAMPLES_FOR_NEXT_EPOCH: Final = 1 << 18
MAX_SHARDS: Final = 1 << 14
# Shuffling algorithms for which the library's default number of canonical nodes is larger than the number of nodes; and
# the library's minimum default size of a shuffle block.
# nodes; and the minimum size of a shuffle block for the others.
_FINE_ALGORITHMS: Final = ("py1s", "py2s")
_CANONICAL_NODES_PER_NODE: Final = 64
_MIN_SHUFFLE_BLOCK: Final = 1 << 18
_SHUFFLE_BLOCK_OF_ALL_NODES: Final = 4_000_000
# State of a shard whose file is where it is read.
_SHARD_IS_LOCAL: Final = 3

Samples = NDArray[numpy.int64]


@dataclass(frozen=True)
class MdsShards:
    """The state of a dataset as an epoch begins."""

    files: tuple[str, ...]
    # The first sample of each shard, shape (shards,).
    first_samples: Samples
    # Attributes of the dataset, with which the library computes.
    attributes: dict[str, Any]
    # The library's method, unbound.
    resample_streams: Any
    epoch: int
    # Whether each shard is read from its file in this epoch, and in the next one, shape (shards,): a shard that the
    # library copies to a directory of its own is read once.
    is_read: NDArray[numpy.bool_]
    is_read_again: NDArray[numpy.bool_]

    def epoch_orders(self, earlier_epochs: int, workers: int, *, keeps_workers: bool) -> list[list[int]]:
        first = self._epoch_order(self.epoch, workers, self.is_read)
        if self.attributes["num_samples"] > MAX_SAMPLES_FOR_NEXT_EPOCH or not self.is_read_again.any():
            return [first]
        return [first, self._epoch_order(self.epoch + 1, workers, self.is_read_again)]

    def _epoch_order(self, epoch: int, workers: int, is_read: NDArray[numpy.bool_]) -> list[int]:
        world = attributes_of(self.attributes["_parallel_rank_world"])
        nodes, ranks = world["num_nodes"], world["ranks_per_node"]
        samples = self._sample_numbers(
            epoch, SimpleNamespace(num_nodes=nodes, ranks_per_node=ranks, workers_per_rank=max(1, workers))
        )
        mine: Samples = samples[world["node"], world["rank_of_node"]]
        # Workers take turns by batch: from shape (workers, batches, samples) to (batches, workers, samples).
        turns = mine.transpose(1, 0, 2).reshape(-1)
        shards = numpy.searchsorted(self.first_samples, turns[turns >= 0], side="right") - 1
        _, begins = numpy.unique(shards, return_index=True)
        return [int(number) for number in shards[numpy.sort(begins)] if is_read[number]]

    def _sample_numbers(self, epoch: int, world: Any) -> Samples:
        """Return sample numbers, shape (nodes, ranks of a node, workers of a rank, batches, samples of a batch)."""
        dataset = SimpleNamespace(**self.attributes)
        dataset.resample_streams = partial(self.resample_streams, dataset)
        generate = sys.modules["streaming.base.batching.random"].generate_work_random_batching
        found: Samples = generate(dataset, world, epoch, 0)
        return found


def shards_of(dataset: Any) -> MdsShards | None:
    """Return the shards of a mosaicml-streaming dataset; None for other datasets, where shards are not on this machine,
    and where their order does not follow from the dataset."""
    if _MODULE not in sys.modules or not is_installed(_STREAMING):
        return None
    kind = sys.modules[_MODULE].StreamingDataset
    if not all(
        inspect.getattr_static(type(dataset), name, None) is vars(kind).get(name, kind) for name in _LIBRARY_METHODS
    ):
        return None
    own = attributes_of(dataset)
    shards, streams = own.get("shards"), own.get("streams")
    if type(shards) is not list or type(streams) is not list or not 0 < len(shards) <= MAX_SHARDS:
        return None
    epoch = int(own["_next_epoch"].get())
    if own.get("batching_method") != "random" or _is_resumed(own, epoch):
        return None
    attributes = _with_defaults(own)
    if max(attributes["num_samples"], attributes["epoch_size"]) > MAX_SAMPLES or _has_warnings(attributes):
        return None
    files = tuple(
        _path_of_shard(shard, streams[stream]) for shard, stream in zip(shards, own["stream_per_shard"], strict=True)
    )
    if not all(files) or len(set(files)) != len(files):
        return None
    is_copied = numpy.array([_is_copied(attributes_of(stream)) for stream in streams])[own["stream_per_shard"]]
    is_read = ~is_copied | (own["_shard_states"].numpy() != _SHARD_IS_LOCAL)
    is_read_again = ~is_copied | bool(own["cache_limit"])
    if not is_read.any():
        return None
    return MdsShards(
        files, own["sample_offset_per_shard"], attributes, kind.resample_streams, epoch, is_read, is_read_again
    )


def _with_defaults(own: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes with the library's defaults for those not set, as at the beginning of an epoch."""
    nodes = attributes_of(own["_parallel_rank_world"])["num_nodes"]
    canonical = own["num_canonical_nodes"] or (
        _CANONICAL_NODES_PER_NODE * nodes if own["shuffle_algo"] in _FINE_ALGORITHMS else nodes
    )
    block = own["shuffle_block_size"] or max(_SHUFFLE_BLOCK_OF_ALL_NODES // canonical, _MIN_SHUFFLE_BLOCK)
    return {**own, "num_canonical_nodes": canonical, "shuffle_block_size": block}


def _is_resumed(own: dict[str, Any], epoch: int) -> bool:
    """Return whether this epoch resumes from a checkpoint, and so does not read its first shards."""
    if "_resume_shm" not in own:
        return False
    text = bytes(own["_resume_shm"].buf).partition(b"\0")[0]
    return int(json.loads(text)["epoch"]) >= epoch


def _is_copied(stream: dict[str, Any]) -> bool:
    remote, local = stream.get("remote"), stream.get("local")
    return bool(remote) and local_path(str(remote)) != local_path(str(local))


def _has_warnings(attributes: dict[str, Any]) -> bool:
    """Return whether the library would warn, log or raise, which must not happen twice, or before the job's own
    call."""
    if logging.getLogger(f"{_MODULE.rpartition('.')[0]}.partition").isEnabledFor(logging.DEBUG):
        return True
    world, canonical = attributes_of(attributes["_parallel_rank_world"]), attributes["num_canonical_nodes"]
    nodes, samples = world["num_nodes"], attributes["epoch_size"]
    is_even = canonical % nodes == 0 or nodes % canonical == 0
    is_plenty = samples > canonical and samples // nodes >= 2 * world["ranks_per_node"]
    largest = int(attributes["samples_per_shard"].max())
    is_fine = (
        not attributes["shuffle"]
        or attributes["shuffle_algo"] != "py1e"
        or largest <= attributes["shuffle_block_size"] * 3 // 4
    )
    return not (is_even and is_plenty and is_fine and type(attributes["batch_size"]) is int)


def _path_of_shard(shard: Any, stream: Any) -> str:
    """Return the path from which a shard is read, or copied; where it is stored it may be compressed. "" where it is no
    file of this machine, or several."""
    found, stored = attributes_of(shard), attributes_of(stream)
    remote, packed, raw = stored.get("remote"), found.get("zip_data"), found.get("raw_data")
    info = packed if remote and packed is not None else raw
    directory = remote or found.get("dirname")
    if info is None or type(directory) is not str:
        return ""
    return local_path(os.path.join(directory, found.get("split") or "", info.basename))
