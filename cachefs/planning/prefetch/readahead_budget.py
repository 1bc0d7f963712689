"""Limits what readahead may cost, and counts what it was worth.

`ReadaheadBudget` limits the bytes of readahead, so that wrong guesses cost a reader without any order next to nothing.
`ReadaheadCounters` counts the guesses, by snapshot and rule, and how many were right.

`BackgroundLimit` limits the bytes in flight that no reader waits for and no plan has announced. These fetches share the
connection to the origin with readers that wait, so they must be few: a block of 4 MiB takes 0.13 s from an origin of
40 MB/s, and 1.1 s together with ten others. But they must be enough to use what the origin can deliver.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Most snapshots with counts of their own; older ones stay in the total only.
MAX_SNAPSHOTS: Final = 256
# Limit of the bytes in flight: what an origin delivers in this many seconds, but at least this many bytes.
IDLE_SECONDS: Final = 0.2
IDLE_BYTES: Final = 8 << 20
# The same while a reader waits.
BUSY_SECONDS: Final = 0.03
BUSY_BYTES: Final = 1 << 20
# Part of the best rate that is forgotten per second.
_FORGET: Final = 0.02
# Bytes of a snapshot that may be guessed wrongly before any guess was right.
INITIAL_BYTES: Final = 2 << 20
# Additional bytes of wrong guesses, as a part of the bytes that readers wait for.
MISS_SHARE: Final = 0.01
# Most bytes of unread guesses of one snapshot: what is read within 0.3 s at 200 MB/s. Also the most that a long series
# of right guesses may cost when guesses begin to be wrong.
MAX_UNREAD_BYTES: Final = 64 << 20


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


class BackgroundLimit:
    """Measures the rate of the origins, and derives the limit. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._since = now  # time of the last measurement
        self._bytes = 0  # delivered until then
        self._rate = 0.0  # best recent rate, in bytes per second

    def update_rate(self, delivered: int, now: float) -> None:
        """Update the rate. To be called about once a second. delivered: bytes since the start."""
        seconds = max(now - self._since, 1e-3)
        rate = (delivered - self._bytes) / seconds
        self._rate = max(rate, self._rate * max(0.0, 1 - _FORGET * seconds))
        self._since, self._bytes = now, delivered

    def max_in_flight(self, *, has_waiting_reader: bool) -> int:
        """Return the limit of bytes in flight. A block may exceed it where no other one is in flight."""
        if has_waiting_reader:
            return max(BUSY_BYTES, int(BUSY_SECONDS * self._rate))
        return max(IDLE_BYTES, int(IDLE_SECONDS * self._rate))


class ReadaheadBudget:
    """The budget of one snapshot. A guess takes its bytes, and gives back twice as many when it was right.

    The bytes that were guessed and not read are therefore at most *first*, plus MISS_SHARE of the bytes that readers
    have waited for, plus the bytes of right guesses, plus one block.
    """

    __slots__ = ("files", "misses", "remaining")

    def __init__(self, files: int = 0, first: int = INITIAL_BYTES) -> None:
        """files: number of files in the snapshot; first: bytes that may be guessed before any guess was right."""
        self.files = files
        self.remaining: float = first  # bytes that may be guessed now, if positive
        self.misses = 0  # reads that were not guessed

    def note_miss(self, size: int) -> None:
        """Record that a reader waits for a block that was not guessed."""
        self.misses += 1
        self.remaining = min(MAX_UNREAD_BYTES, self.remaining + MISS_SHARE * size)

    def spend(self, size: int) -> None:
        self.remaining -= size

    def note_hit(self, size: int) -> None:
        """Record that a guessed block was read."""
        self.remaining = min(MAX_UNREAD_BYTES, self.remaining + 2 * size)

    def refund(self, size: int) -> None:
        """Record that a guessed block was not fetched after all."""
        self.remaining = min(MAX_UNREAD_BYTES, self.remaining + size)
