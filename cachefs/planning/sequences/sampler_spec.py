"""What a sampler is told by. Whoever only passes it on does not pay for numpy, whose import takes 0.1 s."""

from dataclasses import dataclass
from typing import Final

# All kinds of samplers: those whose order cachefs.planning.sequences.sampler computes, and `explicit`, where orders are
# published one by one.
KINDS: Final = (
    "sequential", "torch-random", "torch-loader", "torch-loader-persistent", "torch-distributed", "numpy", "explicit",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """An order of samples that can be computed, unless its kind is `explicit`."""

    kind: str  # one of KINDS; `sampler.epoch_order` says what each means
    size: int  # samples of the dataset
    seed: int = 0
    epochs: int = 1  # how many the sampler will give
    shuffle: bool = True
    drop_last: bool = False  # as torch's DistributedSampler takes it
    replicas: int = 1  # ranks that share the samples
    rank: int = 0  # which of them this is
