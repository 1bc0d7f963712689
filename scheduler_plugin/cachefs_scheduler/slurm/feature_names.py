"""Names of node features: `cachefs_DATASET_LEVEL`.

Dataset names consist of up to 64 letters, digits, `.`, `_` and `-`, all of which Slurm accepts in a feature (tested
with 22.05). A level has no `_`, so the last `_` ends the dataset's name, and no two datasets share a feature.
"""

import re
from collections.abc import Iterable
from typing import Final

_DATASET: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_OURS: Final = re.compile(rf"cachefs_{_DATASET.pattern}_(full|some|top[0-9]+)")


def feature_name(dataset: str, level: str) -> str:
    """Return the feature of a dataset for which `can_be_feature` is true."""
    return f"cachefs_{dataset}_{level}"


def can_be_feature(dataset: str) -> bool:
    """Return whether the text is a dataset name that daemons accept."""
    return _DATASET.fullmatch(dataset) is not None


def is_ours(name: str) -> bool:
    """Return whether cachefs-slurm-hint may remove the feature."""
    return _OURS.fullmatch(name) is not None


def other_features(names: Iterable[str]) -> tuple[str, ...]:
    """Return the other features, in their order."""
    return tuple(name for name in names if not is_ours(name))
