"""What was guessed of each snapshot, by which rule, and how right it was."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Snapshots that are remembered; of older ones only the sum is.
MOST_SNAPSHOTS: Final = 256


class Rule(StrEnum):
    """Why a block was guessed."""

    LISTING = "listing"  # files are read in the order of the listing
    PASS = "pass"  # blocks are read in the order of an earlier pass
    FILE = "file"  # a file is read in steps of equal length
    SHARDS = "shards"  # one file after the other is read from its beginning
    REST = "rest"  # a file is read here and there
    SET = "set"  # the files of a directory are read in any order


@dataclass(slots=True)
class Guesses:
    """What was guessed since the start."""

    # Blocks that were fetched on a guess; those that were read since; those that were not.
    blocks: int = 0
    right: int = 0
    wrong: int = 0
    # Bytes of each of these.
    bytes: int = 0
    right_bytes: int = 0
    wrong_bytes: int = 0

    @property
    def unread_bytes(self) -> int:
        """Bytes of all that were not read, whether they may still be or not."""
        return self.bytes - self.right_bytes


class GuessBook:
    """Of all snapshots."""

    def __init__(self) -> None:
        self.total = Guesses()
        self._rows: OrderedDict[str, dict[Rule, Guesses]] = OrderedDict()  # by snapshot, least recent first

    def guessed(self, snapshot: str, rule: Rule, size: int) -> None:
        """A block is fetched on a guess."""
        for one in (self.total, self._row(snapshot, rule)):
            one.blocks += 1
            one.bytes += size

    def undone(self, snapshot: str, rule: Rule, size: int) -> None:
        """It was not fetched after all."""
        for one in (self.total, self._row(snapshot, rule)):
            one.blocks -= 1
            one.bytes -= size

    def right(self, snapshot: str, rule: Rule, size: int) -> None:
        """It was read."""
        for one in (self.total, self._row(snapshot, rule)):
            one.right += 1
            one.right_bytes += size

    def wrong(self, snapshot: str, rule: Rule, size: int) -> None:
        """Nobody has read it, and nobody is expected to."""
        for one in (self.total, self._row(snapshot, rule)):
            one.wrong += 1
            one.wrong_bytes += size

    def rows(self) -> Iterator[tuple[str, Rule, Guesses]]:
        """Those of the last MOST_SNAPSHOTS snapshots, the most recent one first."""
        for snapshot, rules in reversed(self._rows.items()):
            for rule, counts in rules.items():
                yield snapshot, rule, counts

    def _row(self, snapshot: str, rule: Rule) -> Guesses:
        rules = self._rows.get(snapshot)
        if rules is None:
            rules = self._rows[snapshot] = {}
            if len(self._rows) > MOST_SNAPSHOTS:
                self._rows.popitem(last=False)
        self._rows.move_to_end(snapshot)
        found = rules.get(rule)
        if found is None:
            found = rules[rule] = Guesses()
        return found
