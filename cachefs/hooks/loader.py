"""Watches torch's DataLoader: which loader begins an epoch, in which order it reads, and its position.

Two methods of `_BaseDataLoaderIter` are watched. `__init__` runs before any worker is started. `_next_index` is called
once per batch, in the process with the sampler. Both are replaced by descriptors: when torch looks one up, the
descriptor records the state before the call, and returns the method itself. No function of ours is then on the stack,
so that tracebacks, and the places that warnings name, are the same as without cachefs. A failure in this module ends
the watching and not the job. The same technique finds where a loader was made (cachefs.hooks.creation_site), and
measures how long the job's loop waits: `for batch in loader` looks up `__next__` of torch's iterator for each batch,
and torch counts the batch in `_num_yielded` just before returning it. The descriptor of the latter keeps the number
where torch would, in the iterator.

`planned_epochs` finds the number of epochs in the arguments of the training program.
"""

import functools
import itertools
import os
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, TypeVar

from cachefs.hooks import batch_reports, creation_site, opened_files
from cachefs.hooks.loader_watch import LoaderWatch, count_samples
from cachefs.hooks.mounted import find_listed_files
from cachefs.hooks.order.foresee import SamplerOrder
from cachefs.hooks.stream_watch import StreamWatch
from cachefs.publishing import clock
from cachefs.publishing.channel import iterated_loaders, warn_once
from cachefs.publishing.files.listed import read_listing
from cachefs.publishing.job_exceptions import is_from_job
from cachefs.publishing.job_objects import attributes_of, length_of
from cachefs.publishing.mount_resolver import MountResolver
from cachefs.publishing.page import Stopwatch
from cachefs.publishing.sampler import PublishedSampler

# `--epochs`, `--num-epochs`, `--max_epochs`, `--num_train_epochs`, `trainer.max_epochs` of Hydra …
_NAME: Final = re.compile(
    r"(?:--?)?(?:[A-Za-z0-9_]+\.)*(?:(?:n|num|max|total|train|training)[-_])*epochs?", re.IGNORECASE
)
# Maximum number of arguments examined, and of epochs of a job.
_MOST_ARGUMENTS: Final = 1000
_MOST_EPOCHS: Final = 1_000_000
SOURCE: Final = "cachefs run"
# Maximum number of creation sites whose stopwatches are kept.
MAX_STOPWATCHES: Final = 256
Watched = TypeVar("Watched", LoaderWatch, StreamWatch)


def planned_epochs(arguments: Sequence[str]) -> int:
    """Return the number of epochs in a program's arguments; 0 where they name none, or several."""
    found = set()
    for position, argument in enumerate(arguments[:_MOST_ARGUMENTS]):
        name, equals, value = argument[:200].partition("=")
        if not _NAME.fullmatch(name) or not (equals or name.startswith("-")):
            continue
        value = value if equals else next(iter(arguments[position + 1 : position + 2]), "")
        if re.fullmatch(r"\d{1,7}", value) and 0 < int(value) <= _MOST_EPOCHS:
            found.add(int(value))
    return found.pop() if len(found) == 1 else 0


class _MethodDescriptor:
    """Descriptor in place of a method."""

    def __init__(self, method: Any) -> None:
        functools.update_wrapper(self, method)  # type: ignore[arg-type]
        self._method = method


class NextDescriptor(_MethodDescriptor):
    """Descriptor in place of `_BaseDataLoaderIter.__next__`."""

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        if iterator is None:
            return self._method
        progress = iterator._cachefs
        if progress is not None:
            progress.record_request(clock.monotonic_ns())
        return functools.partial(self._method, iterator)


class NumYieldedDescriptor:
    """Descriptor in place of `_BaseDataLoaderIter._num_yielded`: the batches given in the current epoch."""

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        if iterator is None:
            return self
        try:
            return vars(iterator)["_num_yielded"]
        except KeyError:
            raise AttributeError(f"{type(iterator).__name__!r} object has no attribute '_num_yielded'") from None

    def __set__(self, iterator: Any, number: Any) -> None:
        vars(iterator)["_num_yielded"] = number
        progress = iterator._cachefs
        if progress is not None:
            try:
                progress.record_batch(iterator, clock.monotonic_ns(), sys._getframe(1))
            except Exception as error:  # no failure here may end the job
                if is_from_job(error):
                    raise
                warn_once(f"cannot measure how long the loop waits for a DataLoader ({error!r})")

    def __delete__(self, iterator: Any) -> None:
        del vars(iterator)["_num_yielded"]


