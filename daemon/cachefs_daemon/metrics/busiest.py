"""Counts by dataset, for the busiest only: a node may have thousands, and each would be a series for good.

A block counts for its dataset if that has a series at that moment, else for all others together. So no count ever
shrinks.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

# Seconds between two selections of the busiest datasets; earlier bytes count half at each.
_SELECT_SECONDS: Final = 60.0
# A dataset replaces another one if this many times as many bytes come for it.
_REPLACE_FACTOR: Final = 2.0
# Most former datasets whose counts are kept, and most datasets that are watched.
_MAX_REMEMBERED: Final = 1024


@dataclass(slots=True)
class DatasetCounts:
    """Blocks and bytes for one dataset, by source."""

    blocks: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, source: str, size: int) -> None:
        self.blocks[source] += 1
        self.bytes[source] += size


class BusiestDatasets:
    """Counts blocks and bytes by dataset. Used on the event loop."""

    def __init__(self, most: int) -> None:
        """most: datasets with counts of their own."""
        self.others = DatasetCounts()
        self._most = most
        self._rows: dict[str, DatasetCounts] = {}  # by name
        self._former_rows: dict[str, DatasetCounts] = {}  # of datasets that had a row
        self._recent: Counter[str] = Counter()  # recent bytes, by name
        self._selected_at = 0.0

    @property
    def rows(self) -> dict[str, DatasetCounts]:
        """The counts by name of the dataset."""
        return self._rows

    def count_block(self, name: str, source: str, size: int) -> None:
        """Count a block for a dataset. name: "" where the dataset is unknown."""
        row = self._rows.get(name)
        if row is None and name and len(self._rows) < self._most:
            row = self._rows[name] = self._former_rows.pop(name, DatasetCounts())
        (row or self.others).add(source, size)
        if name in self._recent or len(self._recent) < _MAX_REMEMBERED:
            self._recent[name] += size

    def select_busiest(self, now: float) -> None:
        """Select the busiest datasets. now: seconds of a monotonic clock."""
        if now - self._selected_at < _SELECT_SECONDS:
            return
        self._selected_at = now
        idle = sorted(self._rows, key=lambda name: self._recent[name])
        busy = [name for name, _ in self._recent.most_common(self._most) if name and name not in self._rows]
        for old, new in zip(idle, busy, strict=False):
            if self._recent[new] <= _REPLACE_FACTOR * self._recent[old]:
                break
            self._former_rows[old] = self._rows.pop(old)
            self._rows[new] = self._former_rows.pop(new, DatasetCounts())
        while len(self._former_rows) > _MAX_REMEMBERED:
            del self._former_rows[next(iter(self._former_rows))]
        self._recent = Counter({name: size // 2 for name, size in self._recent.items() if size > 1})
