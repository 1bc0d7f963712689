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
from cachefs.publishing.job_exceptions import suppress_own
from cachefs.publishing.job_objects import attributes_of, is_in_memory, length_of, module_of, stored_or_none
from cachefs.publishing.pure import is_pure, is_seedable, is_stateful

SampleOrder = NDArray[numpy.int64]

# Maximum cost of an order, in samples of a permutation: 0.1 s, for which the job waits. A more expensive order is read
# from the sampler's iterator, piece by piece.
MAX_COST: Final = 4 << 20
# Maximum number of permutations. RandomSampler draws whole ones, and even one of few samples takes 10 to 20 us.
MAX_PERMUTATIONS: Final = 4 << 10
# Cost of an item, in samples of a permutation (25 ns): a sample drawn by weight with replacement, a weight for it, a
# weight where samples are drawn without replacement, an item of a list.
COST_DRAWN_BY_WEIGHT: Final = 64
COST_WEIGHT: Final = 4
COST_WEIGHT_WITHOUT_REPLACEMENT: Final = 16
COST_LIST_ITEM: Final = 2
# Number of items of a list that are converted at once.
ITEMS_PER_PIECE: Final = 1 << 14
# Maximum seconds for drawing all foreseen orders; those not drawn by then are left out.
DRAWING_SECONDS: Final = 0.3
# Maximum seconds for iterating a pure sampler, which may be slow, or endless. Later samples are published as drawn.
PURE_SECONDS: Final = 0.3
# Seconds after which a sampler's orders are not foreseen any more.
FORESEE_SECONDS: Final = 1.0


