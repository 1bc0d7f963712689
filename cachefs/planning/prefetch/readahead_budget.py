"""Limits the bytes that readahead may cost, so that wrong guesses cost a reader without any order next to nothing."""

from typing import Final

# Bytes of a snapshot that may be guessed wrongly before any guess was right.
INITIAL_BYTES: Final = 2 << 20
# Additional bytes of wrong guesses, as a part of the bytes that readers wait for.
MISS_SHARE: Final = 0.01
# Most bytes of unread guesses of one snapshot: what is read within 0.3 s at 200 MB/s. Also the most that a long series
# of right guesses may cost when guesses begin to be wrong.
MAX_UNREAD_BYTES: Final = 64 << 20


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
