"""Tells which samplers cachefs may iterate besides the loader: the pure ones.

A sampler is pure if iterating it changes nothing: not itself, no random generator, no file, no other process. Its next
order follows from its attributes. Purity cannot be seen from outside, so a class is either known to be pure, or marked.
"""

import sys
from dataclasses import dataclass
from typing import Any, Final, TypeVar

# Set by `cachefs.pure_sampler`.
MARK: Final = "__cachefs_pure__"

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True, slots=True)
class VersionRange:
    """A range of a package's versions: the first one and the one after the last."""

    package: str
    first: tuple[int, int]
    end: tuple[int, int]


_TIMM: Final = VersionRange("timm", (0, 4), (1, 1))
_TORCHVISION: Final = VersionRange("torchvision", (0, 8), (1, 0))
_LIGHTNING: Final = VersionRange("lightning", (2, 0), (3, 0))
_PYTORCH_LIGHTNING: Final = VersionRange("pytorch_lightning", (1, 6), (3, 0))
# Each of these computes its order in `__iter__`, from its attributes and a generator that it makes there.
_PURE_SAMPLERS: Final = {
    "timm.data.distributed_sampler.OrderedDistributedSampler": _TIMM,
    "timm.data.distributed_sampler.RepeatAugSampler": _TIMM,
    "torchvision.datasets.samplers.clip_sampler.DistributedSampler": _TORCHVISION,
    "torchvision.datasets.samplers.clip_sampler.UniformClipSampler": _TORCHVISION,
    "lightning.pytorch.overrides.distributed.UnrepeatedDistributedSampler": _LIGHTNING,
    "pytorch_lightning.overrides.distributed.UnrepeatedDistributedSampler": _PYTORCH_LIGHTNING,
}
_ACCELERATE: Final = VersionRange("accelerate", (0, 24), (2, 0))
_SEEDABLE: Final = "accelerate.data_loader.SeedableRandomSampler"
TORCHDATA: Final = VersionRange("torchdata", (0, 8), (0, 13))
_STATEFUL: Final = "torchdata.stateful_dataloader.sampler."


def pure_sampler(kind: _Class) -> _Class:
    """Mark a class of samplers as pure: iterating one changes nothing. Use as a decorator of the class.

    `cachefs run` then iterates a sampler once more as an epoch begins, and publishes the whole epoch. Its `__iter__`
    must draw from no generator but one that it makes itself, read from no source that moves on (a file, a queue, a
    store), and change no attribute.

    Args:
        kind: The class of samplers.

    Returns:
        The same class.
    """
    setattr(kind, MARK, True)
    return kind


def is_pure(sampler: Any) -> bool:
    """Return whether the sampler's class is marked or known as pure; not a derived one with its own `__iter__`."""
    for kind in type(sampler).__mro__:
        if kind.__dict__.get(MARK) is True:
            return True
        if "__iter__" in kind.__dict__:
            known = _PURE_SAMPLERS.get(qualified_name(kind))
            return known is not None and is_installed(known)
    return False


def is_seedable(sampler: Any) -> bool:
    """Return whether the sampler is Accelerate's, which seeds its generator anew for each epoch."""
    return qualified_name(type(sampler)) == _SEEDABLE and is_installed(_ACCELERATE)


def is_stateful(sampler: Any, name: str) -> bool:
    """Return whether the sampler is torchdata's class *name*, which iterates as torch's, and has a position."""
    return qualified_name(type(sampler)) == _STATEFUL + name and is_installed(TORCHDATA)


def qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_installed(known: VersionRange) -> bool:
    """Return whether the loaded package has one of these versions."""
    version = str(getattr(sys.modules.get(known.package), "__version__", ""))
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return False
    return known.first <= (int(numbers[0]), int(numbers[1])) < known.end
