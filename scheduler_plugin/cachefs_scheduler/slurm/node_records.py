"""Parses sinfo's nodes, names their features (`cachefs_DATASET_LEVEL`), and computes changes of them.

Dataset names consist of up to 64 letters, digits, `.`, `_` and `-`, all of which Slurm accepts in a feature (tested
with 22.05). A level has no `_`, so the last `_` ends the dataset's name, and no two datasets share a feature.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_DATASET: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_OURS: Final = re.compile(rf"cachefs_{_DATASET.pattern}_(full|some|top[0-9]+)")
# For sinfo --Node --all: a line per node and partition. Features contain no `|`.
SINFO_FORMAT: Final = "%N|%P|%T|%c|%f|%b"
_USABLE: Final = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
# State suffixes that do not prevent jobs: powered down or up, planned, reserved.
_HARMLESS: Final = "~#@^-$+"
# Nodes per call of scontrol.
MAX_NODES: Final = 200


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


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node of Slurm."""

    name: str
    partitions: tuple[str, ...]
    # Whether jobs can start there, now or after others have ended.
    usable: bool
    cpus: int
    available: tuple[str, ...]
    active: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    """All nodes, and the default partition."""

    nodes: Sequence[SlurmNode]
    default: str


@dataclass(frozen=True, slots=True)
class FeatureChange:
    """The arguments of one scontrol call: these nodes' complete features."""

    nodes: tuple[str, ...]
    available: tuple[str, ...]
    active: tuple[str, ...]


def parse_nodes(text: str) -> Inventory:
    """Parse sinfo's output. Malformed lines are skipped."""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    default = ""
    for line in text.splitlines():
        name, *fields = line.strip().split("|")
        if not name or len(fields) != 5:
            continue
        partition = fields[0].removesuffix("*")
        default = partition if fields[0].endswith("*") else default
        partitions, _ = rows.setdefault(name, ([], fields))
        partitions.append(partition)
    return Inventory([_node(name, tuple(partitions), fields) for name, (partitions, fields) in rows.items()], default)


def _node(name: str, partitions: tuple[str, ...], fields: Sequence[str]) -> SlurmNode:
    _, state, cpus, available, active = fields
    usable = state.lower().rstrip(_HARMLESS) in _USABLE
    return SlurmNode(
        name, partitions, usable, int(cpus.rstrip("+") or 0) if cpus.rstrip("+").isdigit() else 0,
        _features(available), _features(active),
    )  # fmt: skip


def _features(text: str) -> tuple[str, ...]:
    return () if text in ("", "(null)") else tuple(text.split(","))


def feature_changes(nodes: Iterable[SlurmNode], wanted: Mapping[str, Collection[str]]) -> list[FeatureChange]:
    """Return the changes that give each node the wanted cachefs features and keep all others. Nodes with the same
    resulting features share a change."""
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for node in nodes:
        ours = tuple(sorted(wanted.get(node.name, ())))
        available, active = (*other_features(node.available), *ours), (*other_features(node.active), *ours)
        if set(available) != set(node.available) or set(active) != set(node.active):
            groups.setdefault((available, active), []).append(node.name)
    return [
        FeatureChange(tuple(names[first : first + MAX_NODES]), available, active)
        for (available, active), names in groups.items()
        for first in range(0, len(names), MAX_NODES)
    ]
