"""Streams: readers that seem to go through a snapshot in an order, and the blocks fetched ahead of each on a guess."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cachefs.planning.prefetch.readahead_budget import ReadaheadBudget, ReadaheadRule

# Blocks that a stream has ahead of its reader, at first and at most; and most bytes.
MIN_BLOCKS_AHEAD: Final = 4
MAX_BLOCKS_AHEAD: Final = 512
MAX_BYTES_AHEAD: Final = 32 << 20
# Blocks by which a reader must have passed a guess for it to count as wrong. Until then another process may read it,
# where several share one order: 8 workers with batches of 32.
_PASSED_BLOCKS: Final = 256
# The blocks of a stream are pushed after this many right guesses, if these are also four times as many as the wrong
# ones.
_TRUSTED_BLOCKS: Final = 8
_MAX_TRUST: Final = 16
# Misses of other readers between two reads of a trusted stream beyond which it is lost. For other streams the limit is
# lower: a random reader of 2,000 files meets one of 4 guesses after 500 reads.
_MAX_MISSES: Final = 2048
_MAX_MISSES_UNTRUSTED: Final = 64
_MIN_MISSES_UNTRUSTED: Final = 16
# Every 16th block is not pushed, so that its reader is seen; with short windows, more of them.
_MAX_PUSHED_IN_A_ROW: Final = 16
# Most mounts that one stream's blocks are pushed to.
_MAX_MOUNTS: Final = 4

FileBlockName = tuple[str, int, int]  # snapshot, entry of the file, number of the block in the file


class StreamOrder(StrEnum):
    """The order of a stream."""

    LISTING = "listing"  # files in the order of the listing: from the first block of one file to that of the next
    PASS = "pass"  # the order of earlier reads
    FILE = "file"  # through one file, in steps of equal length


@dataclass(slots=True, eq=False)
class ReadStream:
    """A reader, or several, that read in an order; and how right the guesses were."""

    order: StreamOrder
    snapshot: str
    # The last block that was guessed or read: its entry (LISTING), its position in the log (PASS), its number (FILE).
    position: int
    # Time of the last read, in seconds.
    last_read_at: float
    # FILE: the entry of the file, and the distance between blocks that are read.
    entry: int = 0
    step: int = 1
    # Whether the stream was begun by the first block of its file alone.
    is_entry: bool = False
    # Blocks that may be ahead of the reader.
    window: int = MIN_BLOCKS_AHEAD
    # Unread guesses, by key, in the expected order of reads.
    ahead: "dict[bytes, StreamBlock]" = field(default_factory=dict)
    bytes_ahead: int = 0
    # Longest window, reduced when blocks were evicted before they were read; guesses below number `learned` reduce it
    # no more.
    max_window: int = MAX_BLOCKS_AHEAD
    learned: int = 0
    # Misses of the snapshot (see ReadaheadBudget) at the last read.
    misses: int = 0
    # Whether a search for the next blocks is under way.
    is_searching: bool = False
    # Whether guessing stops until the reader gets to `position`; and whether it stops because the directory, or the
    # order, ends.
    is_blocked: bool = False
    has_ended: bool = False
    # Whether the reader has gone on from the end of one directory to the next.
    crosses_directories: bool = False
    # Blocks guessed so far; number of the last one that was read.
    count: int = 0
    head: int = -1
    right: int = 0
    wrong: int = 0
    # Raised by right guesses, lowered by wrong ones.
    trust: int = 0
    # Ids of the mounts with a pusher that the stream reads through.
    mounts: list[str] = field(default_factory=list)

    @property
    def rule(self) -> ReadaheadRule:
        """The rule under which its guesses are counted."""
        return ReadaheadRule(self.order.value)

    @property
    def wanted_blocks(self) -> int:
        """Number of blocks to search for now. Searches are batched."""
        if (
            self.is_searching
            or self.is_blocked
            or self.bytes_ahead >= MAX_BYTES_AHEAD
            or 2 * len(self.ahead) > self.window
        ):
            return 0
        return self.window - len(self.ahead)

    @property
    def is_first_of_entry(self) -> bool:
        """True where its next guess is the second block of a file whose first block was read."""
        return self.is_entry and self.count == 0

    @property
    def is_idle_entry(self) -> bool:
        """True where it was begun by a single read, and has no unread guess."""
        return self.is_entry and not self.ahead

    @property
    def is_over(self) -> bool:
        """True at the end of the one file that it was begun for; it then makes room for others."""
        return self.is_idle_entry and self.has_ended

    @property
    def is_trusted(self) -> bool:
        return self.right >= _TRUSTED_BLOCKS and self.right >= 4 * self.wrong

    def is_left_out_of_push(self, index: int) -> bool:
        """Return whether guess number *index* must not be pushed, so that its reader is seen."""
        return index % max(2, min(_MAX_PUSHED_IN_A_ROW, self.window // 8)) == 0

    def note_mount(self, mount: str) -> None:
        if mount and mount not in self.mounts and len(self.mounts) < _MAX_MOUNTS:
            self.mounts.append(mount)

    def note_right(self) -> None:
        self.right += 1
        self.trust = min(_MAX_TRUST, self.trust + 1)
        self.window = min(self.max_window, self.window + 1)

    @property
    def has_failed(self) -> bool:
        """True where more than a third of its recent guesses were wrong."""
        return self.trust <= -_MAX_TRUST

    def note_wrong(self) -> None:
        self.wrong += 1
        self.trust -= 2
        self.window = min(self.window, max(MIN_BLOCKS_AHEAD, self.window // 2))

    def note_evicted(self, index: int) -> None:
        """Record that guess number *index* was evicted before it was read, and shorten the window: the other guesses
        may be evicted too."""
        if index >= self.learned:
            self.learned = self.count
            self.max_window = max(MIN_BLOCKS_AHEAD, len(self.ahead) // 2)
            self.window = min(self.window, self.max_window)

    def is_lost(self, credit: ReadaheadBudget) -> bool:
        """Return whether so much else was read since the last read that further reads of its guesses would be
        chance."""
        few = min(_MAX_MISSES_UNTRUSTED, max(_MIN_MISSES_UNTRUSTED, credit.files // 16))
        return credit.misses - self.misses > (_MAX_MISSES if self.is_trusted else few)

    def passed_blocks(self) -> "list[tuple[StreamBlock, bool]]":
        """Return the guesses that the reader has passed, each with whether it was right: reads of pushed blocks are not
        seen."""
        found: list[tuple[StreamBlock, bool]] = []
        for guess in self.ahead.values():
            if guess.index < self.head and guess.is_pushed:
                found.append((guess, True))
            elif guess.index < self.head - _PASSED_BLOCKS:
                found.append((guess, False))
            else:
                break
        return found


@dataclass(slots=True, eq=False)
class StreamBlock:
    """A block that is fetched because a stream is expected to reach it."""

    stream: ReadStream
    name: FileBlockName
    key: bytes
    size: int
    # Its number among all guesses of the stream.
    index: int
    # Whether it is on the node; whether it is in a page cache, where reads are not seen.
    has_landed: bool = False
    is_pushed: bool = False

    @property
    def is_of_entry(self) -> bool:
        """True where it was guessed after a read of the first block of its file."""
        return self.stream.is_entry and self.index == 0
