"""Guessing what comes next where nobody has published it.

Readers that wait for blocks tell where they are. Where some of them follow each other in an order (see `Way`), there
is a *stream*. A few blocks ahead of it are fetched; with each of them that is read, the window grows by one, so that it
doubles with every round trip; with each that was wrong, it is halved. What all this may cost is bounded by the credit
of each snapshot, and what it takes in memory by the constants below, whatever is read by however many.

Only reads that reach the daemon are looked at: those of blocks that are not on the node, and of blocks that were
guessed. So it costs 7 us per miss, and 0.2 us per read that a mount reports.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs.planning.prefetch.credit import Credit
from cachefs.planning.prefetch.earlier_pass import EarlierPass
from cachefs.planning.prefetch.guess_counts import GuessBook, Guesses
from cachefs.planning.prefetch.streams import MOST_BYTES_AHEAD, Guess, Name, Stream, Way

# Reads in order that make a stream; of blocks of one file in steps of one, and in other steps.
_BEGIN: Final = 4
_BEGIN_IN_FILE: Final = 2
_BEGIN_IN_STEPS: Final = 4
# A reader follows a stream if it is so many entries further at most: directories have numbers too, and so have files
# that are on the node already. Before there is a stream it is less: in a snapshot of 2,000 files, each read of a random
# reader is within 8 entries of one of the last 256.
_GAP: Final = 8
_FIRST_GAP: Final = 2
# Places of readers that are remembered, where streams may begin; streams; seconds after which one is forgotten that
# nobody follows, and the same where there is no room for others; snapshots of which the credit is remembered, and of
# which the order of reads is.
MOST_PLACES: Final = 64
# Reads of others that may be between two of them where a snapshot has few files, so that what follows is no chance.
_FEWEST_PLACES: Final = 8
MOST_STREAMS: Final = 64
IDLE_SECONDS: Final = 20.0
_SHORT_OF_ROOM_SECONDS: Final = 0.5
_MOST_SNAPSHOTS: Final = 256
_MOST_PASSES: Final = 8

# Blocks that one search looks at.
LOOKED_AT: Final = 256

# Large files of a snapshot whose second block was guessed since the first was read, and in which nobody has gone on: so
# many at most, and one more for each in which somebody has, up to as many as the last.
MOST_ENTERED: Final = 4
_MOST_MORE: Final = 12

# Where something reads: the order, the snapshot, and the entry (FILE, LISTING) or the place in the log (PASS).
_Place = tuple[Way, str, int]


@dataclass(slots=True, eq=False)
class _Run:
    """Reads that may become a stream."""

    reads: int = 1
    # Misses of the snapshot (see Credit) at the last of them.
    misses: int = 0
    # FILE: number of the last block, and blocks since the one before.
    number: int = 0
    step: int = 0


@dataclass(slots=True)
class _Entered:
    """Files of a snapshot whose second block was guessed since a reader began them, and those of them in which one has
    gone on."""

    files: int = 0
    gone_on: int = 0

    @property
    def is_enough(self) -> bool:
        return self.files - self.gone_on >= MOST_ENTERED + min(self.gone_on, _MOST_MORE)


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """What is to be looked for: the next blocks of a stream that are not on the node."""

    stream: Stream
    # Find no more blocks than this, and end where they have so many bytes, or after LOOKED_AT others.
    count: int
    size: int
    # Begin after this place (see `Stream.at`).
    after: int
    # LISTING: go on into other directories?
    crosses: bool
    # PASS, FILE: the blocks to look at, (entry, number) each.
    blocks: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Missing:
    """A block that is not on the node."""

    entry: int
    number: int
    key: bytes
    size: int
    # What `Found.reached` would be if the search had ended there.
    reached: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has found."""

    missing: Sequence[Missing]
    # How many of the `blocks` were looked at; LISTING: the last entry that was.
    reached: int
    # The order ends there, or the directory.
    ended: bool


