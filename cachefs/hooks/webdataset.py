"""Finds the shards of a WebDataset, and the order in which its epochs open them.

Both follow from the stages of its pipeline: a list of shards, how they are split among nodes and workers, and how the
list is shuffled. The stages have to be the library's own, unchanged. Those that shuffle are run on numbers of shards,
as copies, where they have a seed; none of them draws from a generator of the job.
"""

import copy
import inspect
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any, Final

from cachefs.hooks.shards import interleave, local_path
from cachefs.publishing import clock
from cachefs.publishing.job_objects import attributes_of
from cachefs.publishing.pure import VersionRange, is_installed, qualified_name

_WEBDATASET: Final = VersionRange("webdataset", (0, 2), (1, 1))
# Maximum number of shards, and of stages of a pipeline.
MAX_SHARDS: Final = 1 << 18
MAX_STAGES: Final = 16
# Number of published passes over the shards in an epoch that repeats them.
PUBLISHED_PASSES: Final = 2
# Maximum seconds for computing an order, for which the job waits, and number of shards between two looks at the clock.
ORDER_SECONDS: Final = 0.2
SHARDS_PER_CLOCK_CHECK: Final = 1 << 12
_LIST: Final = "webdataset.shardlists.SimpleShardList"
_SHUFFLE: Final = "webdataset.filters.detshuffle"
_CURRIED: Final = "webdataset.filters.FilterFunction"
_OPENERS: Final = ("webdataset.cache.StreamingOpen", "webdataset.cache.FileCache")
_SAMPLES: Final = ("tarfile_samples", "tarfile_to_samples")


@dataclass(frozen=True)
class WebDatasetShards:
    """The state of a pipeline, read once, as it does not change."""

    # Paths as in the pipeline.
    files: tuple[str, ...]
    # Order of the list, as numbers of shards; and the stages between the list and the one that opens the shards.
    listed_shards: tuple[int, ...]
    stages: tuple[Any, ...]
    # Number of passes of an epoch over all shards.
    passes: int

    def epoch_orders(self, earlier_epochs: int, workers: int, *, keeps_workers: bool) -> list[list[int]]:
        # New workers of each epoch have the pipeline in its present state; kept workers have advanced theirs.
        gone = earlier_epochs if keeps_workers else 0
        deadline = clock.monotonic() + ORDER_SECONDS
        try:
            first = self.epoch_order(workers, gone, deadline)
            follows = keeps_workers or not workers
            return [first, self.epoch_order(workers, gone + 1, deadline) if follows else first]
        except ShardOrderTooSlow:
            return []

    def epoch_order(self, workers: int, ahead: int = 0, deadline: float = inf) -> list[int]:
        """Return the order of the present epoch, or of the *ahead*-th after it with the same workers. Raises
        ShardOrderTooSlow."""
        found: list[int] = []
        for one in range(ahead * self.passes, (ahead + 1) * self.passes):
            found += interleave(self._shards_of_workers(max(1, workers), one, deadline))
        return found

    def _shards_of_workers(self, workers: int, ahead: int, deadline: float) -> list[list[int]]:
        """Return the shards of each worker. Stages before the workers' split are the same for all workers."""
        shards: Iterable[int] = self.listed_shards
        for number, stage in enumerate(self.stages):
            if stage is sys.modules["webdataset.shardlists"].split_by_worker:
                shared = _collect_until(deadline, shards)
                later_stages = self.stages[number + 1 :]
                parts = [shared[worker::workers] for worker in range(workers)]
                return [
                    _collect_until(deadline, _apply_stages(later_stages, part, ahead, (worker, workers)))
                    for worker, part in enumerate(parts)
                ]
            shards = _apply_stage(stage, iter(shards), ahead, (0, 1))
        shared = _collect_until(deadline, shards)
        if len(shared) * workers > MAX_SHARDS:
            raise ShardOrderTooSlow
        return [shared] * workers


class ShardOrderTooSlow(Exception):
    """Raised where the job would wait too long for an order of shards."""


