"""Names of node features: `cachefs_DATASET_LEVEL`.

Names of datasets are letters, digits, `.`, `_` and `-` (64 at most), all of which Slurm takes in a feature; tried with
22.05. A level has no `_`, so the name of a dataset ends at the last one, and no two datasets share a feature.
"""

import re
from collections.abc import Iterable
from typing import Final

_DATASET: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_OURS: Final = re.compile(rf"cachefs_{_DATASET.pattern}_(full|some|top[0-9]+)")


def feature(dataset: str, level: str) -> str:
    """The feature of a dataset that `can_be_feature`."""
    return f"cachefs_{dataset}_{level}"


def can_be_feature(dataset: str) -> bool:
    """Is it the name of a dataset as daemons accept it?"""
    return _DATASET.fullmatch(dataset) is not None


def is_ours(name: str) -> bool:
    """Is it a feature that cachefs-slurm-hint may take away?"""
    return _OURS.fullmatch(name) is not None


def others(names: Iterable[str]) -> tuple[str, ...]:
    """Features that are not ours, in their order."""
    return tuple(name for name in names if not is_ours(name))