class SamplerOrder:
    """Reads the sampler of one loader. Does not keep the loader, whose workers end with the last reference to it."""

    def __init__(self, loader: Any) -> None:
        torch = sys.modules["torch"]
        data = torch.utils.data
        settings = attributes_of(loader)
        self._torch = torch
        batches = settings.get("batch_sampler")
        self._index_sampler = settings.get("sampler") if batches is None else batches
        self._loader_generator = settings.get("generator")
        # _BaseDataLoaderIter.__init__ draws a seed for workers, but only once where workers are persistent.
        self._draws_worker_seeds = not (settings.get("persistent_workers") and settings.get("num_workers"))
        # torch's BatchSampler only groups the items of its own sampler.
        self._is_grouping = iterates_as(self._index_sampler, data.BatchSampler) or is_stateful(
            self._index_sampler, "BatchSampler"
        )
        self._sampler = stored_or_none(self._index_sampler, "sampler") if self._is_grouping else self._index_sampler
        size = stored_or_none(self._index_sampler, "batch_size")
        self.batch_size = max(1, settings.get("batch_size") or (size if type(size) is int else 1))
        # Samples of a batch, where a smaller last one is dropped, else 1; None where this cannot be read.
        self._batch_multiple: int | None = 1
        if self._is_grouping and (drops_last := stored_or_none(self._index_sampler, "drop_last")) is not False:
            self._batch_multiple = size if drops_last is True and type(size) is int and size > 0 else None
        self._distributed = data.distributed.DistributedSampler
        self._is_distributed = iterates_as(self._sampler, self._distributed) or is_stateful(
            self._sampler, "StatefulDistributedSampler"
        )
        self._kind = None if self._is_distributed else _kind_of(self._sampler, data)
        self._is_too_slow = False  # whether foreseeing has taken longer than the job may wait

    @property
    def samplers(self) -> tuple[Any, ...]:
        """The sampler that the loader draws from, and the one that this draws from."""
        return (self._index_sampler, self._sampler)

    @property
    def has_own_generator(self) -> bool:
        """Whether only the sampler draws from its generator."""
        return self._is_distributed or stored_or_none(self._sampler, "generator") is not None or is_pure(self._sampler)

    @property
    def epoch(self) -> int:
        """The epoch set in a DistributedSampler."""
        return self._integer_attribute("epoch") or 0

    @property
    def length(self) -> int:
        """The number of samples in an epoch of a DistributedSampler; 0 for others."""
        return (self._integer_attribute("num_samples") or 0) if self._is_distributed else 0

    def rank(self) -> tuple[int | None, int]:
        """Return (rank, world size); (None, 1) where only the environment may tell."""
        distributed = getattr(self._torch, "distributed", None)
        if self._is_distributed:
            rank, replicas = self._integer_attribute("rank"), self._integer_attribute("num_replicas")
            if rank is not None and replicas is not None:
                return rank, replicas
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return None, 1

    def sampler_spec(self) -> dict[str, Any] | None:
        """Return the fields, without `epochs`, of the SamplerSpec that gives all epochs; None without one."""
        if not self._is_distributed:
            return None
        found = {
            "size": length_of(stored_or_none(self._sampler, "dataset")),
            "seed": self._integer_attribute("seed"),
            "shuffle": stored_or_none(self._sampler, "shuffle"),
            "drop_last": stored_or_none(self._sampler, "drop_last"),
            "replicas": self._integer_attribute("num_replicas"),
            "rank": self._integer_attribute("rank"),
        }
        if None in found.values() or self._integer_attribute("epoch") is None:
            return None
        # The sampler counts its samples when it is made. A dataset that has grown since fails in torch.
        size, replicas = found["size"], found["replicas"]
        counted = max(0, size - replicas + 1) if found["drop_last"] and size % replicas else size
        return {"kind": "torch-distributed", **found} if -(-counted // replicas) == self.length else None

    def foresee_orders(self) -> list[SampleOrder] | None:
        """Return the orders of the epoch that is about to begin and of those after it, each of shape (n,), int64.

        None for an unknown sampler, where the sampler draws from a generator that cannot be copied, such as one on a
        GPU, and where an attribute cannot be read. The later orders are right if each epoch is read to its end and
        nothing else draws from the generators; there is none where they depend on what the job does to the sampler in
        between. With several ranks there is one more order: nodes that share a cache settle the keeper of each block
        before the epoch begins.
        """
        if self._is_too_slow or self._torch._C._len_torch_dispatch_stack() or self._batch_multiple is None:
            return None  # torch does not compute as usual now
        begun = clock.monotonic()
        with self._torch._C.DisableTorchFunction():
            found = self._compute_orders()
        self._is_too_slow |= clock.monotonic() > begun + FORESEE_SECONDS
        return found

    def _compute_orders(self) -> list[SampleOrder] | None:
        if self._is_distributed:
            distributed = self._order_of_rank()
            return None if distributed is None else [distributed] * (1 + self._count_epochs_ahead())
        if is_pure(self._sampler):
            first = self._iterate_pure()
            return None if first is None else [self._drop_partial_batch(first)]
        drawing = self._drawing_state()
        if drawing is None or self._kind is None:
            return None
        found: list[SampleOrder] = []
        try:
            for ahead in range(1 + self._count_epochs_ahead()):
                if ahead:
                    drawing.check_time(1 / ahead)
                    if self._draws_worker_seeds:
                        drawing.draw_number(self._loader_generator)
                order = self._kind.draw(drawing, ahead)
                if order is None:
                    return None
                found.append(self._drop_partial_batch(order))
        except _DrawingTooSlow:
            self._is_too_slow = not found
        return found or None

    def _count_epochs_ahead(self) -> int:
        """Return how many epochs after the current one are foreseen."""
        return 2 if self.rank()[1] > 1 else 1

    def _drawing_state(self) -> "_DrawingState | None":
        """Return the state needed to draw as the sampler does; None where that is impossible, or takes too long."""
        kind, torch = self._kind, self._torch
        if kind is None:
            return None
        values = {name: stored_or_none(self._sampler, name) for name in kind.attributes}
        generators = (torch.default_generator, self._loader_generator, values.get("generator"))
        if not all(one is None or _is_copyable(torch, one) for one in generators):
            return None
        drawing = _DrawingState(torch, values)
        cost = kind.cost(drawing)
        return drawing if cost is not None and 0 < cost <= MAX_COST else None

    def _order_of_rank(self) -> SampleOrder | None:
        """Return the epoch of a DistributedSampler, by torch's own code on a copy whose dataset is a range."""
        spec = self.sampler_spec()
        if spec is None or spec["size"] > MAX_COST:
            return None
        copy = object.__new__(self._distributed)
        vars(copy).update({**attributes_of(self._sampler), "dataset": range(spec["size"])})
        return self._drop_partial_batch(numpy.fromiter(self._distributed.__iter__(copy), dtype=numpy.int64))

    def _integer_attribute(self, name: str) -> int | None:
        value = stored_or_none(self._sampler, name)
        return value if type(value) is int else None

    def _iterate_pure(self) -> SampleOrder | None:
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
            if now >= deadline or len(taken) >= MAX_COST:
                break
        return numpy.array(taken, dtype=numpy.int64)

    def _drop_partial_batch(self, samples: SampleOrder) -> SampleOrder:
        size = self._batch_multiple or 1
        return samples[: len(samples) // size * size]


# --- how torch's samplers draw ------------------------------------------------------------------------------------


class _DrawingTooSlow(Exception):
    """Raised where drawing an order takes longer than the job may wait."""


class _DrawingState:
    """A sampler's state for drawing: its attributes, and copies of generators.

    Each copy has the state of the job's generator when it was first needed.
    """

    def __init__(self, torch: Any, values: dict[str, Any]) -> None:
        self.torch = torch
        self.values = values
        self._copies: dict[int, Any] = {}
        self._begun = clock.monotonic()

    def check_time(self, more: float = 0.0) -> None:
        """Raises _DrawingTooSlow where the next step would end too late. more: its duration, relative to the time so
        far."""
        if (1 + more) * (clock.monotonic() - self._begun) > DRAWING_SECONDS:
            raise _DrawingTooSlow

    def draw_each(self, draw: Callable[[int], Any], sizes: Iterable[int]) -> list[Any]:
        """Return the results of *draw* for *sizes*. Raises _DrawingTooSlow."""
        found = []
        for size in sizes:
            self.check_time()
            found.append(draw(size))
        return found

    def copy_of(self, generator: Any) -> Any:
        """Return the copy of one of the job's generators; None stands for torch's default one."""
        original = self.torch.default_generator if generator is None else generator
        copy = self._copies.get(id(original))
        if copy is None:
            copy = self._copies[id(original)] = self.torch.Generator()
            copy.set_state(original.get_state())
        return copy

    def draw_permutation(self, size: int, generator: Any) -> SampleOrder:
        order: SampleOrder = self.torch.randperm(size, generator=generator, device="cpu").numpy()
        return order

    def draw_number(self, generator: Any) -> int:
        """Draw a number as samplers and loaders draw a seed."""
        drawn = self.torch.empty((), dtype=self.torch.int64, device="cpu").random_(generator=self.copy_of(generator))
        return int(drawn.item())

    def seeded_generator(self, seed: int) -> Any:
        return self.torch.Generator().manual_seed(seed)


@dataclass(frozen=True, slots=True)
class _SamplerKind:
    """The way in which one of torch's samplers draws."""

    attributes: tuple[str, ...]
    # Size of a permutation that takes as long to draw; None where that cannot be read, or is too much.
    cost: Callable[[_DrawingState], int | None]
    # The samples of the current epoch (0) or of the next one (1); None where they are no numbers.
    draw: Callable[[_DrawingState, int], SampleOrder | None]


def _kind_of(sampler: Any, data: Any) -> _SamplerKind | None:
    if is_seedable(sampler):
        return _SEEDABLE_KIND
    kind = next((kind for kind in _SAMPLER_KINDS if iterates_as(sampler, getattr(data, kind))), None)
    if kind == "RandomSampler" and type(sampler).num_samples is not data.RandomSampler.num_samples:
        return None
    return _SAMPLER_KINDS[kind] if kind is not None else None


def _length_of_data(drawing: _DrawingState) -> int | None:
    return length_of(drawing.values["data_source"])


def _draw_sequential(drawing: _DrawingState, ahead: int) -> SampleOrder:
    return numpy.arange(_length_of_data(drawing) or 0, dtype=numpy.int64)


def _cost_of_random(drawing: _DrawingState) -> int | None:
    size, number = _length_of_data(drawing), drawing.values["_num_samples"]
    found = size if number is None else number
    if not size or type(found) is not int:
        return None
    if drawing.values["replacement"]:
        return found
    # Each permutation that is begun is drawn whole.
    return max(found, size) if found // size < MAX_PERMUTATIONS else None


def _draw_random(drawing: _DrawingState, ahead: int) -> SampleOrder:
    generator = drawing.values["generator"]
    if generator is not None:
        return _draw_random_with(drawing, drawing.copy_of(generator), is_kept=True)
    return _draw_random_with(drawing, drawing.seeded_generator(drawing.draw_number(None)))


def _cost_of_seeded(drawing: _DrawingState) -> int | None:
    seeds = drawing.values["epoch"], drawing.values["initial_seed"]
    return _cost_of_random(drawing) if all(type(one) is int for one in seeds) else None


def _draw_seeded(drawing: _DrawingState, ahead: int) -> SampleOrder:
    seed = drawing.values["epoch"] + ahead + drawing.values["initial_seed"]
    return _draw_random_with(drawing, drawing.seeded_generator(seed))


def _draw_random_with(drawing: _DrawingState, generator: Any, *, is_kept: bool = False) -> SampleOrder:
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
    parts = drawing.draw_each(lambda one: drawing.draw_permutation(one, generator), sizes)
    return numpy.concatenate(parts)[:number]


def _cost_of_subset(drawing: _DrawingState) -> int | None:
    indices = drawing.values["indices"]
    if type(indices) in (list, tuple):
        return COST_LIST_ITEM * len(indices)
    # Any other sequence may compute its items, or read them from a file.
    is_here = type(indices) is range or (type(indices) is numpy.ndarray and is_in_memory(indices))
    return len(indices) if is_here else None


def _draw_subset(drawing: _DrawingState, ahead: int) -> SampleOrder | None:
    indices = drawing.values["indices"]
    if type(indices) in (list, tuple):  # whose items may be anything
        with suppress_own(TypeError, ValueError, OverflowError):
            parts = drawing.draw_each(
                lambda at: numpy.asarray(indices[at : at + ITEMS_PER_PIECE], dtype=numpy.int64),
                range(0, len(indices), ITEMS_PER_PIECE),
            )
            drawing.values["indices"] = numpy.concatenate(parts)
        indices = drawing.values["indices"]
    if type(indices) in (list, tuple) or (type(indices) is numpy.ndarray and indices.ndim != 1):
        return None
    numbers = numpy.asarray(indices, dtype=numpy.int64)
    return numbers[drawing.draw_permutation(len(numbers), drawing.copy_of(drawing.values["generator"]))]


def _cost_of_weighted(drawing: _DrawingState) -> int | None:
    weights, number = drawing.values["weights"], drawing.values["num_samples"]
    if type(weights) is not drawing.torch.Tensor or weights.device.type != "cpu" or type(number) is not int:
        return None
    if not drawing.values["replacement"]:
        return COST_WEIGHT_WITHOUT_REPLACEMENT * len(weights)
    return max(COST_DRAWN_BY_WEIGHT * number, COST_WEIGHT * len(weights))


def _draw_weighted(drawing: _DrawingState, ahead: int) -> SampleOrder:
    values = drawing.values
    drawn = drawing.torch.multinomial(
        values["weights"], values["num_samples"], values["replacement"], generator=drawing.copy_of(values["generator"])
    )
    return numpy.asarray(drawn.numpy(), dtype=numpy.int64)


_RANDOM_ATTRIBUTES: Final = ("data_source", "replacement", "_num_samples", "generator")
_SEEDABLE_KIND: Final = _SamplerKind((*_RANDOM_ATTRIBUTES, "epoch", "initial_seed"), _cost_of_seeded, _draw_seeded)
_SAMPLER_KINDS: Final = {
    "RandomSampler": _SamplerKind(_RANDOM_ATTRIBUTES, _cost_of_random, _draw_random),
    "SubsetRandomSampler": _SamplerKind(("indices", "generator"), _cost_of_subset, _draw_subset),
    "WeightedRandomSampler": _SamplerKind(
        ("weights", "num_samples", "replacement", "generator"), _cost_of_weighted, _draw_weighted
    ),
    "SequentialSampler": _SamplerKind(("data_source",), _length_of_data, _draw_sequential),
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


def _is_copyable(torch: Any, generator: Any) -> bool:
    return type(generator) is torch.Generator and generator.device.type == "cpu"
