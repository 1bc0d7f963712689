"""Computes the orders that a sampler spec determines, without torch.

`torch.randperm` on a CPU is a Fisher-Yates shuffle over the 32-bit outputs of a Mersenne Twister. numpy's `RandomState`
gives the same outputs for the same seed. The swaps are done by `_shuffle.c`, or in Python where that was not built:
1.28 M samples take 8 ms, or 0.7 s. Equal to torch 2.13 (tests/unit/planning/sequences/test_sampler.py compares).

An order of any epoch takes as long as its permutation, and 60 to 80 ms more where the generator is far ahead. Other
threads can run meanwhile.

The outputs of the generator (of torch and of numpy's RandomState, the Mersenne Twister MT19937) are linear in its
state: each output is the sum (XOR) of some of the 19,937 before it, always the same ones, which `_SUM` lists. Any later
output is therefore a sum of the next 19,937 as well. Which ones is the remainder of a power of x by the polynomial
whose terms are those of `_SUM`. `skip_draws` computes it in 60 to 80 ms whatever the distance, as long as 20 million
outputs take one by one.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from cachefs.errors import ConfigError
from cachefs.planning.sequences.sampler_spec import KINDS as KINDS
from cachefs.planning.sequences.sampler_spec import TORCH_LIMIT as TORCH_LIMIT
from cachefs.planning.sequences.sampler_spec import SamplerSpec as SamplerSpec

# Outputs from which on the remainder is quicker.
JUMP_DRAWS: Final = 20_000_000

_WORDS: Final = 624  # of the state
_DEGREE: Final = 19_937
# Output n + 19,937 is the sum of the outputs n + e, for these e. (Derived from outputs, as the shortest linear
# recurrence of any bit of them. The tests compare with outputs that are drawn one by one.)
_SUM: Final = (
    0, 1189, 1416, 1585, 1643, 1870, 2493, 2773, 3000, 3227, 3454, 3681, 3908, 4135, 4362, 4753, 5661, 6337,
    6569, 7129, 7477, 7525, 7583, 7752, 7979, 8206, 9505, 9901, 9969, 10128, 10693, 10761, 10920, 11089, 11147,
    11157, 11215, 11321, 11374, 11384, 11485, 11611, 11712, 11717, 11838, 11881, 11944, 11997, 12277, 12335,
    12393, 12504, 12509, 12620, 12673, 12731, 12736, 12789, 12905, 12958, 12963, 13137, 13185, 13190, 13243,
    13301, 13412, 13528, 13533, 13639, 13697, 13760, 13813, 13866, 14093, 14151, 14209, 14320, 14325, 14436,
    14547, 14552, 14605, 14721, 14774, 14779, 14953, 15001, 15006, 15059, 15117, 15228, 15344, 15349, 15455,
    15513, 15576, 15629, 15682, 15909, 15967, 16025, 16136, 16141, 16252, 16363, 16368, 16421, 16537, 16590,
    16595, 16817, 16822, 16875, 16933, 17044, 17160, 17271, 17329, 17445, 17498, 17725, 17783, 17841, 17952,
    18068, 18179, 18237, 18406, 18633, 18691, 18860, 19087, 19314,
)  # fmt: skip
_BELOW: Final = (1 << _DEGREE) - 1
EpochOrder = NDArray[numpy.uint32]

# Outputs that a DataLoader takes from its generator (its workers' base seed) before epoch 0 and before each later one.
LOADER_DRAWS: Final = {"torch-random": (0, 0), "torch-loader": (2, 2), "torch-loader-persistent": (2, 0)}

# An epoch of 1.28 M samples costs 8 ms to skip, so the generators' states (2.5 KB each) are kept: of this many
# samplers, and for each of the last used epochs.
_SAMPLERS_KEPT: Final = 16
_STATES_KEPT: Final = 64

# Outputs of the generator drawn at once for a numpy shuffle: 4 MB.
_DRAWS_AT_ONCE: Final = 1 << 20


def skip_draws(generator: numpy.random.RandomState, draws: int) -> None:
    """Advance the generator by *draws* outputs of 32 bits."""
    if draws < JUMP_DRAWS:
        generator._bit_generator.random_raw(draws, output=False)
        return
    outputs = generator.randint(0, 2**32, size=_DEGREE + _WORDS, dtype=numpy.uint32)
    windows = numpy.lib.stride_tricks.sliding_window_view(outputs, _WORDS)[_terms(_power(draws))]
    later = numpy.bitwise_xor.reduce(windows, axis=0)
    generator.set_state(("MT19937", _untempered(later), 0, 0, 0.0))


@functools.lru_cache(maxsize=4)
def _power(exponent: int) -> int:
    """Return x to the power of *exponent*, modulo the generator's polynomial: a polynomial over GF(2), bit e for
    x^e."""
    steps = max(0, exponent.bit_length() - 14)
    power = 1 << (exponent >> steps)  # below x^16384
    for step in reversed(range(steps)):
        power = _remainder(_squared(power) << (exponent >> step & 1))
    return power


def _squared(polynomial: int) -> int:
    """Return the square: over GF(2) it has the same terms, at twice their exponents."""
    raw = polynomial.to_bytes(-(-_DEGREE // 8), "little")
    return int.from_bytes(_spread()[numpy.frombuffer(raw, numpy.uint8)].tobytes(), "little")


@functools.cache
def _spread() -> NDArray[numpy.uint16]:
    """Return for each byte its bits with a zero behind each: shape (256,), uint16 little-endian."""
    bits = numpy.unpackbits(numpy.arange(256, dtype=numpy.uint8)[:, None], axis=1, bitorder="little")
    spread: NDArray[numpy.uint16] = (bits.astype("<u2") << numpy.arange(0, 16, 2, dtype="<u2")).sum(1, dtype="<u2")
    return spread


def _remainder(polynomial: int) -> int:
    while high := polynomial >> _DEGREE:
        polynomial &= _BELOW
        for exponent in _SUM:
            polynomial ^= high << exponent
    return polynomial


def _terms(polynomial: int) -> NDArray[numpy.int64]:
    """Return the exponents of its terms: one dimension, int64."""
    raw = numpy.frombuffer(polynomial.to_bytes(-(-_DEGREE // 8), "little"), numpy.uint8)
    return numpy.flatnonzero(numpy.unpackbits(raw, bitorder="little"))


def _untempered(outputs: NDArray[numpy.uint32]) -> NDArray[numpy.uint32]:
    """Return the words of the state that have these outputs: shape (n,), uint32."""
    words = outputs ^ (outputs >> numpy.uint32(18))
    words ^= (words << numpy.uint32(15)) & numpy.uint32(0xEFC60000)
    found = words
    for _ in range(4):  # each round makes 7 more bits right
        found = words ^ ((found << numpy.uint32(7)) & numpy.uint32(0x9D2C5680))
    words = found
    for _ in range(2):  # 11 more bits
        found = words ^ (found >> numpy.uint32(11))
    return found


def epoch_order(spec: SamplerSpec, epoch: int) -> EpochOrder:
    """Return the samples that one consumer reads in *epoch* (counted from 0), in order: numbers, shape (reads,),
    uint32.

    Kinds, with n = spec.size; where spec.shuffle is false each is in order of sample numbers:

    - `sequential`: 0 to n - 1.
    - `torch-random`: `RandomSampler(dataset, generator=g)`, where g was seeded with spec.seed once, before epoch 0, and
      is used by nothing else. One generator continues from epoch to epoch, and each epoch takes two permutations from
      it: torch computes a second, unused one when the sampler is exhausted. Every epoch before must therefore have been
      read to its end. (`RandomSampler` without a generator seeds itself from torch's global one as each epoch starts,
      which cannot be known before.)
    - `torch-loader`: `DataLoader(dataset, shuffle=True, generator=g)`. As torch-random, but before each epoch the
      loader takes a base seed for its workers from the same g.
    - `torch-loader-persistent`: the same with persistent_workers=True, where the loader does so before epoch 0 only.
    - `torch-distributed`: `DistributedSampler` after `set_epoch(epoch)`: seed + epoch, padded or cut as in torch to
      give spec.replicas equal shares; the result is the share of spec.rank.
    - `numpy`: `numpy.random.RandomState(seed + epoch).permutation(n)`, whose results numpy has frozen (NEP 19), unlike
      those of `default_rng`.

    Raises ConfigError for a kind that is unknown or `explicit`, and for invalid numbers.
    """
    order_of = _ORDERS.get(spec.kind)
    if order_of is None:
        raise ConfigError(f"sampler {spec.kind!r} does not determine an order; known: {', '.join(_ORDERS)}")
    if not 0 <= spec.size < 2**32:
        raise ConfigError(f"sampler size {spec.size} is not between 0 and 2^32 - 1")
    if epoch < 0:
        raise ConfigError(f"epoch {epoch} is negative; epochs count from 0")
    if not 0 <= spec.rank < spec.replicas:
        raise ConfigError(f"sampler rank {spec.rank} is not one of {spec.replicas} replicas, 0 to {spec.replicas - 1}")
    if spec.replicas > 1 and spec.kind != "torch-distributed":
        raise ConfigError(f"sampler {spec.kind!r} cannot divide samples among {spec.replicas}; use torch-distributed")
    return order_of(spec, epoch)


def _sequential(spec: SamplerSpec, epoch: int) -> EpochOrder:
    return numpy.arange(spec.size, dtype=numpy.uint32)


def _numpy(spec: SamplerSpec, epoch: int) -> EpochOrder:
    order = _sequential(spec, epoch)
    if spec.shuffle:
        seed = spec.seed + epoch
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seed {spec.seed} + epoch {epoch} is not between 0 and 2^32 - 1, as numpy wants it")
        _numpy_shuffle(numpy.random.RandomState(seed), order)
    return order


def _numpy_shuffle(generator: numpy.random.RandomState, order: EpochOrder) -> None:
    """Shuffle as generator.shuffle(order), which would block all other threads."""
    last = len(order) - 1
    while last > 0:
        # At least half of the outputs are used.
        draws = generator.randint(0, 2**32, size=min(2 * last, _DRAWS_AT_ONCE), dtype=numpy.uint32)
        last = _shuffle_masked(order, draws, last)


def _torch_distributed(spec: SamplerSpec, epoch: int) -> EpochOrder:
    if spec.shuffle:
        everyone = _torch_permutation(_torch_generator(spec.seed + epoch), spec.size)
    else:
        everyone = _sequential(spec, epoch)
    share = spec.size // spec.replicas if spec.drop_last else -(-spec.size // spec.replicas)
    own = everyone[spec.rank : share * spec.replicas : spec.replicas]
    # Both of torch's ways to pad repeat the order from its start.
    padded = numpy.arange(len(own), share) * spec.replicas + spec.rank
    return numpy.concatenate((own, everyone[padded % max(spec.size, 1)]))


def _torch_random(spec: SamplerSpec, epoch: int) -> EpochOrder:
    if not spec.shuffle:
        return _sequential(spec, epoch)
    generator = _generator_at(spec.kind, spec.seed, spec.size, epoch)
    return _torch_permutation(generator, spec.size)


_ORDERS: dict[str, Callable[[SamplerSpec, int], EpochOrder]] = {
    "sequential": _sequential,
    **dict.fromkeys(LOADER_DRAWS, _torch_random),
    "torch-distributed": _torch_distributed,
    "numpy": _numpy,
}


@functools.lru_cache(maxsize=_SAMPLERS_KEPT)
def _states(kind: str, seed: int, size: int) -> dict[int, Any]:
    """Return the cache epoch -> state of the continuing generator at the start of the epoch's permutation, as for
    numpy's `RandomState.set_state`. Threads need no lock, since each computes the same state for an epoch."""
    return {}


