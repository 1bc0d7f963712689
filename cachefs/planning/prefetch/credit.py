"""How many bytes may be fetched on a guess: so that guessing costs a reader without any order next to nothing."""

from typing import Final

# Bytes that may be guessed wrongly of a snapshot before any guess was right.
FIRST: Final = 2 << 20
# The part of the bytes that readers wait for which may be guessed wrongly on top of that.
SHARE: Final = 0.01
# Bytes of guesses that may be unread at once, of one snapshot: what is read within 0.3 s at 200 MB/s. It is also what
# guesses that were right for long may cost when they begin to be wrong.
MOST: Final = 64 << 20


class Credit:
    """Of one snapshot. A guess takes its bytes, and gives them back twice where it was right.

    So the bytes that were guessed and not read are never more than *first*, plus SHARE of what readers have waited for,
    plus those that were right, plus one block.
    """

    __slots__ = ("files", "left", "misses")

    def __init__(self, files: int = 0, first: int = FIRST) -> None:
        """files: in the snapshot; first: bytes that may be guessed before any guess was right."""
        self.files = files
        self.left: float = first  # bytes that may be guessed now, where it is more than 0
        self.misses = 0  # reads that nobody had guessed

    def demanded(self, size: int) -> None:
        """A reader waits for a block that nobody has guessed."""
        self.misses += 1
        self.left = min(MOST, self.left + SHARE * size)

    def guessed(self, size: int) -> None:
        self.left -= size

    def right(self, size: int) -> None:
        """A guessed block was read."""
        self.left = min(MOST, self.left + 2 * size)

    def undone(self, size: int) -> None:
        """A guessed block was not fetched after all."""
        self.left = min(MOST, self.left + size)
