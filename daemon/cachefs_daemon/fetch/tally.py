"""What became of the blocks that have come: where they came from, and whether anybody has them."""

from collections import Counter
from enum import StrEnum
from typing import Final

# Where blocks come from.
ORIGIN: Final = "origin"
PEER: Final = "peer"
SOURCES: Final = (ORIGIN, PEER)


class Became(StrEnum):
    """What became of a block."""

    STORED = "stored"  # in a tier
    PASSED = "passed"  # no tier could hold it: its readers got it
    DISCARDED = "discarded"  # it was not wanted any more, or another copy of it was first


class Tally:
    """Since the daemon started. Used on the event loop."""

    def __init__(self) -> None:
        self.blocks: Counter[tuple[str, Became]] = Counter()
        self.bytes: Counter[tuple[str, Became]] = Counter()

    def add(self, source: str, became: Became, size: int) -> None:
        """A block of *size* bytes."""
        self.blocks[source, became] += 1
        self.bytes[source, became] += size

    def discard(self, size: int) -> None:
        """A block from its origin is of no use."""
        self.add(ORIGIN, Became.DISCARDED, size)
