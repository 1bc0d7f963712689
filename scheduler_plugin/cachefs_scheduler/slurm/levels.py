"""Which nodes hold how much of a dataset, as few sets of nodes, each within the next one.

A preference of Slurm is for nodes that have a feature, and for a job on N nodes all or none of them must have it. So a
feature is worth having where at least N nodes have it, and as few more as possible: `top4` is for jobs on up to four
nodes. In `[cachefs_x_top1|cachefs_x_top2|cachefs_x_some]`, Slurm takes the first for which there is room.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SOME: Final = "some"
FULL: Final = "full"
TOPS: Final = (1, 2, 4, 8, 16, 32, 64)
# Parts of a dataset. Nodes that differ by less count as equal; those that hold less than LEAST, or a tenth of what the
# best one holds, as empty.
EQUAL: Final = 0.05
LEAST: Final = 0.01
_WORTH: Final = 0.1
_ALL: Final = 0.95
# Nodes that hold something of one dataset, the best ones.
MOST_NODES: Final = 1024


@dataclass(frozen=True, slots=True)
class Levels:
    """Who has which level of a dataset."""

    # From the best level to the widest, each within the next one.
    nested: Mapping[str, frozenset[str]]
    # Nodes that hold practically all of it; for constraints of users, not for preferences.
    full: frozenset[str]

    def of(self, node: str) -> Iterable[str]:
        """The levels that a node has."""
        for level, nodes in self.nested.items():
            if node in nodes:
                yield level
        if node in self.full:
            yield FULL

    def counts(self, nodes: Collection[str] | None) -> tuple[tuple[str, int], ...]:
        """By level, how many of these nodes have it; None: of all."""
        return tuple(
            (level, len(having) if nodes is None else len(having.intersection(nodes)))
            for level, having in self.nested.items()
        )


def levels_of(parts: Mapping[str, float], partitions: Iterable[Collection[str]]) -> Levels:
    """parts: by node that may get jobs, the part of the dataset that it holds, 0 to 1. partitions: nodes of each.

    In each partition, the best N nodes have a level.
    """
    best = max(parts.values(), default=0.0)
    least = max(LEAST, _WORTH * best)
    having = [node for node in parts if parts[node] >= least]
    ranked = sorted(having, key=lambda node: (-parts[node], node))[:MOST_NODES]
    some = frozenset(ranked)
    if not some:
        return Levels({}, frozenset())
    lists = [[node for node in ranked if node in within] for within in map(frozenset, partitions)]
    nested: dict[str, frozenset[str]] = {}
    before: frozenset[str] = frozenset()
    for count in TOPS:
        best_ones = frozenset(node for each in lists or [ranked] for node in _best(each, count, parts))
        if best_ones == some:
            break
        if best_ones and best_ones != before:
            nested[f"top{count}"] = before = best_ones
    nested[SOME] = some
    return Levels(nested, frozenset(node for node in ranked if parts[node] >= _ALL))


def _best(ranked: Sequence[str], count: int, parts: Mapping[str, float]) -> Iterable[str]:
    """So many nodes, and those that are as good as the last of them."""
    if count >= len(ranked):
        return ranked
    bar = parts[ranked[count - 1]] - EQUAL
    return [node for node in ranked if parts[node] >= bar]


def steady(before: float, now: float) -> float:
    """Of a part that changes little, the value before: else features would come and go with each block."""
    edge = (now >= _ALL) != (before >= _ALL) or (now < LEAST) != (before < LEAST)
    return now if edge or abs(now - before) >= EQUAL / 2 else before
