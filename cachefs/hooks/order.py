"""Foresees the orders that a loader's sampler will give, where they follow from what can be read without touching it.

torch's own samplers draw from generators, whose states are read, and copied into generators of our own: the job's are
never drawn from and never set. All epochs of a DistributedSampler follow from its seed. Any other sampler is left
alone, unless it is pure (see cachefs.publishing.pure): its order is seen as the loader draws it.

Attributes of samplers are read as stored in the object. The order of a sampler is not foreseen where an attribute is a
property, or only code of the job can tell the length of its data.
"""

import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from cachefs.publishing import clock
from cachefs.publishing.attributes import fields, module_of, own_value
from cachefs.publishing.foreign import suppress_own
from cachefs.publishing.in_memory import is_in_memory
from cachefs.publishing.lengths import length_of
from cachefs.publishing.pure import is_pure, is_seedable, is_stateful

AnyOrder = NDArray[numpy.int64]

# Maximum cost of an order, in samples of a permutation: 0.1 s, for which the job waits. A more expensive order is read
# from the sampler's iterator, piece by piece.
MAX_SAMPLES: Final = 4 << 20
# Maximum number of permutations. RandomSampler draws whole ones, and even one of few samples takes 10 to 20 us.
MAX_PERMUTATIONS: Final = 4 << 10
# Cost of an item, in samples of a permutation (25 ns): a sample drawn by weight with replacement, a weight for it, a
# weight where samples are drawn without replacement, an item of a list.
DRAWN_BY_WEIGHT: Final = 64
WEIGHT: Final = 4
WEIGHT_OF_ALL: Final = 16
LISTED: Final = 2
# Number of items of a list that are converted at once.
PIECE: Final = 1 << 14
# Maximum seconds for drawing all foreseen orders; those not drawn by then are left out.
DRAWING_SECONDS: Final = 0.3
# Maximum seconds for iterating a pure sampler, which may be slow, or endless. Later samples are published as drawn.
PURE_SECONDS: Final = 0.3
# Seconds after which a sampler's orders are not foreseen any more.
MOST_SECONDS: Final = 1.0


