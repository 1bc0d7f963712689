"""Publishing by a line in the training script: `publish`, and a sampler that wraps any other."""

import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any

from cachefs.publishing.files.sample_files import listed_files
from cachefs.publishing.job_exceptions import is_from_job, suppress_own
from cachefs.publishing.job_objects import length_of
from cachefs.publishing.publication import Publication

Path = str | os.PathLike[str]


def publish(  # noqa: PLR0913  # a call in users' scripts: one keyword for each option
    files: Path | Sequence[Path] | Any,
    *,
    sampler: Any = None,
    records: str = "",
    consumer: str | None = None,
    rank: int | None = None,
    world_size: int = 1,
    workers: int = 0,
    batch_size: int = 1,
    prefetch: int = 2,
) -> Publication:
    """Begin to publish what this process will read.

    Never raises, so that it cannot end a training: without a daemon or a mount, or with an invalid argument, nothing is
    published, and the first failure prints one line on stderr.

    Args:
        files: The path of each sample; or a directory under a mount, whose files, in order of their paths, are the
            samples; or a dataset that lists its files as torchvision's and Hugging Face's do.
        sampler: A cachefs.SamplerSpec, from which the daemon computes every epoch. Without one, pass the order of each
            epoch to the result's `order`.
        records: Set where the samples are records of the files, in order; the kind of the files (`npy`, `tar`,
            `tfrecord`, `fixed:<bytes>`).
        consumer: Its name, unique within the job; by default made of the rank or the process number.
        rank: Of this process in the job; by default the environment's (RANK, SLURM_PROCID, ...).
        world_size: Number of processes in the job, where *rank* is given.
        workers, batch_size, prefetch: As the DataLoader's, which reads that much out of order.

    Returns:
        The publication, which also is a context manager.
    """
    opening: dict[str, Any] = {
        "world_size": world_size,
        "workers": workers,
        "batch_size": batch_size,
        "prefetch": prefetch,
        "indexer": records,
    }
    try:
        paths: Sequence[str] = ()
        if isinstance(files, (str, os.PathLike)):
            opening["tree"] = os.fspath(files)
        else:
            paths = _sample_paths(files)
        fields = None if sampler is None else _spec_fields(sampler)
    except Exception as error:  # arguments of the job may be of any kind
        if is_from_job(error):
            raise
        return Publication.failed(error)
    publication = Publication(paths, opening, rank=rank, name=consumer)
    if fields is not None:
        publication.sampler(fields)
    return publication


class PublishedSampler:
    """A sampler that wraps another one, and publishes its order at the start of each epoch.

        sampler = cachefs.PublishedSampler(DistributedSampler(dataset), dataset)
        loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=4)

    The wrapped sampler is exhausted when an epoch begins. With *workers* given, it is known how far the loader runs
    ahead, and progress is published too; without, progress is seen at the mount.
    """

    def __init__(self, sampler: Any, files: Path | Sequence[Path] | Any, **options: Any) -> None:
        """Wrap a sampler.

        Args:
            sampler: The sampler to wrap.
            files: As in `publish`.
            options: Further arguments of `publish`.

        Raises:
            TypeError: `publish` does not have one of the options.
        """
        inspect.signature(publish).bind(files, **options)
        self.sampler = sampler
        self._options = options
        self._files = files
        self._publication: Publication | None = None
        self._iterations = 0  # number of the next epoch, where the wrapped sampler has no number

    def __iter__(self) -> Iterator[Any]:
        samples = list(self.sampler)
        if self._publication is None:
            self._publication = publish(self._files, **self._options)
        epoch = self._next_epoch()
        self._iterations = epoch + 1
        self._publication.order(epoch, samples)
        self._publication.progress(epoch, 0)
        return self._iterate_with_progress(self._publication, epoch, samples)

    def _next_epoch(self) -> int:
        """Return the epoch set in the wrapped sampler; where it has none, the number of earlier iterations."""
        with suppress_own(Exception):  # a sampler of the job may raise anything
            return index(self.sampler.epoch)
        return self._iterations

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        """Return `set_epoch`, or another attribute of the wrapped sampler."""
        if name == "sampler":
            raise AttributeError(name)  # during unpickling there are no attributes yet
        return getattr(self.sampler, name)

    def __getstate__(self) -> Mapping[str, Any]:
        """Return the state without the publication, which belongs to one process."""
        return {**self.__dict__, "_publication": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)

    def _iterate_with_progress(self, publication: Publication, epoch: int, samples: list[Any]) -> Iterator[Any]:
        ahead = self._samples_ahead()
        if ahead is None:
            yield from samples
            return
        for drawn, sample in enumerate(samples):
            publication.progress(epoch, max(0, drawn - ahead))
            yield sample

    def _samples_ahead(self) -> int | None:
        """Return the maximum number of samples drawn and not delivered; None where it is unknown."""
        try:
            prefetch, batch_size = self._options.get("prefetch", 2), self._options.get("batch_size", 1)
            return index(self._options["workers"]) * index(prefetch) * index(batch_size)
        except (KeyError, TypeError):
            return None  # workers are missing, or an option is no number, which `publish` has reported


def _sample_paths(files: Any) -> Sequence[str]:
    """Raises TypeError where the paths are unknown."""
    listed = listed_files(files, _count_samples(files))
    if listed is not None:
        return listed
    try:
        return [os.fsdecode(path) for path in files]
    except TypeError:
        raise TypeError(f"{type(files).__name__} does not tell which files its samples are; pass their paths") from None


def _count_samples(files: Any) -> int | None:
    length = length_of(files)
    with suppress_own(Exception):  # the job's own `__len__` may raise anything
        return len(files) if length is None else length
    return None


def _spec_fields(spec: Any) -> Mapping[str, Any]:
    return spec if isinstance(spec, Mapping) else dataclasses.asdict(spec)
