"""Watching torch's DataLoader: which loader begins an epoch, in which order it reads, and how far it is.

Four methods of torch are wrapped. `_BaseDataLoaderIter.__init__` runs before any worker is started. `_next_index` is
called once per batch, in the process that has the sampler. Its first call comes exactly when the sampler begins, which
fixes the order. `_MapDatasetFetcher.__init__` and `fetch` are where a process that loads calls the dataset. An error in
here ends the watching and not the job.
"""

import contextlib
import functools
import os
import weakref
from array import array
from typing import Any, Final

import numpy

from cachefs.hooks import opened
from cachefs.hooks.order import AnyOrder, SamplerOrder
from cachefs.publishing.channel import warn
from cachefs.publishing.places import Places
from cachefs.publishing.publication import Publication
from cachefs.publishing.sample_files import listed_files
from cachefs.publishing.sampler import PublishedSampler

# A script may make a loader anew for each epoch; so a consumer ends only so many seconds after its loader.
CLOSE_SECONDS: Final = 10.0
# Files of a dataset's list that are looked at to see whether the list is of files under a mount.
PROBES: Final = 16
# Epochs that are published where they follow from a spec: a job does not say how many it will run.
EPOCHS_AHEAD: Final = 1000


class Watch:
    """One loader, from its first epoch to its end."""

    def __init__(self, sampler: SamplerOrder, publication: Publication, observed: str) -> None:
        """observed: value of opened.CONSUMER_VARIABLE that has workers learn which files samples are; empty where that
        is known."""
        self.observed = observed
        self._sampler = sampler
        self._publication = publication
        self._epoch = -1
        self._spec: dict[str, Any] | None = None  # as last published
        # Are epochs counted here? They are unless all epochs follow from a spec, which has a count of its own.
        self._is_counting = False
        self._guess: AnyOrder | None = None  # the order that the next epoch was expected to have
        # Are guesses published? They are where the last one was right, or nobody else draws from the generator.
        self._trusts = sampler.has_own_generator
        weakref.finalize(self, publication.close, after=CLOSE_SECONDS).atexit = False

    def begin(self, index_iterator: Any) -> None:
        """The sampler is about to be asked for the first time in this epoch."""
        spec = None if self._is_counting else self._sampler.spec()
        if spec is not None and self._sampler.epoch != self._epoch:
            if self._spec != spec:
                self._publication.sampler({**spec, "epochs": self._sampler.epoch + EPOCHS_AHEAD}, self._sampler.epoch)
            self._spec, self._epoch = spec, self._sampler.epoch
            self.move(0)
            return
        # A DistributedSampler comes here where the script does not set its epoch, so that it repeats itself.
        self._is_counting = True
        self._epoch += 1
        if self._sampler.is_known:
            self._publish_known()
        elif not self._sampler.run_in_child(index_iterator, self._publication.sender(self._epoch)):
            warn(f"{self._sampler.name} gives an order only it knows; wrap it in cachefs.PublishedSampler")
        self.move(0)

    def move(self, position: int) -> None:
        """*position* samples of the epoch have been delivered."""
        self._publication.progress(self._epoch, position)

    def _publish_known(self) -> None:
        current, following = self._sampler.run_ahead()
        was_right = self._guess is not None and numpy.array_equal(self._guess, current)
        if not (was_right and self._trusts):
            self._publication.order(self._epoch, current)
        if self._guess is not None:
            self._trusts = was_right
        self._guess = following
        if self._trusts:
            self._publication.order(self._epoch + 1, following)


_watches: "weakref.WeakKeyDictionary[Any, Watch | None]" = weakref.WeakKeyDictionary()


