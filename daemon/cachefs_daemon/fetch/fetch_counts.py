"""Counts fetched blocks by source, and by whether they were of use."""

from collections import Counter
from enum import StrEnum
from typing import Final

# Sources of blocks.
ORIGIN: Final = "origin"
PEER: Final = "peer"
SOURCES: Final = (ORIGIN, PEER)


class FetchResult(StrEnum):
    """Outcome of a fetched block."""

    STORED = "stored"  # written to a tier
    BYPASSED = "passed"  # given to its readers as a bypass block, as no tier could hold it
    DISCARDED = "discarded"  # no longer wanted, or another copy arrived first


class FetchCounts:
    """Counts since the daemon started. Used on the event loop."""

    def __init__(self) -> None:
        self.blocks: Counter[tuple[str, FetchResult]] = Counter()
        self.bytes: Counter[tuple[str, FetchResult]] = Counter()

    def count_block(self, source: str, result: FetchResult, size: int) -> None:
        """Count a block of *size* bytes."""
        self.blocks[source, result] += 1
        self.bytes[source, result] += size

    def count_discarded(self, size: int) -> None:
        """Count discarded bytes from an origin."""
        self.count_block(ORIGIN, FetchResult.DISCARDED, size)
