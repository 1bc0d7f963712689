"""The parameters of a sampler. Importable without numpy, whose import takes 0.1 s."""

from dataclasses import dataclass
from typing import Final

from cachefs.errors import ConfigError

# All kinds of samplers: those whose order cachefs.planning.sequences.sampler computes, and `explicit`, for orders that
# are published one by one.
KINDS: Final = (
    "sequential", "torch-random", "torch-loader", "torch-loader-persistent", "torch-distributed", "numpy", "explicit",
)  # fmt: skip

MAX_SAMPLES: Final = 2**32 - 1
MAX_EPOCHS: Final = 1_000_000
# From this number of samples on, torch draws 64 bits per swap (UINT32_MAX / 20, as in randperm_cpu).
TORCH_LIMIT: Final = (2**32 - 1) // 20
# Seeds accepted by the generators of numpy and torch.
_NUMPY_SEEDS: Final = range(2**32)
_TORCH_SEEDS: Final = range(-(2**63), 2**64)
# Longer numbers are unreadable, and Python refuses to write out much longer ones.
_SHOWN_BITS: Final = 128
# Kinds that seed each epoch with the sampler's seed plus the epoch's number.
_SEEDED_ANEW: Final = ("numpy", "torch-distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """An order of samples that can be computed, unless its kind is `explicit`."""

    kind: str  # one of KINDS, explained in `sampler.epoch_order`
    size: int  # samples of the dataset
    seed: int = 0
    epochs: int = 1  # number of epochs
    shuffle: bool = True
    drop_last: bool = False  # as in torch's DistributedSampler
    replicas: int = 1  # ranks that share the samples
    rank: int = 0  # rank of this consumer

    def check(self) -> None:
        """Raise ConfigError, with the field and its valid values, where an epoch would have no order."""
        if self.kind not in KINDS:
            raise ConfigError(f"sampler kind {self.kind!r}: expected one of {', '.join(KINDS)}")
        _within("size", self.size, range(MAX_SAMPLES + 1))
        _within("epochs", self.epochs, range(1, MAX_EPOCHS + 1))
        _within("replicas", self.replicas, range(1, MAX_SAMPLES + 1))
        _within("rank", self.rank, range(self.replicas))
        if self.kind == "explicit":
            return
        if self.replicas > 1 and self.kind != "torch-distributed":
            raise ConfigError(
                f"sampler replicas {self.replicas}: {self.kind} cannot divide samples; use kind torch-distributed"
            )
        if self.kind == "sequential" or not self.shuffle:
            return
        seeds = _NUMPY_SEEDS if self.kind == "numpy" else _TORCH_SEEDS
        last = self.epochs - 1 if self.kind in _SEEDED_ANEW else 0
        _within("seed", self.seed, range(seeds.start, seeds.stop - last))
        if self.kind != "numpy" and self.size >= TORCH_LIMIT:
            raise ConfigError(
                f"sampler size {self.size:,}: torch shuffles from {TORCH_LIMIT:,} samples on in another way; "
                "publish the orders, with kind explicit"
            )


def _within(field: str, value: int, allowed: range) -> None:
    """Raises ConfigError."""
    if value not in allowed:
        shown = str(value) if value.bit_length() <= _SHOWN_BITS else f"with {value.bit_length():,} bits"
        raise ConfigError(f"sampler {field} {shown}: expected {allowed.start} to {allowed.stop - 1}")
