"""Counts the guesses of readahead, by snapshot and rule, and how many were right."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Most snapshots with counts of their own; older ones stay in the total only.
MAX_SNAPSHOTS: Final = 256


class ReadaheadRule(StrEnum):
    """The reason for a guess."""

    LISTING = "listing"  # files are read in the order of the listing
    PASS = "pass"  # blocks are read in the order of an earlier pass
    FILE = "file"  # a file is read in steps of equal length
    SHARDS = "shards"  # one file after the other is read from its beginning
    REST = "rest"  # a file is read here and there
    SET = "set"  # the files of a directory are read in any order


@dataclass(slots=True)
class RuleCounts:
    """Counts of guesses since the start."""

    # Blocks fetched on a guess; those read since; those given up as wrong.
    blocks: int = 0
    right: int = 0
    wrong: int = 0
    # The same in bytes.
    bytes: int = 0
    right_bytes: int = 0
    wrong_bytes: int = 0

    @property
    def unread_bytes(self) -> int:
        """Bytes of all unread guesses, including those that may still be read."""
        return self.bytes - self.right_bytes


class ReadaheadCounters:
    """The counts of all snapshots."""

    def __init__(self) -> None:
        self.total = RuleCounts()
        self._rows: OrderedDict[str, dict[ReadaheadRule, RuleCounts]] = OrderedDict()  # by snapshot, least recent first

    def note_fetched(self, snapshot: str, rule: ReadaheadRule, size: int) -> None:
        """Count a block that is fetched on a guess."""
        for one in (self.total, self._row(snapshot, rule)):
            one.blocks += 1
            one.bytes += size

    def note_undone(self, snapshot: str, rule: ReadaheadRule, size: int) -> None:
        """Uncount a guess that was not fetched after all."""
        for one in (self.total, self._row(snapshot, rule)):
            one.blocks -= 1
            one.bytes -= size

    def note_right(self, snapshot: str, rule: ReadaheadRule, size: int) -> None:
        """Count a guessed block that was read."""
        for one in (self.total, self._row(snapshot, rule)):
            one.right += 1
            one.right_bytes += size

    def note_wrong(self, snapshot: str, rule: ReadaheadRule, size: int) -> None:
        """Count a guessed block that was not read, and is not expected to be."""
        for one in (self.total, self._row(snapshot, rule)):
            one.wrong += 1
            one.wrong_bytes += size

    def rows(self) -> Iterator[tuple[str, ReadaheadRule, RuleCounts]]:
        """Yield the counts of the last MAX_SNAPSHOTS snapshots, the most recent first."""
        for snapshot, rules in reversed(self._rows.items()):
            for rule, counts in rules.items():
                yield snapshot, rule, counts

    def _row(self, snapshot: str, rule: ReadaheadRule) -> RuleCounts:
        rules = self._rows.get(snapshot)
        if rules is None:
            rules = self._rows[snapshot] = {}
            if len(self._rows) > MAX_SNAPSHOTS:
                self._rows.popitem(last=False)
        self._rows.move_to_end(snapshot)
        found = rules.get(rule)
        if found is None:
            found = rules[rule] = RuleCounts()
        return found
