"""Which orders a loader's sampler is going to give, where that follows from what can be read without touching it.

torch's own samplers draw from generators, whose states are read, and copied into generators of our own: the job's are
never drawn from and never set. All epochs of a DistributedSampler follow from its seed. Any other sampler is left
alone, unless it is pure (see cachefs.publishing.pure): what it gives is seen as the loader draws it.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Iterable
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from cachefs.publishing.attributes import fields
from cachefs.publishing.pure import is_pure, is_seedable, is_stateful

AnyOrder = NDArray[numpy.int64]

# An order of more samples is not foreseen: the job would wait for it, and no message to the daemon holds it.
MAX_SAMPLES: Final = 1 << 26
# The epoch after the next one is foreseen where it has no more samples: the daemon keeps 64 MiB of a consumer's orders.
MAX_FURTHER: Final = 4 << 20
# RandomSampler draws so many numbers at once where it draws with replacement, which takes 3 to 6 us each: of an epoch
# with more samples than this it would take more than a second.
REPLACEMENTS: Final = 32
MAX_REPLACEMENTS: Final = 1 << 22
# A pure sampler is iterated for so many seconds, about: it may be slow, or have no end. What it gives after that is
# published as it is drawn.
PURE_SECONDS: Final = 1.0


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
        batches = iterates_as(self._indices, data.BatchSampler) or is_stateful(self._indices, "BatchSampler")
        self._sampler = self._indices.sampler if batches else self._indices
        # Samples of a batch, where a last one that is smaller is dropped, else 1.
        self.whole_batches = self._indices.batch_size if batches and self._indices.drop_last else 1
        self._distributed = data.distributed.DistributedSampler
        self._is_distributed = iterates_as(self._sampler, self._distributed) or is_stateful(
            self._sampler, "StatefulDistributedSampler"
        )
        self.batch_size = max(1, loader.batch_size or _size(fields(self._indices).get("batch_size")))
        # Does its next order follow from what can be read?
        self.is_known = self._is_distributed or self._can_be_foreseen()

    @property
    def samplers(self) -> tuple[Any, ...]:
        """What the loader draws from, and that from which this draws."""
        return (self._indices, self._sampler)

    @property
    def has_own_generator(self) -> bool:
        """Does nobody but the sampler draw from what it draws from?"""
        return self._is_distributed or fields(self._sampler).get("generator") is not None or is_pure(self._sampler)

    @property
    def epoch(self) -> int:
        """The epoch that a DistributedSampler is set to."""
        return int(self._sampler.epoch)

    @property
    def length(self) -> int:
        """Samples of an epoch of a DistributedSampler; 0 for others."""
        return int(self._sampler.num_samples) if self._is_distributed else 0

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

    def foresee(self) -> list[AnyOrder] | None:
        """The orders of the epoch that is about to begin and of those after it, each of shape (n,), int64.

        For a known sampler; None where it draws from a generator that cannot be copied, as one on a GPU. The orders
        after the first are right if each epoch is read to its end and nobody else draws from the generators; there is
        none where they depend on what the job does to the sampler in between. A rank of many says one more, if it is
        not large: nodes that share a cache say of each block who keeps it, before the epoch begins that settles it.
        """
        if self._torch._C._len_torch_dispatch_stack():
            return None  # what torch computes now is not computed as usual
        with self._torch._C.DisableTorchFunction():
            if self._is_distributed:
                order = self._whole(numpy.fromiter(self._distributed.__iter__(self._sampler), dtype=numpy.int64))
                return [order] * (1 + self._ahead(len(order)))
            if is_pure(self._sampler):
                return [self._whole(self._first_samples())]
            if self._is_too_long():
                return None
            copies = _Copies(self._torch)
            found = [self._whole(self._samples(copies, 0))]
            for ahead in range(1, 1 + self._ahead(len(found[0]))):
                if self._draws_worker_seeds:
                    self._number(copies.of(self._loader_generator))
                found.append(self._whole(self._samples(copies, ahead)))
            return found

    def _ahead(self, samples: int) -> int:
        """How many epochs after the current one are foreseen."""
        return 2 if self.rank()[1] > 1 and samples <= MAX_FURTHER else 1

    def _can_be_foreseen(self) -> bool:
        torch, sampler = self._torch, self._sampler
        data = torch.utils.data
        if is_pure(sampler):
            return True
        generators = (torch.default_generator, self._loader_generator, fields(sampler).get("generator"))
        if not all(one is None or _is_plain(torch, one) for one in generators):
            return False
        if is_seedable(sampler) or iterates_as(sampler, data.RandomSampler):
            return type(sampler).num_samples is data.RandomSampler.num_samples
        if iterates_as(sampler, data.SubsetRandomSampler):
            # Any other sequence may compute its items, or read them.
            return type(sampler.indices) in (list, tuple, range, numpy.ndarray)
        if iterates_as(sampler, data.WeightedRandomSampler):
            return bool(sampler.weights.device.type == "cpu")
        return iterates_as(sampler, data.SequentialSampler)

    def _is_too_long(self) -> bool:
        """Would it take too long, or too much memory, to say what one of torch's samplers gives?"""
        sampler, data = self._sampler, self._torch.utils.data
        if isinstance(sampler, data.SequentialSampler):
            return len(sampler.data_source) > MAX_SAMPLES
        if isinstance(sampler, data.SubsetRandomSampler):
            return len(sampler.indices) > MAX_SAMPLES
        if isinstance(sampler, data.RandomSampler) and sampler.replacement:
            return bool(sampler.num_samples > MAX_REPLACEMENTS)
        return bool(sampler.num_samples > MAX_SAMPLES)

    def _samples(self, copies: "_Copies", ahead: int) -> AnyOrder:
        """What the sampler gives, now (ahead = 0) or the next time (1), as it draws from copies of the generators."""
        sampler, torch = self._sampler, self._torch
        data = torch.utils.data
        if isinstance(sampler, data.SequentialSampler):
            return numpy.arange(len(sampler.data_source), dtype=numpy.int64)
        if is_seedable(sampler):
            generator = torch.Generator().manual_seed(sampler.epoch + ahead + sampler.initial_seed)
            return self._random(generator)
        if isinstance(sampler, data.RandomSampler):
            if sampler.generator is not None:
                return self._random(copies.of(sampler.generator))
            return self._random(torch.Generator().manual_seed(self._number(copies.of(None))))
        generator = copies.of(sampler.generator)
        if isinstance(sampler, data.SubsetRandomSampler):
            return numpy.asarray(sampler.indices, dtype=numpy.int64)[self._permutation(len(sampler.indices), generator)]
        drawn = torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=generator)
        return numpy.asarray(drawn.numpy(), dtype=numpy.int64)

    def _random(self, generator: Any) -> AnyOrder:
        """What RandomSampler draws from *generator*."""
        sampler, torch = self._sampler, self._torch
        size, number = len(sampler.data_source), sampler.num_samples
        if sampler.replacement:
            sizes = [REPLACEMENTS] * (number // REPLACEMENTS) + [number % REPLACEMENTS]
            drawn = [torch.randint(size, (one,), generator=generator, device="cpu") for one in sizes]
            return numpy.asarray(torch.cat(drawn).numpy(), dtype=numpy.int64)
        # The last permutation is drawn even if nothing of it is used.
        parts = [self._permutation(size, generator) for _ in range(number // size + 1)]
        return numpy.concatenate(parts)[:number]

    def _permutation(self, size: int, generator: Any) -> AnyOrder:
        order: AnyOrder = self._torch.randperm(size, generator=generator, device="cpu").numpy()
        return order

    def _number(self, generator: Any) -> int:
        """A number as samplers and loaders draw it for a seed."""
        drawn = self._torch.empty((), dtype=self._torch.int64, device="cpu").random_(generator=generator)
        return int(drawn.item())

    def _first_samples(self) -> AnyOrder:
        """What a pure sampler gives within PURE_SECONDS after its first sample, which it may compute all others for."""
        samples = iter(self._flat())
        parts = [numpy.fromiter(itertools.islice(samples, 1), dtype=numpy.int64)]
        begun, size = time.monotonic(), 16
        # Each part takes about as long as all before it.
        while 2 * size <= MAX_SAMPLES and time.monotonic() < begun + PURE_SECONDS / 2:
            part = numpy.fromiter(itertools.islice(samples, size), dtype=numpy.int64)
            parts.append(part)
            if len(part) < size:
                break
            size *= 2
        return numpy.concatenate(parts)

    def _flat(self) -> Iterable[int]:
        """The samples that a pure sampler gives, also where it gives batches of them."""
        return (one for index in self._sampler for one in (index if isinstance(index, (list, tuple)) else (index,)))

    def _whole(self, samples: AnyOrder) -> AnyOrder:
        return samples[: len(samples) // self.whole_batches * self.whole_batches]


class _Copies:
    """Generators of our own, each with the state that one of the job's had when it was first asked for."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._copies: dict[int, Any] = {}

    def of(self, generator: Any) -> Any:
        """generator: one of the job's; None for torch's default one."""
        given = self._torch.default_generator if generator is None else generator
        copy = self._copies.get(id(given))
        if copy is None:
            copy = self._copies[id(given)] = self._torch.Generator()
            copy.set_state(given.get_state())
        return copy


def numbers_in(index: Any) -> list[int] | None:
    """The sample numbers in what a sampler gives: a number, or a batch of them. None where it is anything else."""
    if type(index) is int:
        return [index]
    if isinstance(index, numpy.integer):
        return [int(index)]
    if type(index) not in (list, tuple):
        array = array_in(index)
        return None if array is None else [int(one) for one in array.reshape(-1).tolist()]
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if all(kind is int or issubclass(kind, numpy.integer) for kind in set(map(type, index))):
            return [int(one) for one in index]
        found = [numbers_in(one) for one in index]
        if None not in found:
            return [one for part in found if part is not None for one in part]
    return None


def array_in(value: Any) -> NDArray[Any] | None:
    """The integers of an array of numpy, or of a tensor on the CPU, that is of no class of the job's own."""
    torch = sys.modules.get("torch")
    if torch is not None and type(value) is torch.Tensor and not torch._C._len_torch_dispatch_stack():
        with torch._C.DisableTorchFunction():
            # A tensor on a GPU would be waited for.
            is_here = value.device.type == "cpu" and value.layout == torch.strided and not value.is_floating_point()
            value = value.numpy() if is_here and not value.is_complex() else None
    return value if type(value) is numpy.ndarray and value.dtype.kind in "iu" else None


def iterates_as(sampler: Any, kind: Any) -> bool:
    """Is it of this kind, or of a derived class that does not change how it is iterated?"""
    return isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__


def _size(given: Any) -> int:
    return given if type(given) is int else 1


def _is_plain(torch: Any, generator: Any) -> bool:
    """Is it one of torch's generators, on the CPU?"""
    return type(generator) is torch.Generator and generator.device.type == "cpu"
