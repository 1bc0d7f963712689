"""Readahead without a published sequence: follows readers that go through a snapshot in an order.

Readers that wait for blocks reveal their positions. Where some of these follow each other in an order (see `Way`), they
form a *stream*. A few blocks ahead of the stream are fetched. Each guess that is read widens the window by one block,
so that the window doubles with every round trip; each wrong guess halves it. The cost in bytes is bounded by the credit
of each snapshot, and memory by the constants below, whatever is read by however many readers.

Only reads that reach the daemon count: those of blocks that are not on the node, and of guessed blocks. The cost is 7
us per miss, and 0.2 us per read that a mount reports.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.planning.prefetch.credit import Credit
from cachefs.planning.prefetch.earlier_pass import EarlierPass
from cachefs.planning.prefetch.guess_counts import GuessBook, Guesses
from cachefs.planning.prefetch.streams import MOST_BYTES_AHEAD, Guess, Name, Stream, Way

# Reads in order that make a stream; within one file in steps of one block, and in other steps.
_BEGIN: Final = 4
_BEGIN_IN_FILE: Final = 2
_BEGIN_IN_STEPS: Final = 4
# Most entries between two reads of a stream: directories have numbers too, and so have files that are on the node
# already. Before there is a stream the limit is lower: in a snapshot of 2,000 files, each read of a random reader is
# within 8 entries of one of the last 256.
_GAP: Final = 8
_FIRST_GAP: Final = 2
# Most remembered positions at which streams may begin; most streams; seconds without a read after which a stream is
# forgotten, and the same where others lack room; most snapshots with a remembered credit, and with a remembered order
# of reads.
MOST_PLACES: Final = 64
# Other reads that may come between two reads in a row where a snapshot has few files, so that a sequence is no chance.
_FEWEST_PLACES: Final = 8
MOST_STREAMS: Final = 64
IDLE_SECONDS: Final = 20.0
_SHORT_OF_ROOM_SECONDS: Final = 0.5
_MOST_SNAPSHOTS: Final = 256
_MOST_PASSES: Final = 8

# Blocks that one search examines.
LOOKED_AT: Final = 256

# Most large files of a snapshot whose second block was guessed after a read of the first, and in which no reader has
# gone on; one more for each file in which one has, up to _MOST_MORE.
MOST_ENTERED: Final = 4
_MOST_MORE: Final = 12

# Position of a stream or run: the order, the snapshot, and the entry (FILE, LISTING) or the position in the log (PASS).
_Place = tuple[Way, str, int]


@dataclass(slots=True, eq=False)
class _Run:
    """Reads that may become a stream."""

    reads: int = 1
    # Misses of the snapshot (see Credit) at the last read.
    misses: int = 0
    # FILE: number of the last block, and its distance from the one before.
    number: int = 0
    step: int = 0


@dataclass(slots=True)
class _Entered:
    """Counts the files of a snapshot whose second block was guessed after a reader began them, and those among them in
    which a reader has gone on."""

    files: int = 0
    gone_on: int = 0

    @property
    def is_enough(self) -> bool:
        return self.files - self.gone_on >= MOST_ENTERED + min(self.gone_on, _MOST_MORE)


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """A search for the next blocks of a stream that are not on the node."""

    stream: Stream
    # Limits: most blocks, and most bytes. The search also ends after LOOKED_AT blocks.
    count: int
    size: int
    # Begin after this position (see `Stream.at`).
    after: int
    # LISTING: whether to go on into other directories.
    crosses: bool
    # PASS, FILE: the blocks to examine, (entry, number) each.
    blocks: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Missing:
    """A block that is not on the node."""

    entry: int
    number: int
    key: bytes
    size: int
    # `Found.reached` of a search that ended here.
    reached: int


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    missing: Sequence[Missing]
    # Number of the `blocks` that were examined; LISTING: the last examined entry.
    reached: int
    # Whether the order, or the directory, ends there.
    ended: bool


class Guessing:
    """Decides which blocks to guess. Times are monotonic seconds."""

    def __init__(self, book: GuessBook | None = None) -> None:
        """book: the counters to use; None: new ones."""
        self._book = book or GuessBook()
        self.bytes_ahead = 0  # of all unread guesses
        self._by_key: dict[bytes, Guess] = {}  # the unread guesses
        self._by_name: dict[Name, Guess] = {}  # the same
        self._streams: dict[Stream, None] = {}  # least recently begun first
        self._places: OrderedDict[_Place, _Run | Stream] = OrderedDict()  # by position, least recent first
        self._credits: OrderedDict[str, Credit] = OrderedDict()  # by snapshot, least recent first
        self._passes: OrderedDict[str, EarlierPass] = OrderedDict()  # by snapshot, least recent first
        self._entered: OrderedDict[str, _Entered] = OrderedDict()  # by snapshot, least recent first
        self._gone_on: list[Guess] = []  # second blocks of files, guessed and read

    @property
    def counts(self) -> Guesses:
        """The counts of all guesses since the start."""
        return self._book.total

    @property
    def streams(self) -> int:
        """The number of streams."""
        return len(self._streams)

    # --- what is read ---------------------------------------------------------------------------------------------

    def missed(self, name: Name, size: int, files: int, now: float) -> bool:
        """Record that a reader waits for a block of *size* bytes (0 where it is on the node by now). Returns whether a
        `search` is due. files: number of files in the snapshot."""
        guess = self._by_name.get(name)
        if guess is not None:
            if guess.landed and size:
                self._lost(guess)
            else:
                self._read(guess, now)
            return True
        snapshot, entry, number = name
        credit = self._credit(snapshot)
        credit.files = files
        credit.demanded(size)
        log = self._pass(snapshot)
        before = log.place(entry, number)
        places: list[tuple[Way, int]] = [] if before is None else [(Way.PASS, before)]
        if number == 0:
            places.insert(0, (Way.LISTING, entry))
        if self._follows(snapshot, places, now) or self._read_in_file(snapshot, entry, number, now):
            return True
        begun = [way for way, at in places if self._may_follow(way, snapshot, at, now)]
        if Way.PASS not in begun:
            log.note(entry, number)
        return bool(begun)

    def entered(self, snapshot: str, entry: int, now: float) -> bool:
        """Record that a reader has waited for the first of several blocks of a file, and has got it. Returns whether to
        search for the next block: most readers that begin a large file go through it."""
        place = (Way.FILE, snapshot, entry)
        if isinstance(self._places.get(place), Stream) or self._entered_of(snapshot).is_enough:
            return False
        self._begin(place, Stream(Way.FILE, snapshot, 0, now, entry=entry, window=1, is_entry=True))
        return True

    def take_gone_on(self) -> list[Guess]:
        """Return the second blocks of files that were guessed and read since the last call. Without the guess, their
        readers would have waited, and been evidence for other rules."""
        gone_on, self._gone_on = self._gone_on, []
        return gone_on

    def _entered_of(self, snapshot: str) -> _Entered:
        counts = self._entered.setdefault(snapshot, _Entered())
        self._entered.move_to_end(snapshot)
        if len(self._entered) > _MOST_SNAPSHOTS:
            self._entered.popitem(last=False)
        return counts

    def seen(self, keys: Iterable[bytes], mount: str, now: float) -> bool:
        """Record reads of blocks through a mount (empty: one without a pusher). Returns whether some were guessed."""
        if not self._by_key:
            return False
        found = [guess for guess in map(self._by_key.get, keys) if guess is not None]
        for guess in found:
            if guess.key in self._by_key:
                guess.stream.read_through(mount)
                self._read(guess, now)
        return bool(found)

    def _read_in_file(self, snapshot: str, entry: int, number: int, now: float) -> bool:
        """Continue or begin a stream within the file of a block that was read. Returns whether there is one."""
        place = (Way.FILE, snapshot, entry)
        head = self._places.pop(place, None)
        if isinstance(head, Stream):
            self._places[place] = head
            if number > head.at and (number - head.at) % head.step == 0:
                is_near = number - head.at <= _GAP * head.step
                self._caught_up(head, number, now)
                return is_near  # a distant read is no evidence of an order: it may be a random one
            return False
        if head is None or number <= head.number:
            if number > 0:  # most files have one block
                self._remember(place, _Run(number=number))
            return False
        step = number - head.number
        reads = head.reads + 1 if step == head.step or head.reads == 1 else 2
        if reads >= (_BEGIN_IN_FILE if step == 1 else _BEGIN_IN_STEPS):
            self._begin(place, Stream(Way.FILE, snapshot, number, now, entry=entry, step=step))
            return True
        self._remember(place, _Run(reads, number=number, step=step))
        return False

    def _follows(self, snapshot: str, places: Iterable[tuple[Way, int]], now: float) -> bool:
        """Continue a stream at a block that was read. places: its positions in orders. Returns whether there is one."""
        for way, at in places:
            for behind in range(1, _GAP + 1):
                head = self._places.get((way, snapshot, at - behind))
                if isinstance(head, Stream):
                    del self._places[way, snapshot, at - behind]
                    self._places[way, snapshot, at] = head
                    self._caught_up(head, at, now)
                    return True
        return False

    def _may_follow(self, way: Way, snapshot: str, at: int, now: float) -> bool:
        """Begin a stream at a block that was read, if enough reads precede it. Returns whether a stream begins."""
        credit = self._credit(snapshot)
        recent = min(MOST_PLACES, max(_FEWEST_PLACES, credit.files // MOST_PLACES))
        reads = 1
        for behind in range(1, _FIRST_GAP + 1):
            head = self._places.get((way, snapshot, at - behind))
            if isinstance(head, _Run) and credit.misses - head.misses <= recent:
                del self._places[way, snapshot, at - behind]
                reads = head.reads + 1
                break
        if reads >= _BEGIN:
            self._begin((way, snapshot, at), Stream(way, snapshot, at, now))
            return True
        self._remember((way, snapshot, at), _Run(reads, credit.misses))
        return False

    # --- streams --------------------------------------------------------------------------------------------------

    def _remember(self, place: _Place, run: _Run) -> None:
        if isinstance(self._places.get(place), Stream):
            return
        self._places[place] = run
        if len(self._places) > MOST_PLACES + len(self._streams):
            del self._places[next(place for place, head in self._places.items() if isinstance(head, _Run))]

    def _begin(self, place: _Place, stream: Stream) -> None:
        if len(self._streams) >= MOST_STREAMS:
            self._end(min(self._streams, key=lambda one: (not one.is_idle_entry, one.seen)))
        self._streams[stream] = None
        self._see(stream, stream.seen)
        former = self._places.get(place)
        if isinstance(former, Stream):
            self._end(former)
        self._places[place] = stream

    def _caught_up(self, stream: Stream, at: int, now: float) -> None:
        """Widen the window of a stream whose reader has reached the end of the guesses, or passed it."""
        stream.at = max(stream.at, at)
        self._see(stream, now)
        stream.window = min(stream.longest, stream.window + len(stream.ahead))
        stream.crosses = stream.crosses or stream.ended
        stream.blocked = stream.ended = False

    def _see(self, stream: Stream, now: float) -> None:
        stream.seen, stream.misses = now, self._credit(stream.snapshot).misses

    def _end(self, stream: Stream) -> None:
        for guess in list(stream.ahead.values()):
            self._count_wrong(guess)
        self._streams.pop(stream, None)
        place = self._place_of(stream)
        if self._places.get(place) is stream:
            del self._places[place]

    @staticmethod
    def _place_of(stream: Stream) -> _Place:
        return stream.way, stream.snapshot, stream.entry if stream.way is Way.FILE else stream.at

    def forget_idle(self, now: float) -> None:
        """Forget streams without recent reads. To be called about once a second, while there are streams."""
        for stream in [one for one in self._streams if now - one.seen > IDLE_SECONDS]:
            self._end(stream)

    # --- guesses --------------------------------------------------------------------------------------------------

    def search(self, room: int, most: int, now: float) -> list[Search]:
        """Return the searches to make, each of which must be followed by `choose`. room: most bytes of all unread
        guesses; most: blocks."""
        self._forget_lost(room, now)
        found = []
        for stream in self._streams:
            count = min(stream.wants, most)
            size = int(min(self._credit(stream.snapshot).left, MOST_BYTES_AHEAD - stream.bytes_ahead))
            size = min(size, room - self.bytes_ahead)
            if count <= 0 or size <= 0:
                continue
            stream.looking = True
            most -= count
            blocks: Sequence[tuple[int, int]] = ()
            if stream.way is Way.PASS:
                log = self._passes.get(stream.snapshot)
                blocks = log.after(stream.at, LOOKED_AT) if log is not None else ()
            elif stream.way is Way.FILE:
                numbers = range(stream.at + stream.step, stream.at + (LOOKED_AT + 1) * stream.step, stream.step)
                blocks = [(stream.entry, number) for number in numbers]
            found.append(Search(stream, count, size, stream.at, stream.crosses, blocks))
        return found

    def _forget_lost(self, room: int, now: float) -> None:
        """End lost streams, and late ones where room is short."""
        for stream in list(self._streams):
            is_late = self.bytes_ahead >= room and now - stream.seen > _SHORT_OF_ROOM_SECONDS
            if is_late or stream.is_lost(self._credit(stream.snapshot)):
                self._end(stream)

    def choose(self, search: Search, found: Found) -> list[Guess]:
        """Return the blocks to fetch among those *found*. Each must be followed by one call of `landed` or `undone`."""
        stream = search.stream
        stream.looking = False
        if stream not in self._streams:
            return []
        if stream.is_first_of_entry and self._entered_of(stream.snapshot).is_enough:
            self._end(stream)
            return []
        guesses: list[Guess] = []
        credit = self._credit(stream.snapshot)
        for count, one in enumerate(found.missing):
            if credit.left <= 0:  # taken by other streams of the snapshot in the meantime
                found = Found(found.missing[:count], found.missing[count - 1].reached if count else 0, ended=False)
                break
            name = (stream.snapshot, one.entry, one.number)
            if name not in self._by_name and one.key not in self._by_key:  # snapshots may share keys
                guesses.append(self._guess(stream, name, one))
        reached = found.reached if stream.way is Way.LISTING else search.after + found.reached * stream.step
        self._move(stream, reached, found)
        return guesses

    def _move(self, stream: Stream, reached: int, found: Found) -> None:
        """Advance a stream to the end of its search. The reader may already be further."""
        place = self._place_of(stream)
        stream.at = max(stream.at, reached)
        stream.ended = found.ended
        stream.blocked = found.ended or not found.missing  # all blocks nearby are here: nothing to gain
        if self._places.get(place) is stream:
            del self._places[place]
        self._places[self._place_of(stream)] = stream
        if stream.is_over:
            self._end(stream)

    def _guess(self, stream: Stream, name: Name, one: Missing) -> Guess:
        guess = Guess(stream, name, one.key, one.size, stream.count)
        if stream.is_first_of_entry:
            self._entered_of(stream.snapshot).files += 1
            self._credit(stream.snapshot).undone(one.size)  # MOST_ENTERED bounds what these cost
        stream.count += 1
        stream.ahead[one.key] = self._by_key[one.key] = self._by_name[name] = guess
        stream.bytes_ahead += one.size
        self.bytes_ahead += one.size
        self._credit(stream.snapshot).guessed(one.size)
        self._book.guessed(stream.snapshot, stream.rule, one.size)
        return guess

    def landed(self, guess: Guess) -> Sequence[str]:
        """Record that the block is on the node. Returns the ids of the mounts to push it to."""
        stream = guess.stream
        guess.landed = True
        if self._by_key.get(guess.key) is not guess or not stream.is_trusted or stream.shows(guess.index):
            return ()
        guess.pushed = bool(stream.mounts)
        return stream.mounts

    def undone(self, guess: Guess) -> None:
        """Record that the block could not be fetched, or no tier took it."""
        if self._by_key.get(guess.key) is guess:
            self._out(guess)
            self._book.undone(guess.stream.snapshot, guess.stream.rule, guess.size)
            self._credit(guess.stream.snapshot).undone(guess.size)
            if guess.is_of_entry:
                self._entered_of(guess.stream.snapshot).files -= 1
            guess.stream.blocked = True

    def _lost(self, guess: Guess) -> None:
        """Record that the block was evicted before it was read: too much was fetched ahead."""
        if guess.is_of_entry:
            self._entered_of(guess.stream.snapshot).gone_on += 1
        self._out(guess)
        self._book.wrong(guess.stream.snapshot, guess.stream.rule, guess.size)
        guess.stream.lost(guess.index)

    def _read(self, guess: Guess, now: float) -> None:
        stream = guess.stream
        if stream.is_lost(self._credit(stream.snapshot)):
            self._end(stream)
            return
        self._see(stream, now)
        stream.head = max(stream.head, guess.index)
        self._count_right(guess)
        if stream.way is not Way.PASS:
            self._pass(stream.snapshot).note(guess.name[1], guess.name[2])
        for passed, right in stream.passed():
            if right:
                self._count_right(passed)
            else:
                self._count_wrong(passed)
        if stream.has_failed or stream.is_over:
            self._end(stream)

    def _count_right(self, guess: Guess) -> None:
        self._out(guess)
        self._book.right(guess.stream.snapshot, guess.stream.rule, guess.size)
        self._credit(guess.stream.snapshot).right(guess.size)
        if guess.is_of_entry:
            self._entered_of(guess.stream.snapshot).gone_on += 1
            self._gone_on.append(guess)
        guess.stream.grow()

    def _count_wrong(self, guess: Guess) -> None:
        self._out(guess)
        self._book.wrong(guess.stream.snapshot, guess.stream.rule, guess.size)
        guess.stream.shrink()

    def _out(self, guess: Guess) -> None:
        del self._by_key[guess.key], self._by_name[guess.name], guess.stream.ahead[guess.key]
        guess.stream.bytes_ahead -= guess.size
        self.bytes_ahead -= guess.size

    def _pass(self, snapshot: str) -> EarlierPass:
        log = self._passes.get(snapshot)
        if log is None:
            log = self._passes[snapshot] = EarlierPass()
            if len(self._passes) > _MOST_PASSES:
                self._passes.popitem(last=False)
        self._passes.move_to_end(snapshot)
        return log

    def _credit(self, snapshot: str) -> Credit:
        credit = self._credits.get(snapshot)
        if credit is None:
            credit = self._credits[snapshot] = Credit()
            if len(self._credits) > _MOST_SNAPSHOTS:
                self._credits.popitem(last=False)
        self._credits.move_to_end(snapshot)
        return credit
