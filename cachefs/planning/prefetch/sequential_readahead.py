"""Readahead without a published sequence: follows readers that go through a snapshot in an order.

Readers that wait for blocks reveal their positions. Where some of these follow each other in an order (see
`StreamOrder`), they form a *stream*. A few blocks ahead of the stream are fetched. Each guess that is read widens the
window by one block, so that the window doubles with every round trip; each wrong guess halves it. The cost in bytes is
bounded by the credit of each snapshot, and memory by the constants below, whatever is read by however many readers.

Only reads that reach the daemon count: those of blocks that are not on the node, and of guessed blocks. The cost is 7
us per miss, and 0.2 us per read that a mount reports.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.planning.prefetch.readahead_budget import ReadaheadBudget, ReadaheadCounters, RuleCounts
from cachefs.planning.prefetch.repeated_order import RepeatedOrder
from cachefs.planning.prefetch.streams import MAX_BYTES_AHEAD, FileBlockName, ReadStream, StreamBlock, StreamOrder

# Reads in order that make a stream; within one file in steps of one block, and in other steps.
_MIN_READS: Final = 4
_MIN_READS_IN_FILE: Final = 2
_MIN_READS_IN_STEPS: Final = 4
# Most entries between two reads of a stream: directories have numbers too, and so have files that are on the node
# already. Before there is a stream the limit is lower: in a snapshot of 2,000 files, each read of a random reader is
# within 8 entries of one of the last 256.
_MAX_GAP: Final = 8
_MAX_FIRST_GAP: Final = 2
# Most remembered positions at which streams may begin; most streams; seconds without a read after which a stream is
# forgotten, and the same where others lack room; most snapshots with a remembered credit, and with a remembered order
# of reads.
MAX_RUNS: Final = 64
# Other reads that may come between two reads in a row where a snapshot has few files, so that a sequence is no chance.
_MIN_RECENT_MISSES: Final = 8
MAX_STREAMS: Final = 64
IDLE_SECONDS: Final = 20.0
_SHORT_OF_ROOM_SECONDS: Final = 0.5
_MAX_SNAPSHOTS: Final = 256
_MAX_REPEATED_ORDERS: Final = 8

# Blocks that one search examines.
MAX_EXAMINED: Final = 256

# Most large files of a snapshot whose second block was guessed after a read of the first, and in which no reader has
# gone on; one more for each file in which one has, up to _MAX_MORE_BEGUN_FILES.
MAX_BEGUN_FILES: Final = 4
_MAX_MORE_BEGUN_FILES: Final = 12

# Position of a stream or run: the order, the snapshot, and the entry (FILE, LISTING) or the position in the log (PASS).
_StreamPosition = tuple[StreamOrder, str, int]


@dataclass(slots=True, eq=False)
class _ReadRun:
    """Reads that may become a stream."""

    reads: int = 1
    # Misses of the snapshot (see ReadaheadBudget) at the last read.
    misses: int = 0
    # FILE: number of the last block, and its distance from the one before.
    number: int = 0
    step: int = 0


@dataclass(slots=True)
class _BegunFiles:
    """Counts the files of a snapshot whose second block was guessed after a reader began them, and those among them in
    which a reader has gone on."""

    files: int = 0
    continued: int = 0

    @property
    def is_enough(self) -> bool:
        return self.files - self.continued >= MAX_BEGUN_FILES + min(self.continued, _MAX_MORE_BEGUN_FILES)


@dataclass(frozen=True, slots=True, eq=False)
class StreamSearch:
    """A search for the next blocks of a stream that are not on the node."""

    stream: ReadStream
    # Limits: most blocks, and most bytes. The search also ends after MAX_EXAMINED blocks.
    max_blocks: int
    max_bytes: int
    # Begin after this position (see `ReadStream.position`).
    after: int
    # LISTING: whether to go on into other directories.
    crosses_directories: bool
    # PASS, FILE: the blocks to examine, (entry, number) each.
    blocks: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MissingBlock:
    """A block that is not on the node."""

    entry: int
    number: int
    key: bytes
    size: int
    # `StreamSearchResult.reached` of a search that ended here.
    reached: int


@dataclass(frozen=True, slots=True)
class StreamSearchResult:
    """The result of a search."""

    missing: Sequence[MissingBlock]
    # Number of the `blocks` that were examined; LISTING: the last examined entry.
    reached: int
    # Whether the order, or the directory, ends there.
    has_ended: bool


class SequentialReadahead:
    """Decides which blocks to guess. Times are monotonic seconds."""

    def __init__(self, counters: ReadaheadCounters | None = None) -> None:
        """counters: the counters to use; None: new ones."""
        self._counters = counters or ReadaheadCounters()
        self.bytes_ahead = 0  # of all unread guesses
        self._by_key: dict[bytes, StreamBlock] = {}  # the unread guesses
        self._by_name: dict[FileBlockName, StreamBlock] = {}  # the same
        self._streams: dict[ReadStream, None] = {}  # least recently begun first
        self._positions: OrderedDict[_StreamPosition, _ReadRun | ReadStream] = (
            OrderedDict()
        )  # by position, least recent first
        self._budgets: OrderedDict[str, ReadaheadBudget] = OrderedDict()  # by snapshot, least recent first
        self._repeated_orders: OrderedDict[str, RepeatedOrder] = OrderedDict()  # by snapshot, least recent first
        self._begun_files: OrderedDict[str, _BegunFiles] = OrderedDict()  # by snapshot, least recent first
        self._continued: list[StreamBlock] = []  # second blocks of files, guessed and read

    @property
    def counts(self) -> RuleCounts:
        """The counts of all guesses since the start."""
        return self._counters.total

    @property
    def streams(self) -> int:
        """The number of streams."""
        return len(self._streams)

    # --- what is read ---------------------------------------------------------------------------------------------

    def note_miss(self, name: FileBlockName, size: int, files: int, now: float) -> bool:
        """Record that a reader waits for a block of *size* bytes (0 where it is on the node by now). Returns whether a
        call of `next_searches` is due. files: number of files in the snapshot."""
        guess = self._by_name.get(name)
        if guess is not None:
            if guess.has_landed and size:
                self._note_evicted(guess)
            else:
                self._note_read(guess, now)
            return True
        snapshot, entry, number = name
        credit = self._budget(snapshot)
        credit.files = files
        credit.note_miss(size)
        log = self._repeated_order(snapshot)
        before = log.last_position(entry, number)
        positions: list[tuple[StreamOrder, int]] = [] if before is None else [(StreamOrder.PASS, before)]
        if number == 0:
            positions.insert(0, (StreamOrder.LISTING, entry))
        if self._continue_stream(snapshot, positions, now) or self._follow_in_file(snapshot, entry, number, now):
            return True
        begun = [order for order, at in positions if self._try_begin_stream(order, snapshot, at, now)]
        if StreamOrder.PASS not in begun:
            log.append_read(entry, number)
        return bool(begun)

    def note_file_begun(self, snapshot: str, entry: int, now: float) -> bool:
        """Record that a reader has waited for the first of several blocks of a file, and has got it. Returns whether to
        search for the next block: most readers that begin a large file go through it."""
        position = (StreamOrder.FILE, snapshot, entry)
        if isinstance(self._positions.get(position), ReadStream) or self._begun_files_of(snapshot).is_enough:
            return False
        self._begin_stream(
            position, ReadStream(StreamOrder.FILE, snapshot, 0, now, entry=entry, window=1, is_entry=True)
        )
        return True

    def take_continued(self) -> list[StreamBlock]:
        """Return the second blocks of files that were guessed and read since the last call. Without the guess, their
        readers would have waited, and been evidence for other rules."""
        gone_on, self._continued = self._continued, []
        return gone_on

    def _begun_files_of(self, snapshot: str) -> _BegunFiles:
        counts = self._begun_files.setdefault(snapshot, _BegunFiles())
        self._begun_files.move_to_end(snapshot)
        if len(self._begun_files) > _MAX_SNAPSHOTS:
            self._begun_files.popitem(last=False)
        return counts

    def note_reads(self, keys: Iterable[bytes], mount: str, now: float) -> bool:
        """Record reads of blocks through a mount (empty: one without a pusher). Returns whether some were guessed."""
        if not self._by_key:
            return False
        found = [guess for guess in map(self._by_key.get, keys) if guess is not None]
        for guess in found:
            if guess.key in self._by_key:
                guess.stream.note_mount(mount)
                self._note_read(guess, now)
        return bool(found)

    def _follow_in_file(self, snapshot: str, entry: int, number: int, now: float) -> bool:
        """Continue or begin a stream within the file of a block that was read. Returns whether there is one."""
        position = (StreamOrder.FILE, snapshot, entry)
        head = self._positions.pop(position, None)
        if isinstance(head, ReadStream):
            self._positions[position] = head
            if number > head.position and (number - head.position) % head.step == 0:
                is_near = number - head.position <= _MAX_GAP * head.step
                self._note_caught_up(head, number, now)
                return is_near  # a distant read is no evidence of an order: it may be a random one
            return False
        if head is None or number <= head.number:
            if number > 0:  # most files have one block
                self._remember_run(position, _ReadRun(number=number))
            return False
        step = number - head.number
        reads = head.reads + 1 if step == head.step or head.reads == 1 else 2
        if reads >= (_MIN_READS_IN_FILE if step == 1 else _MIN_READS_IN_STEPS):
            self._begin_stream(position, ReadStream(StreamOrder.FILE, snapshot, number, now, entry=entry, step=step))
            return True
        self._remember_run(position, _ReadRun(reads, number=number, step=step))
        return False

    def _continue_stream(self, snapshot: str, positions: Iterable[tuple[StreamOrder, int]], now: float) -> bool:
        """Continue a stream at a block that was read. positions: its positions in orders. Returns whether there is
        one."""
        for order, at in positions:
            for behind in range(1, _MAX_GAP + 1):
                head = self._positions.get((order, snapshot, at - behind))
                if isinstance(head, ReadStream):
                    del self._positions[order, snapshot, at - behind]
                    self._positions[order, snapshot, at] = head
                    self._note_caught_up(head, at, now)
                    return True
        return False

    def _try_begin_stream(self, order: StreamOrder, snapshot: str, at: int, now: float) -> bool:
        """Begin a stream at a block that was read, if enough reads precede it. Returns whether a stream begins."""
        credit = self._budget(snapshot)
        recent = min(MAX_RUNS, max(_MIN_RECENT_MISSES, credit.files // MAX_RUNS))
        reads = 1
        for behind in range(1, _MAX_FIRST_GAP + 1):
            head = self._positions.get((order, snapshot, at - behind))
            if isinstance(head, _ReadRun) and credit.misses - head.misses <= recent:
                del self._positions[order, snapshot, at - behind]
                reads = head.reads + 1
                break
        if reads >= _MIN_READS:
            self._begin_stream((order, snapshot, at), ReadStream(order, snapshot, at, now))
            return True
        self._remember_run((order, snapshot, at), _ReadRun(reads, credit.misses))
        return False

    # --- streams --------------------------------------------------------------------------------------------------

    def _remember_run(self, position: _StreamPosition, run: _ReadRun) -> None:
        if isinstance(self._positions.get(position), ReadStream):
            return
        self._positions[position] = run
        if len(self._positions) > MAX_RUNS + len(self._streams):
            del self._positions[next(key for key, head in self._positions.items() if isinstance(head, _ReadRun))]

    def _begin_stream(self, position: _StreamPosition, stream: ReadStream) -> None:
        if len(self._streams) >= MAX_STREAMS:
            self._end_stream(min(self._streams, key=lambda one: (not one.is_idle_entry, one.last_read_at)))
        self._streams[stream] = None
        self._note_seen(stream, stream.last_read_at)
        former = self._positions.get(position)
        if isinstance(former, ReadStream):
            self._end_stream(former)
        self._positions[position] = stream

    def _note_caught_up(self, stream: ReadStream, at: int, now: float) -> None:
        """Widen the window of a stream whose reader has reached the end of the guesses, or passed it."""
        stream.position = max(stream.position, at)
        self._note_seen(stream, now)
        stream.window = min(stream.max_window, stream.window + len(stream.ahead))
        stream.crosses_directories = stream.crosses_directories or stream.has_ended
        stream.is_blocked = stream.has_ended = False

    def _note_seen(self, stream: ReadStream, now: float) -> None:
        stream.last_read_at, stream.misses = now, self._budget(stream.snapshot).misses

    def _end_stream(self, stream: ReadStream) -> None:
        for guess in list(stream.ahead.values()):
            self._count_wrong(guess)
        self._streams.pop(stream, None)
        position = self._position_of(stream)
        if self._positions.get(position) is stream:
            del self._positions[position]

    @staticmethod
    def _position_of(stream: ReadStream) -> _StreamPosition:
        return stream.order, stream.snapshot, stream.entry if stream.order is StreamOrder.FILE else stream.position

    def end_idle_streams(self, now: float) -> None:
        """Forget streams without recent reads. To be called about once a second, while there are streams."""
        for stream in [one for one in self._streams if now - one.last_read_at > IDLE_SECONDS]:
            self._end_stream(stream)

    # --- guesses --------------------------------------------------------------------------------------------------

    def next_searches(self, max_unread_bytes: int, max_blocks: int, now: float) -> list[StreamSearch]:
        """Return the searches to make, each of which must be followed by `choose_blocks`. max_unread_bytes: most bytes
        of all unread guesses; max_blocks: blocks."""
        self._end_lost_streams(max_unread_bytes, now)
        found = []
        for stream in self._streams:
            count = min(stream.wanted_blocks, max_blocks)
            size = int(min(self._budget(stream.snapshot).remaining, MAX_BYTES_AHEAD - stream.bytes_ahead))
            size = min(size, max_unread_bytes - self.bytes_ahead)
            if count <= 0 or size <= 0:
                continue
            stream.is_searching = True
            max_blocks -= count
            blocks: Sequence[tuple[int, int]] = ()
            if stream.order is StreamOrder.PASS:
                log = self._repeated_orders.get(stream.snapshot)
                blocks = log.reads_after(stream.position, MAX_EXAMINED) if log is not None else ()
            elif stream.order is StreamOrder.FILE:
                numbers = range(
                    stream.position + stream.step, stream.position + (MAX_EXAMINED + 1) * stream.step, stream.step
                )
                blocks = [(stream.entry, number) for number in numbers]
            found.append(StreamSearch(stream, count, size, stream.position, stream.crosses_directories, blocks))
        return found

    def _end_lost_streams(self, room: int, now: float) -> None:
        """End lost streams, and late ones where room is short."""
        for stream in list(self._streams):
            is_late = self.bytes_ahead >= room and now - stream.last_read_at > _SHORT_OF_ROOM_SECONDS
            if is_late or stream.is_lost(self._budget(stream.snapshot)):
                self._end_stream(stream)

    def choose_blocks(self, search: StreamSearch, found: StreamSearchResult) -> list[StreamBlock]:
        """Return the blocks to fetch among those *found*. Each must be followed by one call of `note_landed` or
        `note_undone`."""
        stream = search.stream
        stream.is_searching = False
        if stream not in self._streams:
            return []
        if stream.is_first_of_entry and self._begun_files_of(stream.snapshot).is_enough:
            self._end_stream(stream)
            return []
        guesses: list[StreamBlock] = []
        credit = self._budget(stream.snapshot)
        for count, one in enumerate(found.missing):
            if credit.remaining <= 0:  # taken by other streams of the snapshot in the meantime
                found = StreamSearchResult(
                    found.missing[:count], found.missing[count - 1].reached if count else 0, has_ended=False
                )
                break
            name = (stream.snapshot, one.entry, one.number)
            if name not in self._by_name and one.key not in self._by_key:  # snapshots may share keys
                guesses.append(self._add_block(stream, name, one))
        reached = found.reached if stream.order is StreamOrder.LISTING else search.after + found.reached * stream.step
        self._advance_stream(stream, reached, found)
        return guesses

    def _advance_stream(self, stream: ReadStream, reached: int, found: StreamSearchResult) -> None:
        """Advance a stream to the end of its search. The reader may already be further."""
        position = self._position_of(stream)
        stream.position = max(stream.position, reached)
        stream.has_ended = found.has_ended
        stream.is_blocked = found.has_ended or not found.missing  # all blocks nearby are here: nothing to gain
        if self._positions.get(position) is stream:
            del self._positions[position]
        self._positions[self._position_of(stream)] = stream
        if stream.is_over:
            self._end_stream(stream)

    def _add_block(self, stream: ReadStream, name: FileBlockName, one: MissingBlock) -> StreamBlock:
        guess = StreamBlock(stream, name, one.key, one.size, stream.count)
        if stream.is_first_of_entry:
            self._begun_files_of(stream.snapshot).files += 1
            self._budget(stream.snapshot).refund(one.size)  # MAX_BEGUN_FILES bounds what these cost
        stream.count += 1
        stream.ahead[one.key] = self._by_key[one.key] = self._by_name[name] = guess
        stream.bytes_ahead += one.size
        self.bytes_ahead += one.size
        self._budget(stream.snapshot).spend(one.size)
        self._counters.note_fetched(stream.snapshot, stream.rule, one.size)
        return guess

    def note_landed(self, guess: StreamBlock) -> Sequence[str]:
        """Record that the block is on the node. Returns the ids of the mounts to push it to."""
        stream = guess.stream
        guess.has_landed = True
        if self._by_key.get(guess.key) is not guess or not stream.is_trusted or stream.is_left_out_of_push(guess.index):
            return ()
        guess.is_pushed = bool(stream.mounts)
        return stream.mounts

    def note_undone(self, guess: StreamBlock) -> None:
        """Record that the block could not be fetched, or no tier took it."""
        if self._by_key.get(guess.key) is guess:
            self._remove_block(guess)
            self._counters.note_undone(guess.stream.snapshot, guess.stream.rule, guess.size)
            self._budget(guess.stream.snapshot).refund(guess.size)
            if guess.is_of_entry:
                self._begun_files_of(guess.stream.snapshot).files -= 1
            guess.stream.is_blocked = True

    def _note_evicted(self, guess: StreamBlock) -> None:
        """Record that the block was evicted before it was read: too much was fetched ahead."""
        if guess.is_of_entry:
            self._begun_files_of(guess.stream.snapshot).continued += 1
        self._remove_block(guess)
        self._counters.note_wrong(guess.stream.snapshot, guess.stream.rule, guess.size)
        guess.stream.note_evicted(guess.index)

    def _note_read(self, guess: StreamBlock, now: float) -> None:
        stream = guess.stream
        if stream.is_lost(self._budget(stream.snapshot)):
            self._end_stream(stream)
            return
        self._note_seen(stream, now)
        stream.head = max(stream.head, guess.index)
        self._count_right(guess)
        if stream.order is not StreamOrder.PASS:
            self._repeated_order(stream.snapshot).append_read(guess.name[1], guess.name[2])
        for passed, right in stream.passed_blocks():
            if right:
                self._count_right(passed)
            else:
                self._count_wrong(passed)
        if stream.has_failed or stream.is_over:
            self._end_stream(stream)

    def _count_right(self, guess: StreamBlock) -> None:
        self._remove_block(guess)
        self._counters.note_right(guess.stream.snapshot, guess.stream.rule, guess.size)
        self._budget(guess.stream.snapshot).note_hit(guess.size)
        if guess.is_of_entry:
            self._begun_files_of(guess.stream.snapshot).continued += 1
            self._continued.append(guess)
        guess.stream.note_right()

    def _count_wrong(self, guess: StreamBlock) -> None:
        self._remove_block(guess)
        self._counters.note_wrong(guess.stream.snapshot, guess.stream.rule, guess.size)
        guess.stream.note_wrong()

    def _remove_block(self, guess: StreamBlock) -> None:
        del self._by_key[guess.key], self._by_name[guess.name], guess.stream.ahead[guess.key]
        guess.stream.bytes_ahead -= guess.size
        self.bytes_ahead -= guess.size

    def _repeated_order(self, snapshot: str) -> RepeatedOrder:
        log = self._repeated_orders.get(snapshot)
        if log is None:
            log = self._repeated_orders[snapshot] = RepeatedOrder()
            if len(self._repeated_orders) > _MAX_REPEATED_ORDERS:
                self._repeated_orders.popitem(last=False)
        self._repeated_orders.move_to_end(snapshot)
        return log

    def _budget(self, snapshot: str) -> ReadaheadBudget:
        credit = self._budgets.get(snapshot)
        if credit is None:
            credit = self._budgets[snapshot] = ReadaheadBudget()
            if len(self._budgets) > _MAX_SNAPSHOTS:
                self._budgets.popitem(last=False)
        self._budgets.move_to_end(snapshot)
        return credit