class Guessing:
    """Decides what is guessed. Times are monotonic seconds."""

    def __init__(self, book: GuessBook | None = None) -> None:
        """book: what is counted, in place of one of its own."""
        self._book = book or GuessBook()
        self.bytes_ahead = 0  # of all guesses that were not read yet
        self._by_key: dict[bytes, Guess] = {}  # those guesses
        self._by_name: dict[Name, Guess] = {}  # the same
        self._streams: dict[Stream, None] = {}  # least recently begun first
        self._places: OrderedDict[_Place, _Run | Stream] = OrderedDict()  # of readers, least recent first
        self._credits: OrderedDict[str, Credit] = OrderedDict()  # by snapshot, least recent first
        self._passes: OrderedDict[str, EarlierPass] = OrderedDict()  # by snapshot, least recent first
        self._entered: OrderedDict[str, _Entered] = OrderedDict()  # by snapshot, least recent first
        self._gone_on: list[Guess] = []  # second blocks of files, which were guessed and read

    @property
    def counts(self) -> Guesses:
        """What was guessed since the start."""
        return self._book.total

    @property
    def streams(self) -> int:
        """How many there are."""
        return len(self._streams)

    # --- what is read ---------------------------------------------------------------------------------------------

    def missed(self, name: Name, size: int, files: int, now: float) -> bool:
        """A reader waits for a block of *size* bytes; 0 where it is on the node by now. True where that makes something
        to `search`. files: in the snapshot."""
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
        """A reader has waited for the beginning of a file that has further blocks, and has got it. True where the
        next one is to be looked for: most who begin a large file go through it."""
        place = (Way.FILE, snapshot, entry)
        if isinstance(self._places.get(place), Stream) or self._entered_of(snapshot).is_enough:
            return False
        self._begin(place, Stream(Way.FILE, snapshot, 0, now, entry=entry, window=1, is_entry=True))
        return True

    def take_gone_on(self) -> list[Guess]:
        """Second blocks of files, which were guessed and read since the last call. Who looks for other evidence would
        have seen their readers wait."""
        gone_on, self._gone_on = self._gone_on, []
        return gone_on

    def _entered_of(self, snapshot: str) -> _Entered:
        counts = self._entered.setdefault(snapshot, _Entered())
        self._entered.move_to_end(snapshot)
        if len(self._entered) > _MOST_SNAPSHOTS:
            self._entered.popitem(last=False)
        return counts

    def seen(self, keys: Iterable[bytes], mount: str, now: float) -> bool:
        """Blocks with these keys were read through a mount; empty: one that no pages are pushed to. True where some of
        them were guessed."""
        if not self._by_key:
            return False
        found = [guess for guess in map(self._by_key.get, keys) if guess is not None]
        for guess in found:
            if guess.key in self._by_key:
                guess.stream.read_through(mount)
                self._read(guess, now)
        return bool(found)

    def _read_in_file(self, snapshot: str, entry: int, number: int, now: float) -> bool:
        """A block was read. Does that go on a stream within its file, or begin one?"""
        place = (Way.FILE, snapshot, entry)
        head = self._places.pop(place, None)
        if isinstance(head, Stream):
            self._places[place] = head
            if number > head.at and (number - head.at) % head.step == 0:
                is_near = number - head.at <= _GAP * head.step
                self._caught_up(head, number, now)
                return is_near  # else it is no evidence of an order: somebody may read here and there
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
        """A block was read that is at these *places* of orders. Is a stream there?"""
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
        """A block was read that is at this place of an order. Does a stream begin there?"""
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
        """The reader has come to the end of what was guessed, or beyond: the window was too short."""
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
        """Forget streams that nobody has followed for long. To be called every second or so, while there are any."""
        for stream in [one for one in self._streams if now - one.seen > IDLE_SECONDS]:
            self._end(stream)

    # --- guesses --------------------------------------------------------------------------------------------------

    def search(self, room: int, most: int, now: float) -> list[Search]:
        """What to look for. Each is to be followed by `choose`. room: bytes that all guesses may take which were not
        read yet; most: blocks."""
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
        """Make room for those that read on."""
        for stream in list(self._streams):
            is_late = self.bytes_ahead >= room and now - stream.seen > _SHORT_OF_ROOM_SECONDS
            if is_late or stream.is_lost(self._credit(stream.snapshot)):
                self._end(stream)

    def choose(self, search: Search, found: Found) -> list[Guess]:
        """What is to be fetched of what a search has *found*. For each of these there is one call of `landed` or
        `undone`."""
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
            if credit.left <= 0:  # other streams of the snapshot have taken it in the meantime
                found = Found(found.missing[:count], found.missing[count - 1].reached if count else 0, ended=False)
                break
            name = (stream.snapshot, one.entry, one.number)
            if name not in self._by_name and one.key not in self._by_key:  # the next snapshot has the same keys
                guesses.append(self._guess(stream, name, one))
        reached = found.reached if stream.way is Way.LISTING else search.after + found.reached * stream.step
        self._move(stream, reached, found)
        return guesses

    def _move(self, stream: Stream, reached: int, found: Found) -> None:
        """Nothing is to be looked for again up to where the search has come. The reader may have come further."""
        place = self._place_of(stream)
        stream.at = max(stream.at, reached)
        stream.ended = found.ended
        stream.blocked = found.ended or not found.missing  # all that is near is here: there is nothing to gain
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
        """It is on the node. Returns the ids of the mounts that it is to be pushed to."""
        stream = guess.stream
        guess.landed = True
        if self._by_key.get(guess.key) is not guess or not stream.is_trusted or stream.shows(guess.index):
            return ()
        guess.pushed = bool(stream.mounts)
        return stream.mounts

    def undone(self, guess: Guess) -> None:
        """It could not be fetched, or no tier took it."""
        if self._by_key.get(guess.key) is guess:
            self._out(guess)
            self._book.undone(guess.stream.snapshot, guess.stream.rule, guess.size)
            self._credit(guess.stream.snapshot).undone(guess.size)
            if guess.is_of_entry:
                self._entered_of(guess.stream.snapshot).files -= 1
            guess.stream.blocked = True

    def _lost(self, guess: Guess) -> None:
        """It was evicted before it was read: too much was fetched ahead."""
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
