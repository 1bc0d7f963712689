"""Counts by dataset, for the busiest of them only: a node may have thousands, and each would be a series for good.

A block counts for its dataset where that has a series at that moment, else for all others together. So no count ever
shrinks.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

# Seconds between two looks at which datasets are busiest; what came before the last look counts half.
_LOOK_SECONDS: Final = 60.0
# A dataset takes the place of another one where so many times as many bytes come for it.
_CLEARLY: Final = 2.0
# Datasets whose counts are remembered after another one has taken their place, and those that are watched.
_REMEMBERED: Final = 1024


@dataclass(slots=True)
class Row:
    """What came for one dataset, by source."""

    blocks: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, source: str, size: int) -> None:
        self.blocks[source] += 1
        self.bytes[source] += size


class Busiest:
    """Used on the event loop."""

    def __init__(self, most: int) -> None:
        """most: datasets that have counts of their own."""
        self.others = Row()
        self._most = most
        self._rows: dict[str, Row] = {}  # by name
        self._before: dict[str, Row] = {}  # of datasets that had one
        self._recent: Counter[str] = Counter()  # bytes of late, by name
        self._looked = 0.0

    @property
    def rows(self) -> dict[str, Row]:
        """By name of the dataset."""
        return self._rows

    def add(self, name: str, source: str, size: int) -> None:
        """A block has come for a dataset. name: empty where nobody knows of which one it is."""
        row = self._rows.get(name)
        if row is None and name and len(self._rows) < self._most:
            row = self._rows[name] = self._before.pop(name, Row())
        (row or self.others).add(source, size)
        if name in self._recent or len(self._recent) < _REMEMBERED:
            self._recent[name] += size

    def look(self, now: float) -> None:
        """Let the busiest ones have counts of their own. now: seconds of a monotonic clock."""
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        idle = sorted(self._rows, key=lambda name: self._recent[name])
        busy = [name for name, _ in self._recent.most_common(self._most) if name and name not in self._rows]
        for old, new in zip(idle, busy, strict=False):
            if self._recent[new] <= _CLEARLY * self._recent[old]:
                break
            self._before[old] = self._rows.pop(old)
            self._rows[new] = self._before.pop(new, Row())
        while len(self._before) > _REMEMBERED:
            del self._before[next(iter(self._before))]
        self._recent = Counter({name: size // 2 for name, size in self._recent.items() if size > 1})
