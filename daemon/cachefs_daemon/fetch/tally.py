"""Counts fetched blocks by source, and by whether they were of use."""

from collections import Counter
from enum import StrEnum
from typing import Final

# Sources of blocks.
ORIGIN: Final = "origin"
PEER: Final = "peer"
SOURCES: Final = (ORIGIN, PEER)


class Became(StrEnum):
    """Outcome of a fetched block."""

    STORED = "stored"  # written to a tier
    PASSED = "passed"  # given to its readers as a bypass block, as no tier could hold it
    DISCARDED = "discarded"  # no longer wanted, or another copy arrived first


class Tally:
    """Counts since the daemon started. Used on the event loop."""

    def __init__(self) -> None:
        self.blocks: Counter[tuple[str, Became]] = Counter()
        self.bytes: Counter[tuple[str, Became]] = Counter()

    def add(self, source: str, became: Became, size: int) -> None:
        """Count a block of *size* bytes."""
        self.blocks[source, became] += 1
        self.bytes[source, became] += size

    def discard(self, size: int) -> None:
        """Count discarded bytes from an origin."""
        self.add(ORIGIN, Became.DISCARDED, size)