class SamplerOrder:
    """Reads the sampler of one loader. Does not keep the loader, whose workers end with the last reference to it."""

    def __init__(self, loader: Any) -> None:
        torch = sys.modules["torch"]
        data = torch.utils.data
        settings = fields(loader)
        self._torch = torch
        batches = settings.get("batch_sampler")
        self._indices = settings.get("sampler") if batches is None else batches
        self._loader_generator = settings.get("generator")
        # _BaseDataLoaderIter.__init__ draws a seed for workers, but only once where workers are persistent.
        self._draws_worker_seeds = not (settings.get("persistent_workers") and settings.get("num_workers"))
        # torch's BatchSampler only groups the items of its own sampler.
        self._groups = iterates_as(self._indices, data.BatchSampler) or is_stateful(self._indices, "BatchSampler")
        self._sampler = own_value(self._indices, "sampler") if self._groups else self._indices
        size = own_value(self._indices, "batch_size")
        self.batch_size = max(1, settings.get("batch_size") or (size if type(size) is int else 1))
        # Samples of a batch, where a smaller last one is dropped, else 1; None where this cannot be read.
        self._whole_batches: int | None = 1
        if self._groups and (drops_last := own_value(self._indices, "drop_last")) is not False:
            self._whole_batches = size if drops_last is True and type(size) is int and size > 0 else None
        self._distributed = data.distributed.DistributedSampler
        self._is_distributed = iterates_as(self._sampler, self._distributed) or is_stateful(
            self._sampler, "StatefulDistributedSampler"
        )
        self._kind = None if self._is_distributed else _kind_of(self._sampler, data)
        self._is_too_slow = False  # whether foreseeing has taken longer than the job may wait

    @property
    def samplers(self) -> tuple[Any, ...]:
        """The sampler that the loader draws from, and the one that this draws from."""
        return (self._indices, self._sampler)

    @property
    def has_own_generator(self) -> bool:
        """Whether only the sampler draws from its generator."""
        return self._is_distributed or own_value(self._sampler, "generator") is not None or is_pure(self._sampler)

    @property
    def epoch(self) -> int:
        """The epoch set in a DistributedSampler."""
        return self._number("epoch") or 0

    @property
    def length(self) -> int:
        """The number of samples in an epoch of a DistributedSampler; 0 for others."""
        return (self._number("num_samples") or 0) if self._is_distributed else 0

    def rank(self) -> tuple[int | None, int]:
        """Return (rank, world size); (None, 1) where only the environment may tell."""
        distributed = getattr(self._torch, "distributed", None)
        if self._is_distributed:
            rank, replicas = self._number("rank"), self._number("num_replicas")
            if rank is not None and replicas is not None:
                return rank, replicas
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return None, 1

    def spec(self) -> dict[str, Any] | None:
        """Return the fields, without `epochs`, of the SamplerSpec that gives all epochs; None without one."""
        if not self._is_distributed:
            return None
        found = {
            "size": length_of(own_value(self._sampler, "dataset")),
            "seed": self._number("seed"),
            "shuffle": own_value(self._sampler, "shuffle"),
            "drop_last": own_value(self._sampler, "drop_last"),
            "replicas": self._number("num_replicas"),
            "rank": self._number("rank"),
        }
        if None in found.values() or self._number("epoch") is None:
            return None
        # The sampler counts its samples when it is made. A dataset that has grown since fails in torch.
        size, replicas = found["size"], found["replicas"]
        counted = max(0, size - replicas + 1) if found["drop_last"] and size % replicas else size
        return {"kind": "torch-distributed", **found} if -(-counted // replicas) == self.length else None

    def foresee(self) -> list[AnyOrder] | None:
        """Return the orders of the epoch that is about to begin and of those after it, each of shape (n,), int64.

        None for an unknown sampler, where the sampler draws from a generator that cannot be copied, such as one on a
        GPU, and where an attribute cannot be read. The later orders are right if each epoch is read to its end and
        nothing else draws from the generators; there is none where they depend on what the job does to the sampler in
        between. With several ranks there is one more order: nodes that share a cache settle the keeper of each block
        before the epoch begins.
        """
        if self._is_too_slow or self._torch._C._len_torch_dispatch_stack() or self._whole_batches is None:
            return None  # torch does not compute as usual now
        begun = clock.monotonic()
        with self._torch._C.DisableTorchFunction():
            found = self._orders()
        self._is_too_slow |= clock.monotonic() > begun + MOST_SECONDS
        return found

    def _orders(self) -> list[AnyOrder] | None:
        if self._is_distributed:
            distributed = self._of_rank()
            return None if distributed is None else [distributed] * (1 + self._ahead())
        if is_pure(self._sampler):
            first = self._first_samples()
            return None if first is None else [self._whole(first)]
        drawing = self._drawing()
        if drawing is None or self._kind is None:
            return None
        found: list[AnyOrder] = []
        try:
            for ahead in range(1 + self._ahead()):
                if ahead:
                    drawing.check_time(1 / ahead)
                    if self._draws_worker_seeds:
                        drawing.number(self._loader_generator)
                order = self._kind.draw(drawing, ahead)
                if order is None:
                    return None
                found.append(self._whole(order))
        except _TooSlow:
            self._is_too_slow = not found
        return found or None

    def _ahead(self) -> int:
        """Return how many epochs after the current one are foreseen."""
        return 2 if self.rank()[1] > 1 else 1

    def _drawing(self) -> "_Drawing | None":
        """Return the state needed to draw as the sampler does; None where that is impossible, or takes too long."""
        kind, torch = self._kind, self._torch
        if kind is None:
            return None
        values = {name: own_value(self._sampler, name) for name in kind.attributes}
        generators = (torch.default_generator, self._loader_generator, values.get("generator"))
        if not all(one is None or _is_plain(torch, one) for one in generators):
            return None
        drawing = _Drawing(torch, values)
        cost = kind.cost(drawing)
        return drawing if cost is not None and 0 < cost <= MAX_SAMPLES else None

    def _of_rank(self) -> AnyOrder | None:
        """Return the epoch of a DistributedSampler, by torch's own code on a copy whose dataset is a range."""
        spec = self.spec()
        if spec is None or spec["size"] > MAX_SAMPLES:
            return None
        copy = object.__new__(self._distributed)
        vars(copy).update({**fields(self._sampler), "dataset": range(spec["size"])})
        return self._whole(numpy.fromiter(self._distributed.__iter__(copy), dtype=numpy.int64))

    def _number(self, name: str) -> int | None:
        value = own_value(self._sampler, name)
        return value if type(value) is int else None

    def _first_samples(self) -> AnyOrder | None:
        """Return the samples of a pure sampler within PURE_SECONDS after its first sample, for which it may compute all
        others. None where they are no sample numbers."""
        taken = array("q")
        deadline: float | None = None
        sampler: Any = self._sampler
        for index in sampler:
            numbers = [index] if type(index) is int else numbers_in(index)
            if numbers is None:
                return None
            taken.extend(numbers)
            now = clock.monotonic()
            deadline = now + PURE_SECONDS if deadline is None else deadline
            if now >= deadline or len(taken) >= MAX_SAMPLES:
                break
        return numpy.array(taken, dtype=numpy.int64)

    def _whole(self, samples: AnyOrder) -> AnyOrder:
        size = self._whole_batches or 1
        return samples[: len(samples) // size * size]


# --- how torch's samplers draw ------------------------------------------------------------------------------------


class _TooSlow(Exception):
    """Raised where drawing an order takes longer than the job may wait."""


class _Drawing:
    """A sampler's state for drawing: its attributes, and copies of generators.

    Each copy has the state of the job's generator when it was first needed.
    """

    def __init__(self, torch: Any, values: dict[str, Any]) -> None:
        self.torch = torch
        self.values = values
        self._copies: dict[int, Any] = {}
        self._begun = clock.monotonic()

    def check_time(self, more: float = 0.0) -> None:
        """Raises _TooSlow where the next step would end too late. more: its duration, relative to the time so far."""
        if (1 + more) * (clock.monotonic() - self._begun) > DRAWING_SECONDS:
            raise _TooSlow

    def many(self, draw: Callable[[int], Any], sizes: Iterable[int]) -> list[Any]:
        """Return the results of *draw* for *sizes*. Raises _TooSlow."""
        found = []
        for size in sizes:
            self.check_time()
            found.append(draw(size))
        return found

    def of(self, generator: Any) -> Any:
        """Return the copy of one of the job's generators; None stands for torch's default one."""
        given = self.torch.default_generator if generator is None else generator
        copy = self._copies.get(id(given))
        if copy is None:
            copy = self._copies[id(given)] = self.torch.Generator()
            copy.set_state(given.get_state())
        return copy

    def permutation(self, size: int, generator: Any) -> AnyOrder:
        order: AnyOrder = self.torch.randperm(size, generator=generator, device="cpu").numpy()
        return order

    def number(self, generator: Any) -> int:
        """Draw a number as samplers and loaders draw a seed."""
        drawn = self.torch.empty((), dtype=self.torch.int64, device="cpu").random_(generator=self.of(generator))
        return int(drawn.item())

    def seeded(self, seed: int) -> Any:
        return self.torch.Generator().manual_seed(seed)


@dataclass(frozen=True, slots=True)
class _Kind:
    """The way in which one of torch's samplers draws."""

    attributes: tuple[str, ...]
    # Size of a permutation that takes as long to draw; None where that cannot be read, or is too much.
    cost: Callable[[_Drawing], int | None]
    # The samples of the current epoch (0) or of the next one (1); None where they are no numbers.
    draw: Callable[[_Drawing, int], AnyOrder | None]


def _kind_of(sampler: Any, data: Any) -> _Kind | None:
    if is_seedable(sampler):
        return _SEEDABLE
    kind = next((kind for kind in _KINDS if iterates_as(sampler, getattr(data, kind))), None)
    if kind == "RandomSampler" and type(sampler).num_samples is not data.RandomSampler.num_samples:
        return None
    return _KINDS[kind] if kind is not None else None


def _length_of_data(drawing: _Drawing) -> int | None:
    return length_of(drawing.values["data_source"])


def _in_sequence(drawing: _Drawing, ahead: int) -> AnyOrder:
    return numpy.arange(_length_of_data(drawing) or 0, dtype=numpy.int64)


def _cost_at_random(drawing: _Drawing) -> int | None:
    size, number = _length_of_data(drawing), drawing.values["_num_samples"]
    found = size if number is None else number
    if not size or type(found) is not int:
        return None
    if drawing.values["replacement"]:
        return found
    # Each permutation that is begun is drawn whole.
    return max(found, size) if found // size < MAX_PERMUTATIONS else None


def _at_random(drawing: _Drawing, ahead: int) -> AnyOrder:
    generator = drawing.values["generator"]
    if generator is not None:
        return _at_random_with(drawing, drawing.of(generator), is_kept=True)
    return _at_random_with(drawing, drawing.seeded(drawing.number(None)))


def _cost_seeded(drawing: _Drawing) -> int | None:
    seeds = drawing.values["epoch"], drawing.values["initial_seed"]
    return _cost_at_random(drawing) if all(type(one) is int for one in seeds) else None


def _at_random_seeded(drawing: _Drawing, ahead: int) -> AnyOrder:
    seed = drawing.values["epoch"] + ahead + drawing.values["initial_seed"]
    return _at_random_with(drawing, drawing.seeded(seed))


def _at_random_with(drawing: _Drawing, generator: Any, *, is_kept: bool = False) -> AnyOrder:
    """Draw as RandomSampler does from *generator*. is_kept: the next epoch is drawn from it too."""
    torch, size = drawing.torch, _length_of_data(drawing) or 0
    number = drawing.values["_num_samples"]
    number = size if number is None else number
    if drawing.values["replacement"]:
        # RandomSampler draws 32 at a time, and a generator gives the same numbers however many are drawn at once.
        drawn = torch.randint(size, (number,), dtype=torch.int64, generator=generator, device="cpu")
        return numpy.asarray(drawn.numpy(), dtype=numpy.int64)
    # RandomSampler draws the last permutation even if nothing of it is used.
    sizes = [size] * (number // size + 1 if is_kept else -(-number // size))
    parts = drawing.many(lambda one: drawing.permutation(one, generator), sizes)
    return numpy.concatenate(parts)[:number]


def _cost_of_subset(drawing: _Drawing) -> int | None:
    indices = drawing.values["indices"]
    if type(indices) in (list, tuple):
        return LISTED * len(indices)
    # Any other sequence may compute its items, or read them from a file.
    is_here = type(indices) is range or (type(indices) is numpy.ndarray and is_in_memory(indices))
    return len(indices) if is_here else None


def _of_subset(drawing: _Drawing, ahead: int) -> AnyOrder | None:
    indices = drawing.values["indices"]
    if type(indices) in (list, tuple):  # whose items may be anything
        with suppress_own(TypeError, ValueError, OverflowError):
            parts = drawing.many(
                lambda at: numpy.asarray(indices[at : at + PIECE], dtype=numpy.int64), range(0, len(indices), PIECE)
            )
            drawing.values["indices"] = numpy.concatenate(parts)
        indices = drawing.values["indices"]
    if type(indices) in (list, tuple) or (type(indices) is numpy.ndarray and indices.ndim != 1):
        return None
    numbers = numpy.asarray(indices, dtype=numpy.int64)
    return numbers[drawing.permutation(len(numbers), drawing.of(drawing.values["generator"]))]


def _cost_by_weight(drawing: _Drawing) -> int | None:
    weights, number = drawing.values["weights"], drawing.values["num_samples"]
    if type(weights) is not drawing.torch.Tensor or weights.device.type != "cpu" or type(number) is not int:
        return None
    if not drawing.values["replacement"]:
        return WEIGHT_OF_ALL * len(weights)
    return max(DRAWN_BY_WEIGHT * number, WEIGHT * len(weights))


def _by_weight(drawing: _Drawing, ahead: int) -> AnyOrder:
    values = drawing.values
    drawn = drawing.torch.multinomial(
        values["weights"], values["num_samples"], values["replacement"], generator=drawing.of(values["generator"])
    )
    return numpy.asarray(drawn.numpy(), dtype=numpy.int64)


_OF_RANDOM: Final = ("data_source", "replacement", "_num_samples", "generator")
_SEEDABLE: Final = _Kind((*_OF_RANDOM, "epoch", "initial_seed"), _cost_seeded, _at_random_seeded)
_KINDS: Final = {
    "RandomSampler": _Kind(_OF_RANDOM, _cost_at_random, _at_random),
    "SubsetRandomSampler": _Kind(("indices", "generator"), _cost_of_subset, _of_subset),
    "WeightedRandomSampler": _Kind(("weights", "num_samples", "replacement", "generator"), _cost_by_weight, _by_weight),
    "SequentialSampler": _Kind(("data_source",), _length_of_data, _in_sequence),
}


# --- numbers --------------------------------------------------------------------------------------------------------


def numbers_in(index: Any) -> list[int] | None:
    """Return the sample numbers in a sampler's item: a number, or a batch of numbers. None for anything else.

    torch asks the dataset once for each item of a batch. An item that is no number, such as (sample, size), may mean
    anything to the dataset.
    """
    number = number_in(index)
    if number is not None:
        return [number]
    if type(index) in (list, tuple, range):
        if all(map(_is_number, set(map(type, index)))):
            return [int(one) for one in index]
        found = [number_in(one) for one in index]
        return None if None in found else [one for one in found if one is not None]
    array = array_in(index)
    return None if array is None or array.ndim != 1 else [int(one) for one in array.tolist()]


def number_in(item: Any) -> int | None:
    """Return the sample number in one item of a batch; None for anything else."""
    if _is_number(type(item)):
        return int(item)
    array = array_in(item)
    return None if array is None or array.ndim else int(array)


def array_in(value: Any) -> NDArray[Any] | None:
    """Return the integers of a numpy array, or of a CPU tensor; None for the job's own classes and other values."""
    torch = sys.modules.get("torch")
    if torch is not None and type(value) is torch.Tensor and not torch._C._len_torch_dispatch_stack():
        with torch._C.DisableTorchFunction():
            # A tensor on a GPU would have to be waited for.
            is_here = value.device.type == "cpu" and value.layout == torch.strided and not value.is_floating_point()
            value = value.numpy() if is_here and not value.is_complex() else None
    return value if type(value) is numpy.ndarray and value.dtype.kind in "iu" else None


def iterates_as(sampler: Any, kind: Any) -> bool:
    """Return whether the sampler is of this kind, or of a derived class that does not change its iteration."""
    # isinstance would ask the sampler for its __class__.
    return issubclass(type(sampler), kind) and type(sampler).__iter__ is kind.__iter__


def _is_number(kind: type) -> bool:
    return kind is int or (issubclass(kind, numpy.integer) and module_of(kind) == "numpy")


def _is_plain(torch: Any, generator: Any) -> bool:
    return type(generator) is torch.Generator and generator.device.type == "cpu"