def install(dataloader: Any) -> None:
    """Watch the loaders of torch.utils.data.dataloader. Raises AttributeError where this torch lacks a name."""
    iterator = dataloader._BaseDataLoaderIter
    if isinstance(iterator.__dict__["_next_index"], NextIndexDescriptor):
        return  # another installation of cachefs watches, or the module was loaded before
    fetch = dataloader._utils.fetch
    opened_files.install(fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
    fetch._BaseDatasetFetcher.__init__ = opened_files.FetcherInitDescriptor(fetch._BaseDatasetFetcher.__init__)
    batch_reports.install(fetch._MapDatasetFetcher)
    exclude_from_compile()
    iterable = dataloader._DatasetKind.Iterable
    iterator._cachefs = None
    iterator.__init__ = InitDescriptor(iterator.__init__, iterable)
    iterator._next_index = NextIndexDescriptor(iterator._next_index)
    iterator.__next__ = NextDescriptor(iterator.__next__)
    iterator._num_yielded = NumYieldedDescriptor()
    loader = dataloader.DataLoader
    loader.check_worker_number_rationality = creation_site.CreationDescriptor(loader.check_worker_number_rationality)


class InitDescriptor(_MethodDescriptor):
    """Descriptor in place of `_BaseDataLoaderIter.__init__`."""

    def __init__(self, method: Any, iterable: Any) -> None:
        """iterable: the kind of dataset without numbered samples."""
        super().__init__(method)
        self._iterable = iterable

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        if iterator is None:
            return self._method
        try:
            # torch calls it by `super().__init__(loader)`.
            loader = sys._getframe(1).f_locals.get("loader")
            opened_files.remove_ended()
            if loader is not None:
                iterated_loaders.add(os.getpid())
                _begin_watching(iterator, loader, self._iterable)
        except Exception as error:  # no failure here may end the job
            if is_from_job(error):
                raise
            warn_once(f"cannot watch a DataLoader ({error!r})")
        return functools.partial(self._method, iterator)


class NextIndexDescriptor(_MethodDescriptor):
    """Descriptor in place of `_BaseDataLoaderIter._next_index`."""

    def __get__(self, iterator: Any, kind: Any = None) -> Any:
        if iterator is None:
            return self._method
        method = functools.partial(self._method, iterator)
        progress = iterator._cachefs
        if progress is None or not progress.before_draw(iterator):
            return method
        # `next` of C calls the method, and `after_draw` once it has returned: neither has a frame while the sampler
        # runs.
        return functools.partial(next, map(progress.after_draw, iter(method, _NEVER_EQUAL)))


class _NeverEqual:
    """Sentinel of an iterator of calls; no call returns anything equal to it."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


_NEVER_EQUAL: Final = _NeverEqual()


class IteratorProgress:
    """The position of one iterator of a loader in its epoch."""

    def __init__(self, watched: LoaderWatch | StreamWatch, iterator: Any) -> None:
        self.watch: Final = watched
        self._iterator = weakref.ref(iterator)
        self._is_watching = True
        # Whether a signal handler of the job has raised while this epoch was published, which may be half published.
        self._was_interrupted = False
        self._epoch: Any = None  # the sampler's iterator, or a reference to it
        self._is_drawing = False  # the sampler was called, and has not returned yet
        self._yielded = 0  # batches
        self._delivered = 0  # samples
        self._lengths: deque[int] = deque()  # of the batches that were drawn and not delivered

    def before_draw(self, iterator: Any) -> bool:
        """Record that a batch is about to be drawn, and the yielded batches were delivered. Return False once the
        iterator is not watched any more."""
        if not self._is_watching:
            return False
        try:
            if not self._is_same_epoch(iterator):
                self._was_interrupted = False
                self._yielded = self._delivered = 0
                self._lengths.clear()
                self._is_drawing = False
                self.watch.begin_epoch(iterator._sampler_iter, attributes_of(iterator).get("_dataset"))
                # Without workers an epoch begins when the loop asks for its first batch.
                now, length = clock.monotonic_ns(), self.watch.epoch_length
                self.watch.stopwatch.begin_epoch(now, length, has_requested=not iterator._num_workers)
            elif not self._was_interrupted:
                self._count_delivered(iterator._num_yielded)
                if self._is_drawing:
                    self.watch.stopwatch.set_length(self._delivered + sum(self._lengths))
                self.watch.record_delivered(self._delivered, at_end=self._is_drawing)
            self._is_drawing = True
        except Exception as error:  # no failure here may end the job
            self._was_interrupted = is_from_job(error)
            if self._was_interrupted:
                raise
            self._stop_watching(error)
        return self._is_watching

    def after_draw(self, index: Any) -> Any:
        """Record that *index* was drawn, and return it."""
        iterator = self._iterator()
        try:
            self._is_drawing = False
            self._lengths.append(count_samples(index))
            if iterator is not None and not self._was_interrupted:
                self.watch.record_draw(
                    index, iterator._sampler_iter, self._delivered, attributes_of(iterator).get("_dataset")
                )
        except Exception as error:  # as above
            self._was_interrupted = is_from_job(error)
            if self._was_interrupted:
                raise
            self._stop_watching(error)
        return index

    def record_request(self, now: int) -> None:
        """Record that the job's loop asks for a batch. now: monotonic nanoseconds."""
        self.watch.stopwatch.record_request(now)

    def record_batch(self, iterator: Any, now: int, caller: FrameType) -> None:
        """Record that the loop gets a batch. now: monotonic nanoseconds; caller: torch's function that returns the
        batch."""
        if not self._is_watching or self._was_interrupted or not iterator._num_yielded:
            return
        before = self._delivered
        is_measured = True
        if self._lengths and isinstance(self.watch, StreamWatch):
            samples = self.watch.count_received(caller, self._lengths[0])
            is_measured = samples is not None
            self._lengths[0] = self._lengths[0] if samples is None else samples
        self._count_delivered(iterator._num_yielded)
        self.watch.stopwatch.record_batch(now, self._delivered - before, is_measured=is_measured)
        self.watch.record_delivered(self._delivered, at_end=False)
        self.watch.publish_counts()

    def _count_delivered(self, yielded: int) -> None:
        """Count the samples of the first *yielded* batches of the epoch as delivered."""
        while self._yielded < yielded and self._lengths:
            self._yielded += 1
            self._delivered += self._lengths.popleft()

    def _is_same_epoch(self, iterator: Any) -> bool:
        """Return whether the sampler's iterator is that of the last call. Refers to it weakly where possible, since the
        job may see when the iterator is collected."""
        current = iterator._sampler_iter
        known = self._epoch() if isinstance(self._epoch, weakref.ref) else self._epoch
        if known is current:
            return True
        try:
            self._epoch = weakref.ref(current)
        except TypeError as error:  # an iterator of Python itself
            if is_from_job(error):
                raise
            self._epoch = current
        return False

    def _stop_watching(self, error: Exception) -> None:
        self._is_watching = False
        warn_once(f"cannot follow the position of a DataLoader ({error!r})")


# Keyed by identity, since a loader may compare equal to another.
_watches: dict[int, tuple[weakref.ref[Any], LoaderWatch | StreamWatch | None]] = {}


def _begin_watching(iterator: Any, loader: Any, iterable: Any) -> None:
    """Watch *iterator*, which is made for an epoch of *loader*, or for all its epochs."""
    # A loader without workers may be nested in a dataset, in a worker that loads for another loader.
    has_workers = bool(attributes_of(loader).get("num_workers"))
    if has_workers:
        opened_files.set_loader(None)
    known = _watches.get(id(loader))
    if known is None or known[0]() is not loader:
        number = id(loader)
        known = (weakref.ref(loader, lambda _: _forget(number)), _new_watch(loader, iterable))
        _watches[number] = known
    watched = known[1]
    if watched is None:
        return
    iterator._cachefs = IteratorProgress(watched, iterator)
    if has_workers:
        opened_files.set_loader(watched.number)


def _forget(number: int) -> None:
    known = _watches.get(number)
    if known is not None and known[0]() is None:
        del _watches[number]


def _new_watch(loader: Any, iterable: Any) -> LoaderWatch | StreamWatch | None:
    points = MountResolver()
    if not points or _has_published_sampler(loader):
        return None
    settings = attributes_of(loader)
    dataset = settings.get("dataset")
    if settings.get("_dataset_kind") == iterable:
        opened_files.watch_opens()
        opening = _identifying_fields(loader)
        return _with_stopwatch(StreamWatch(loader, opening), loader, opening)
    found = read_listing(dataset)
    listed = find_listed_files(dataset, found, length_of(dataset), points)
    if listed.is_outside_mounts:
        return None
    opened_files.watch_opens()
    sampler = SamplerOrder(loader)
    opening = {
        **_identifying_fields(loader),
        "sampler": _type_name(_ordering_sampler(settings)),
        "compare": True,
        "workers": settings.get("num_workers") or 0,
        "batch_size": sampler.batch_size,
        "prefetch": settings.get("prefetch_factor") or 0,
        "world_size": sampler.rank()[1],
    }
    return _with_stopwatch(LoaderWatch(loader, sampler, opening, listed.files, found), loader, opening)


def _identifying_fields(loader: Any) -> dict[str, Any]:
    """Return the fields of the opening that identify the loader to people."""
    dataset, made = _type_name(attributes_of(loader).get("dataset")), creation_site.site_of(loader)
    location = made[0] if made else ""
    # Two loaders made by one line are told apart by their callers.
    others = {other for _, other in _stopwatches if other != made}
    if len(made) > 1 and any(other[:1] == made[:1] for other in others):
        outer = next((line for line in made[1:] if all(line not in other for other in others)), "")
        location = f"{location} from {outer}" if outer else location
    known = _stopwatches.get((dataset, made))
    number = next(_loader_numbers) if known is None or known[0]() is not None else known[1]
    return {
        "source": SOURCE, "dataset": dataset, "place": location, "planned": planned_epochs(sys.argv[1:]),
        "number": number,
    }  # fmt: skip


def _with_stopwatch(watched: Watched, loader: Any, opening: dict[str, Any]) -> Watched:
    """Return the watch with its stopwatch, or with the previous one where the loader is made anew for each epoch."""
    key = (opening["dataset"], creation_site.site_of(loader))
    known = _stopwatches.get(key)
    if known is not None and known[1] == opening["number"]:
        watched.stopwatch = known[2]
    if len(_stopwatches) < MAX_STOPWATCHES or key in _stopwatches:
        _stopwatches[key] = (weakref.ref(loader), opening["number"], watched.stopwatch)
    return watched


_loader_numbers = itertools.count()
# By class of the dataset and creation site (cachefs.hooks.creation_site): a loader, its number, and its stopwatch.
# Loaders of one line are told apart as long as there is room here.
_stopwatches: dict[tuple[str, tuple[str, ...]], tuple[weakref.ref[Any], int, Stopwatch]] = {}


def _type_name(thing: Any) -> str:
    return type(thing).__name__


def _ordering_sampler(settings: dict[str, Any]) -> Any:
    """Return the sampler that determines the order of a loader with these attributes, looking through torch's
    BatchSampler, which only groups."""
    batches, sampler = settings.get("batch_sampler"), settings.get("sampler")
    return sampler if batches is None or _type_name(batches) == "BatchSampler" else batches


def _has_published_sampler(loader: Any) -> bool:
    sampler, batches = (attributes_of(loader).get(name) for name in ("sampler", "batch_sampler"))
    samplers = (sampler, batches, attributes_of(batches).get("sampler"))
    return any(issubclass(type(one), PublishedSampler) for one in samplers)


def exclude_from_compile() -> None:
    """Exclude our functions from torch.compile, as a job may compile the function that iterates a loader."""
    frames = getattr(getattr(sys.modules["torch"]._C, "_dynamo", None), "eval_frame", None)
    if frames is None:
        return  # this torch does not compile
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        exclude: Callable[[CodeType], Any] = functools.partial(_set_exec_strategy, frames.set_code_exec_strategy, skip)
    else:
        exclude = frames.skip_code
    for name, module in list(sys.modules.items()):
        if name.startswith("cachefs."):
            for function in _functions_of_module(vars(module), name):
                exclude(function.__code__)


def _set_exec_strategy(function: Any, strategy: Any, code: CodeType) -> None:
    function(code, strategy)


def _functions_of_module(names: Any, module: str) -> Iterator[FunctionType]:
    for value in list(names.values()):
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(value, FunctionType) and value.__module__ == module:
            yield value
        elif isinstance(value, type) and value.__module__ == module:
            yield from _functions_of_module(vars(value), module)
