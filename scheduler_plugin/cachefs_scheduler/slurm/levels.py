"""Divides the holders of a dataset into a few nested sets of nodes, called levels.

A Slurm preference selects nodes with a feature, and for a job on N nodes either all or none must have it. So a feature
is useful if at least N nodes have it, and as few more as possible: `top4` is for jobs on up to four nodes. From
`[cachefs_x_top1|cachefs_x_top2|cachefs_x_some]`, Slurm takes the first level with room.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SOME: Final = "some"
FULL: Final = "full"
TOPS: Final = (1, 2, 4, 8, 16, 32, 64)
# Fractions of a dataset. Nodes that differ by less than EQUAL_SHARE count as equal; nodes below MIN_SHARE, or below
# _MIN_OF_BEST of the best node's part, count as empty.
EQUAL_SHARE: Final = 0.05
MIN_SHARE: Final = 0.01
_MIN_OF_BEST: Final = 0.1
_FULL_SHARE: Final = 0.95
# Nodes per dataset, the best ones.
MAX_NODES: Final = 1024


@dataclass(frozen=True, slots=True)
class HolderLevels:
    """The holders of each level of a dataset."""

    # From the best level to the widest, each a subset of the next one.
    nested: Mapping[str, frozenset[str]]
    # Nodes that hold at least _FULL_SHARE of it; for users' constraints, not for preferences.
    full: frozenset[str]

    def levels_of_node(self, node: str) -> Iterable[str]:
        """Yield the levels that a node has."""
        for level, nodes in self.nested.items():
            if node in nodes:
                yield level
        if node in self.full:
            yield FULL

    def counts(self, nodes: Collection[str] | None) -> tuple[tuple[str, int], ...]:
        """Return by level how many of *nodes* have it; None: of all nodes."""
        return tuple(
            (level, len(having) if nodes is None else len(having.intersection(nodes)))
            for level, having in self.nested.items()
        )


def divide_holders(parts: Mapping[str, float], partitions: Iterable[Collection[str]]) -> HolderLevels:
    """Return the levels of a dataset: in each partition, the best N nodes have level topN.

    parts: by node that may get jobs, the fraction of the dataset that it holds. partitions: nodes of each.
    """
    best = max(parts.values(), default=0.0)
    least = max(MIN_SHARE, _MIN_OF_BEST * best)
    having = [node for node in parts if parts[node] >= least]
    ranked = sorted(having, key=lambda node: (-parts[node], node))[:MAX_NODES]
    some = frozenset(ranked)
    if not some:
        return HolderLevels({}, frozenset())
    lists = [[node for node in ranked if node in within] for within in map(frozenset, partitions)]
    nested: dict[str, frozenset[str]] = {}
    before: frozenset[str] = frozenset()
    for count in TOPS:
        best_ones = frozenset(node for each in lists or [ranked] for node in _best_nodes(each, count, parts))
        if best_ones == some:
            break
        if best_ones and best_ones != before:
            nested[f"top{count}"] = before = best_ones
    nested[SOME] = some
    return HolderLevels(nested, frozenset(node for node in ranked if parts[node] >= _FULL_SHARE))


def _best_nodes(ranked: Sequence[str], count: int, parts: Mapping[str, float]) -> Iterable[str]:
    """Return the best *count* nodes, and nodes equal to the last of them."""
    if count >= len(ranked):
        return ranked
    bar = parts[ranked[count - 1]] - EQUAL_SHARE
    return [node for node in ranked if parts[node] >= bar]


def damped_share(before: float, now: float) -> float:
    """Return the earlier value unless the change matters: otherwise features would change with each block."""
    edge = (now >= _FULL_SHARE) != (before >= _FULL_SHARE) or (now < MIN_SHARE) != (before < MIN_SHARE)
    return now if edge or abs(now - before) >= EQUAL_SHARE / 2 else before