def install(dataloader: Any) -> None:
    """Wrap methods of the module torch.utils.data.dataloader. Raises AttributeError where this torch lacks one."""
    iterator, fetcher = dataloader._BaseDataLoaderIter, dataloader._utils.fetch._MapDatasetFetcher
    iterator_init, next_index = iterator.__init__, iterator._next_index
    fetcher_init, fetch = fetcher.__init__, fetcher.fetch

    @functools.wraps(iterator_init)
    def init_watched(self: Any, loader: Any, *arguments: Any, **named: Any) -> None:
        self._cachefs_watch = _watch(loader, dataloader)
        iterator_init(self, loader, *arguments, **named)

    @functools.wraps(next_index)
    def next_index_watched(self: Any) -> Any:
        watch = self._cachefs_watch
        if watch is None:
            return next_index(self)
        _before(self, watch)
        index = next_index(self)
        drawn = self._cachefs_drawn
        drawn.append(drawn[-1] + (len(index) if isinstance(index, (list, tuple)) else 1))
        return index

    @functools.wraps(fetcher_init)
    def fetcher_init_watched(self: Any, *arguments: Any, **named: Any) -> None:
        fetcher_init(self, *arguments, **named)
        with contextlib.suppress(Exception):
            self.dataset = opened.watched(self.dataset)

    @functools.wraps(fetch)
    def fetch_watched(self: Any, index: Any) -> Any:
        if not isinstance(self.dataset, opened.Watched):
            return fetch(self, index)
        try:
            return fetch(self, index)
        finally:
            self.dataset.observer.flush()

    iterator._cachefs_watch = iterator._cachefs_begun = None
    iterator._cachefs_drawn = array("Q", [0])
    iterator.__init__, iterator._next_index = init_watched, next_index_watched
    fetcher.__init__, fetcher.fetch = fetcher_init_watched, fetch_watched


def _before(iterator: Any, watch: Watch) -> None:
    """A batch is about to be drawn. The batches that were yielded so far have been delivered."""
    try:
        if iterator._cachefs_begun is not iterator._sampler_iter:
            iterator._cachefs_begun = iterator._sampler_iter
            iterator._cachefs_drawn = array("Q", [0])
            watch.begin(iterator._sampler_iter)
        else:
            drawn = iterator._cachefs_drawn
            watch.move(drawn[min(iterator._num_yielded, len(drawn) - 1)])
    except Exception as error:
        iterator._cachefs_watch = None
        warn(f"cannot tell how a DataLoader goes on ({error!r})")


def _watch(loader: Any, dataloader: Any) -> Watch | None:
    os.environ.pop(opened.CONSUMER_VARIABLE, None)
    try:
        if loader not in _watches:
            _watches[loader] = _new_watch(loader, dataloader)
        watch = _watches[loader]
    except Exception as error:
        warn(f"cannot watch a DataLoader ({error!r})")
        return None
    if watch is not None and watch.observed:
        os.environ[opened.CONSUMER_VARIABLE] = watch.observed
    return watch


def _new_watch(loader: Any, dataloader: Any) -> Watch | None:
    places = Places()
    if not places or _publishes_itself(loader):
        return None
    if loader._dataset_kind == dataloader._DatasetKind.Iterable:
        name = type(loader.dataset).__name__
        warn(f"{name} is an IterableDataset, which alone knows what it reads; publish its shards with cachefs.publish")
        return None
    if not hasattr(loader.dataset, "__len__"):
        return None
    files = listed_files(loader.dataset)
    length = len(loader.dataset)
    if files is not None and not any(map(places.mount_of, files[:: max(1, length // PROBES)])):
        return None
    sampler = SamplerOrder(loader)
    rank, world_size = sampler.rank()
    opening = {
        "source": "cachefs run",
        "length": length,
        "learn": files is None,
        "workers": loader.num_workers,
        "batch_size": sampler.batch_size,
        "prefetch": loader.prefetch_factor or 0,
        "world_size": world_size,
    }
    publication = Publication(files or (), opening, rank=rank)
    return Watch(sampler, publication, f"{publication.slot}:{length}" if files is None else "")


def _publishes_itself(loader: Any) -> bool:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, PublishedSampler) for sampler in samplers)
