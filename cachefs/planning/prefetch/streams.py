"""Readers that seem to go through a snapshot in an order, and what was fetched ahead of each on a guess."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cachefs.planning.prefetch.credit import Credit
from cachefs.planning.prefetch.guess_counts import Rule

# Blocks that a stream has ahead of its reader at first, and at most; and bytes.
FEWEST_AHEAD: Final = 4
MOST_AHEAD: Final = 512
MOST_BYTES_AHEAD: Final = 32 << 20
# A guess that a reader has passed by so many blocks was wrong. Until then it may be that of another process, where
# several share out one order: 8 workers with batches of 32.
_PASSED: Final = 256
# Of guesses that were right, a stream needs so many, and four times as many as were wrong, for its blocks to be pushed.
_TRUSTED: Final = 8
_MOST_TRUST: Final = 16
# Others may wait for so many blocks between two reads of a stream that has been right so often. Of other streams it may
# be fewer: a random reader of 2,000 files comes upon one of 4 guesses after 500 reads.
_MOST_MISSES: Final = 2048
_FEW_MISSES: Final = 64
_FEWEST_MISSES: Final = 16
# Every 16th block is not pushed, so that its reader is seen; of short windows, more of them.
_MOST_PUSHED: Final = 16
# Mounts that one stream's blocks are pushed to, at most.
_MOST_MOUNTS: Final = 4

Name = tuple[str, int, int]  # snapshot, entry of the file, number of the block in the file


class Way(StrEnum):
    """In which order a reader goes."""

    LISTING = "listing"  # files as the listing has them: from the first block of one file to that of the next
    PASS = "pass"  # as blocks were read before
    FILE = "file"  # through one file, in steps of equal length


@dataclass(slots=True, eq=False)
class Stream:
    """Something that reads in an order.

    It has more than 12 attributes, as it is plain data: where the stream is, and how right its guesses were.
    """

    way: Way
    snapshot: str
    # Of the last block that was guessed or read: its entry (LISTING), its place in the log (PASS), its number (FILE).
    at: int
    # When it was last seen, in seconds.
    seen: float
    # FILE: the entry of the file, and blocks from one that is read to the next.
    entry: int = 0
    step: int = 1
    # It was begun by the first block of its file alone.
    is_entry: bool = False
    # Blocks that may be ahead of the reader.
    window: int = FEWEST_AHEAD
    # Guesses that are not read yet, by key, in the order in which they will be read.
    ahead: "dict[bytes, Guess]" = field(default_factory=dict)
    bytes_ahead: int = 0
    # The longest window, since more was evicted before it was read; guesses below this number tell no more about that.
    longest: int = MOST_AHEAD
    learned: int = 0
    # Misses of the snapshot (see Credit) when it was last seen.
    misses: int = 0
    # Somebody looks which blocks come next.
    looking: bool = False
    # Nothing more is guessed until its reader gets to `at`; and why: there the directory ends, or all.
    blocked: bool = False
    ended: bool = False
    # Its reader has gone on from the end of one directory to the next.
    crosses: bool = False
    # Blocks guessed so far; the number of the last one that was seen to be read.
    count: int = 0
    head: int = -1
    right: int = 0
    wrong: int = 0
    # Higher where guesses were right of late, lower where they were wrong.
    trust: int = 0
    # Ids of the mounts through which it reads, of those that pages can be pushed to.
    mounts: list[str] = field(default_factory=list)

    @property
    def rule(self) -> Rule:
        """For the counts of what was guessed."""
        return Rule(self.way.value)

    @property
    def wants(self) -> int:
        """Blocks to be looked for now. They are looked for many at a time."""
        if self.looking or self.blocked or self.bytes_ahead >= MOST_BYTES_AHEAD or 2 * len(self.ahead) > self.window:
            return 0
        return self.window - len(self.ahead)

    @property
    def is_first_of_entry(self) -> bool:
        """Is what it guesses next the second block of a file whose first one was read?"""
        return self.is_entry and self.count == 0

    @property
    def is_idle_entry(self) -> bool:
        """Was it begun by a single read, and is nothing that it has guessed still to be read?"""
        return self.is_entry and not self.ahead

    @property
    def is_over(self) -> bool:
        """Has it come to the end of the one file that it was begun for? Others need its place."""
        return self.is_idle_entry and self.ended

    @property
    def is_trusted(self) -> bool:
        return self.right >= _TRUSTED and self.right >= 4 * self.wrong

    def shows(self, index: int) -> bool:
        """Is the block that was guessed as number *index* not to be pushed, so that the reader is seen there?"""
        return index % max(2, min(_MOST_PUSHED, self.window // 8)) == 0

    def read_through(self, mount: str) -> None:
        if mount and mount not in self.mounts and len(self.mounts) < _MOST_MOUNTS:
            self.mounts.append(mount)

    def grow(self) -> None:
        self.right += 1
        self.trust = min(_MOST_TRUST, self.trust + 1)
        self.window = min(self.longest, self.window + 1)

    @property
    def has_failed(self) -> bool:
        """Were more than a third of its guesses wrong, for a while?"""
        return self.trust <= -_MOST_TRUST

    def shrink(self) -> None:
        self.wrong += 1
        self.trust -= 2
        self.window = min(self.window, max(FEWEST_AHEAD, self.window // 2))

    def lost(self, index: int) -> None:
        """The block that was guessed as number *index* was evicted before it was read, and so may be all that are
        ahead now."""
        if index >= self.learned:
            self.learned = self.count
            self.longest = max(FEWEST_AHEAD, len(self.ahead) // 2)
            self.window = min(self.window, self.longest)

    def is_lost(self, credit: Credit) -> bool:
        """Was so much else read since it was last seen that it is chance when its guesses are read?"""
        few = min(_FEW_MISSES, max(_FEWEST_MISSES, credit.files // 16))
        return credit.misses - self.misses > (_MOST_MISSES if self.is_trusted else few)

    def passed(self) -> "list[tuple[Guess, bool]]":
        """Guesses that the reader has passed, each with whether it was right: pushed blocks are read unseen."""
        found: list[tuple[Guess, bool]] = []
        for guess in self.ahead.values():
            if guess.index < self.head and guess.pushed:
                found.append((guess, True))
            elif guess.index < self.head - _PASSED:
                found.append((guess, False))
            else:
                break
        return found


@dataclass(slots=True, eq=False)
class Guess:
    """A block that is fetched since a stream seems to come to it."""

    stream: Stream
    name: Name
    key: bytes
    size: int
    # Its number among all guesses of the stream.
    index: int
    # It is on the node; it is in a page cache, so nobody sees it read.
    landed: bool = False
    pushed: bool = False

    @property
    def is_of_entry(self) -> bool:
        """Was it guessed since the first block of its file was read?"""
        return self.stream.is_entry and self.index == 0