def _apply_stages(
    stages: tuple[Any, ...], shards: Iterable[int], ahead: int, worker_and_count: tuple[int, int]
) -> Iterable[int]:
    for stage in stages:
        shards = _apply_stage(stage, iter(shards), ahead, worker_and_count)
    return shards


def _apply_stage(stage: Any, shards: Iterator[int], ahead: int, worker_and_count: tuple[int, int]) -> Iterator[int]:
    """Return what a stage gives for *shards*, *ahead* passes from now. worker_and_count: worker, and number of
    workers."""
    kind = qualified_name(type(stage))
    if stage is sys.modules["webdataset.shardlists"].split_by_worker:
        return islice(shards, worker_and_count[0], None, worker_and_count[1])
    if stage is sys.modules["webdataset.shardlists"].split_by_node:
        rank, world_size, *_ = sys.modules["webdataset.utils"].pytorch_worker_info()
        return islice(shards, rank, None, world_size)
    if kind == _SHUFFLE:
        shuffle = copy.copy(stage)
        shuffle.epoch += ahead
        return iter(shuffle.run(shards))
    if kind == _CURRIED:
        return iter(stage.f(shards, *stage.args, **stage.kw))
    return shards


def _collect_until(deadline: float, shards: Iterable[int]) -> list[int]:
    """Return all shards. Raises ShardOrderTooSlow where they do not come in time."""
    found: list[int] = []
    waiting = iter(shards)
    while part := list(islice(waiting, SHARDS_PER_CLOCK_CHECK)):
        found += part
        if clock.monotonic() > deadline:
            raise ShardOrderTooSlow
    return found


def shards_of(dataset: Any) -> WebDatasetShards | None:
    """Return the shards of a WebDataset pipeline; None for other datasets, where shards are no files, and where their
    order does not follow from the pipeline."""
    if not is_installed(_WEBDATASET) or "webdataset.compat" not in sys.modules:
        return None
    pipeline_class = sys.modules["webdataset.pipeline"].DataPipeline
    if inspect.getattr_static(type(dataset), "__iter__", None) is not vars(pipeline_class)["__iter__"]:
        return None
    own = attributes_of(dataset)
    pipeline, repetitions = own.get("pipeline"), own.get("repetitions")
    if type(pipeline) is not list or type(repetitions) is not int or len(pipeline) < 2:
        return None
    listed = attributes_of(pipeline[0])
    stages: list[Any] = []
    urls, seed = listed.get("urls"), listed.get("seed")
    if qualified_name(type(pipeline[0])) != _LIST or type(urls) is not list or not 0 < len(urls) <= MAX_SHARDS:
        return None
    files = tuple(local_path(url) if type(url) is str else "" for url in urls)
    if not all(files) or type(seed) not in (int, float, type(None)):
        return None
    for stage in pipeline[1:MAX_STAGES]:
        if _is_opening_stage(stage):
            numbers = list(range(len(files)))
            if seed is not None:
                random.Random(seed).shuffle(numbers)
            return WebDatasetShards(files, tuple(numbers), tuple(stages), min(repetitions, PUBLISHED_PASSES))
        if not _has_known_order(stage):
            return None
        stages.append(stage)
    return None


def _is_opening_stage(stage: Any) -> bool:
    if qualified_name(type(stage)) == _CURRIED:
        readers = vars(sys.modules["webdataset.tariterators"])
        return any(stage.f is readers.get(name) for name in _SAMPLES)
    return qualified_name(type(stage)) in _OPENERS


def _has_known_order(stage: Any) -> bool:
    """Return whether the order of a stage follows from its arguments."""
    lists, filters = sys.modules["webdataset.shardlists"], sys.modules["webdataset.filters"]
    if any(stage is one for one in (lists.single_node_only, lists.split_by_node, lists.split_by_worker)):
        return True
    kind = qualified_name(type(stage))
    if kind == _SHUFFLE:
        own = attributes_of(stage)
        return type(own.get("seed")) is int and type(own.get("epoch")) is int
    if kind != _CURRIED or stage.f is not vars(filters).get("_shuffle"):
        return False
    return type(stage.kw.get("seed")) is int and not {"rng", "handler"} & set(stage.kw) and len(stage.args) <= 2
