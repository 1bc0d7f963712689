"""Which order a loader's sampler is going to give, found without advancing the sampler.

torch's own samplers are run ahead of time, and the random generators that they draw from are restored afterwards. Any
other sampler may do anything while it is iterated, so it is run in a forked child, where that does not matter. All
epochs of a DistributedSampler follow from its seed.
"""

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy
from numpy.typing import NDArray

AnyOrder = NDArray[numpy.int64]

# Samples that are taken, at most, of a sampler that neither says its length nor ends.
MAX_SAMPLES: Final = 1 << 27
CHILD_SECONDS: Final = 120


class SamplerOrder:
    """The sampler of one loader. The loader itself is not kept, since its workers end with the last reference to it."""

    def __init__(self, loader: Any) -> None:
        torch = sys.modules["torch"]
        data = torch.utils.data
        self._torch = torch
        self._indices = loader._index_sampler
        self._loader_generator = loader.generator
        # _BaseDataLoaderIter.__init__ draws a seed for workers, but only once where workers are persistent.
        self._draws_worker_seeds = not (loader.persistent_workers and loader.num_workers)
        self._may_fork = loader.num_workers > 0 and _start_method(loader.multiprocessing_context) == "fork"
        self._children: list[int] = []
        batches = _iterates_as(self._indices, data.BatchSampler)
        self._sampler = self._indices.sampler if batches else self._indices
        self._whole_batches = self._indices.batch_size if batches and self._indices.drop_last else 1
        self._is_distributed = _iterates_as(self._sampler, data.distributed.DistributedSampler)
        kinds = (data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)
        # Is it made of torch's own samplers, which draw from a generator and do nothing else?
        self.is_known = self._is_distributed or any(_iterates_as(self._sampler, kind) for kind in kinds)
        self.name = type(self._sampler).__name__
        self.batch_size = max(1, loader.batch_size or getattr(self._indices, "batch_size", None) or 1)

    @property
    def has_own_generator(self) -> bool:
        return getattr(self._sampler, "generator", None) is not None

    @property
    def epoch(self) -> int:
        """The epoch that a DistributedSampler is set to."""
        return int(self._sampler.epoch)

    def rank(self) -> tuple[int | None, int]:
        """(rank, world size); (None, 1) where only the environment may know."""
        distributed = getattr(self._torch, "distributed", None)
        if self._is_distributed:
            return self._sampler.rank, self._sampler.num_replicas
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return None, 1

    def spec(self) -> dict[str, Any] | None:
        """The fields, except the number of epochs, of the SamplerSpec that gives all epochs, where there is one."""
        if not self._is_distributed:
            return None
        return {
            "kind": "torch-distributed",
            "size": len(self._sampler.dataset),
            "seed": self._sampler.seed,
            "shuffle": self._sampler.shuffle,
            "drop_last": self._sampler.drop_last,
            "replicas": self._sampler.num_replicas,
            "rank": self._sampler.rank,
        }

    def run_ahead(self) -> tuple[AnyOrder, AnyOrder]:
        """The orders of the epoch that is about to begin and of the one after it, as shape (n,), int64. For a known
        sampler. The second one is right if this epoch is read to its end and nothing else draws from the generators.
        """
        given = (self._loader_generator, getattr(self._sampler, "generator", None))
        generators = [self._torch.default_generator, *(one for one in given if one is not None)]
        states = [generator.get_state() for generator in generators]
        try:
            current = self._whole(self._samples())
            if self._draws_worker_seeds:
                self._torch.empty((), dtype=self._torch.int64).random_(generator=self._loader_generator)
            return current, self._whole(self._samples())
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def run_in_child(self, indices: Iterator[Any], send: Callable[[AnyOrder], None]) -> bool:
        """Exhaust *indices*, the iterator that the loader is about to use, in a forked child, which then calls *send*.

        What the child does to the iterator, to generators and to anything else is done to copies. False where the
        loader does not fork either.
        """
        self._children = [child for child in self._children if not _has_ended(child)]
        if not self._may_fork:
            return False
        limit = None
        with contextlib.suppress(TypeError, NotImplementedError):
            limit = len(self._indices)
        # Python's own generator, unlike those of torch and numpy, is seeded anew in a forked child.
        state = random.getstate()
        child = os.fork()
        if child:
            self._children.append(child)
            return True
        try:
            for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.alarm(CHILD_SECONDS)
            random.setstate(state)
            # OpenMP's other threads do not exist in the child, which would wait for them.
            self._torch.set_num_threads(1)
            found = flattened(itertools.islice(indices, limit))
            if found is not None:
                send(found)
        finally:
            os._exit(0)

    def _samples(self) -> AnyOrder:
        """What the sampler gives now. The generators are advanced as the sampler does it."""
        sampler, torch = self._sampler, self._torch
        is_permutation = _iterates_as(sampler, torch.utils.data.RandomSampler) and not sampler.replacement
        if not is_permutation or sampler.num_samples != len(sampler.data_source):
            return numpy.fromiter(sampler, dtype=numpy.int64)
        # RandomSampler.__iter__ in the usual case, written out: for 1.28 M samples it takes 20 ms instead of 200.
        generator = sampler.generator
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order: AnyOrder = torch.randperm(sampler.num_samples, generator=generator).numpy()
        if sampler.generator is not None:
            # At its end it computes another permutation, of which it uses nothing.
            torch.randperm(sampler.num_samples, generator=generator)
        return order

    def _whole(self, samples: AnyOrder) -> AnyOrder:
        return samples[: len(samples) // self._whole_batches * self._whole_batches]


def flattened(indices: Iterable[Any]) -> AnyOrder | None:
    """The sample numbers in single numbers or batches of them, shape (n,), int64; None where they are no numbers, or
    do not end."""
    samples = (sample for index in indices for sample in (index if isinstance(index, (list, tuple)) else (index,)))
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        found = numpy.fromiter(itertools.islice(samples, MAX_SAMPLES + 1), dtype=numpy.int64)
        if len(found) <= MAX_SAMPLES:
            return found
    return None


def _iterates_as(sampler: Any, kind: Any) -> bool:
    """Is it of this kind, or of a derived class that does not change how it is iterated?"""
    return isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__


def _start_method(context: Any) -> str | None:
    return context.get_start_method() if context is not None else multiprocessing.get_start_method(allow_none=True)


def _has_ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