def _generator_at(kind: str, seed: int, size: int, epoch: int) -> numpy.random.RandomState:
    """Return the generator at the start of the permutation of *epoch*."""
    states = _states(kind, seed, size)
    generator = _torch_generator(seed)
    before = max((number for number in list(states) if number <= epoch), default=-1)
    if before < 0:
        before, draws = 0, LOADER_DRAWS[kind][0]
    else:
        generator.set_state(states[before])
        draws = 0
    skip_draws(generator, draws + (epoch - before) * (2 * max(size - 1, 0) + LOADER_DRAWS[kind][1]))
    states[epoch] = generator.get_state()
    for oldest in list(states)[:-_STATES_KEPT]:
        states.pop(oldest, None)
    return generator


def _torch_generator(seed: int) -> numpy.random.RandomState:
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"seed {seed} is not between -2^63 and 2^64 - 1, as torch wants it")
    return numpy.random.RandomState(seed % 2**32)


def _torch_permutation(generator: numpy.random.RandomState, size: int) -> EpochOrder:
    if size >= TORCH_LIMIT:
        raise ConfigError(f"torch shuffles from {TORCH_LIMIT} samples on in another way; publish the order explicitly")
    order = numpy.arange(size, dtype=numpy.uint32)
    draws = generator.randint(0, 2**32, size=max(size - 1, 0), dtype=numpy.uint32)
    _shuffle(order, draws)
    return order


