"""Limits the bytes that readahead may cost, so that wrong guesses cost a reader without any order next to nothing."""

from typing import Final

# Bytes of a snapshot that may be guessed wrongly before any guess was right.
FIRST: Final = 2 << 20
# Additional bytes of wrong guesses, as a part of the bytes that readers wait for.
SHARE: Final = 0.01
# Most bytes of unread guesses of one snapshot: what is read within 0.3 s at 200 MB/s. Also the most that a long series
# of right guesses may cost when guesses begin to be wrong.
MOST: Final = 64 << 20


class Credit:
    """The budget of one snapshot. A guess takes its bytes, and gives back twice as many when it was right.

    The bytes that were guessed and not read are therefore at most *first*, plus SHARE of the bytes that readers have
    waited for, plus the bytes of right guesses, plus one block.
    """

    __slots__ = ("files", "left", "misses")

    def __init__(self, files: int = 0, first: int = FIRST) -> None:
        """files: number of files in the snapshot; first: bytes that may be guessed before any guess was right."""
        self.files = files
        self.left: float = first  # bytes that may be guessed now, if positive
        self.misses = 0  # reads that were not guessed

    def demanded(self, size: int) -> None:
        """Record that a reader waits for a block that was not guessed."""
        self.misses += 1
        self.left = min(MOST, self.left + SHARE * size)

    def guessed(self, size: int) -> None:
        self.left -= size

    def right(self, size: int) -> None:
        """Record that a guessed block was read."""
        self.left = min(MOST, self.left + 2 * size)

    def undone(self, size: int) -> None:
        """Record that a guessed block was not fetched after all."""
        self.left = min(MOST, self.left + size)