def _shuffle_in_python(order: EpochOrder, draws: EpochOrder) -> None:
    chosen = order.tolist()
    positions = numpy.arange(len(draws), dtype=numpy.int64)
    others = positions + draws % (len(order) - positions)
    for position, other in enumerate(others.tolist()):
        chosen[position], chosen[other] = chosen[other], chosen[position]
    order[:] = chosen


def _shuffle_masked_in_python(order: EpochOrder, draws: EpochOrder, last: int) -> int:
    chosen = order[: last + 1].tolist()
    for draw in draws.tolist():
        if last <= 0:
            break
        other = draw & ((1 << last.bit_length()) - 1)
        if other <= last:
            chosen[last], chosen[other] = chosen[other], chosen[last]
            last -= 1
    order[: len(chosen)] = chosen
    return last


def _fastest_shuffles() -> tuple[
    Callable[[EpochOrder, EpochOrder], None], Callable[[EpochOrder, EpochOrder, int], int]
]:
    """Return two functions that shuffle the numbers of the first array in place, by a generator's outputs in the
    second.

    The first shuffles as torch, and needs one output fewer than there are numbers. The second continues a numpy shuffle
    at a place, and returns the place at which the next outputs continue; 0: done.
    """
    try:
        from cachefs.planning.sequences import _shuffle as compiled

        return compiled.shuffle, compiled.shuffle_masked
    except (ImportError, AttributeError):  # not built here, or built for another machine or version
        return _shuffle_in_python, _shuffle_masked_in_python


_shuffle, _shuffle_masked = _fastest_shuffles()
