"""Bringing blocks onto this node: each one once, however many ask for it.

Each fetch in flight runs for itself: it goes on when a reader that asked for it goes away (a killed process, a mount
that died), and all who asked for its block meanwhile get its result. It is tried until the deadline of the last of
them, and each of them waits until a deadline of its own. What somebody waits for is fetched before what is fetched
ahead of all readers.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from cachefs.block import Location
from cachefs.errors import CachefsError, OriginError, OriginUnavailable, StoreFull
from cachefs.messages import BlockRef
from cachefs.planning.prefetch.latency import Latency
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch import flights
from cachefs_daemon.fetch.flights import Answer, Flight, Outcome, Waiting
from cachefs_daemon.fetch.load import Tell
from cachefs_daemon.fetch.lookups import LookUps
from cachefs_daemon.fetch.passing import Passing, PassingBlock
from cachefs_daemon.fetch.puts import Puts
from cachefs_daemon.fetch.ranges import Ranges
from cachefs_daemon.fetch.slots import FetchSlots
from cachefs_daemon.origin.base import Data
from cachefs_daemon.origin.patience import Patience
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore, Put

log = logging.getLogger(__name__)

# Seconds that a failure is remembered which does not pass by itself, such as that of an object that has changed.
FAILURE_MEMORY: Final = 2.0
# Seconds that any other one is remembered. The kernel asks again at once for a page that failed, and must not wait for
# a second deadline; a reader that comes later must, since the origin may have come back.
OUTAGE_MEMORY: Final = 0.1
# Fetches whose outcomes are remembered.
RECENT: Final = 4096
# Reading ahead is a hint. More reads ahead than this in the queue for slots help nobody.
MAX_AHEAD: Final = 8192

# Seconds of a fetch until one was measured: that of an object store.
FIRST_LATENCY: Final = 0.05

# Seconds that a refusal is remembered. With a full tier and a policy that never evicts, a block fetched ahead would be
# thrown away, so after a refusal nothing as large is fetched ahead for a moment.
REFUSAL_MEMORY: Final = 1.0

# Of the bytes that may be in flight, the part that blocks may take which no tier can hold.
PASSING_PART: Final = 8

# Seconds that a reader waits for a fetch process, at least. After that, and once such a request is late, the block is
# fetched beside it. While nobody knows what is late, or it takes long, it is so once the process says nothing for 1 s.
LEAST_LATE: Final = 0.1

# Bytes of a block that its reader gets before it is stored, at most. To copy a larger one through a socket takes as
# long as to store it, and its readers take it in parts.
MOST_EARLY: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class _Landing:
    """How a flight has ended."""

    # When it ended, in loop time.
    when: float
    outcome: Outcome


class Fetcher:
    """Fetches blocks on demand and ahead of it. Used on the event loop.

    It has more than 12 attributes: half of them are the parts that it uses, and half what it remembers and counts.
    """

    def __init__(
        self,
        store: BlockStore,
        resolve: Callable[[BlockRef], BlockSource],
        threads: Threads,
        slots: FetchSlots,
        errors: ErrorLog,
        read_deadline: float,
    ) -> None:
        """resolve: where a block comes from, to be called in any thread; it raises CachefsError. read_deadline: seconds
        that anybody waits for a read of an origin, at most."""
        self._store = store
        self._look_ups = LookUps(store, resolve)
        self._threads = threads
        self._slots = slots
        self._errors = errors
        self._read_deadline = read_deadline
        self._flights: dict[bytes, Flight] = {}  # by block key
        self._recent: OrderedDict[bytes, _Landing] = OrderedDict()  # by block key, oldest first
        self.passing = Passing(slots.capacity // PASSING_PART)
        self._ranges = Ranges(slots, read_deadline)
        self._puts = Puts(store, threads.run)  # of blocks that somebody waits for
        self._puts_ahead = Puts(store, threads.ahead, at_once=1)
        self._asking: set[asyncio.Task[None]] = set()  # in which `ask` goes on
        self._refused: dict[str, tuple[int, float]] = {}  # by snapshot: bytes of the last block refused, loop time
        # Is told of a block that a reader waits for, and of its bytes; 0 where it is on the node by now.
        self.on_ask: Callable[[BlockRef, int], None] = _ignore
        # Lets a fetch process bring a block that nobody waits for, if it can: see `Carrying.take`.
        self.carry: Callable[[BlockSource, Tell, Callable[[], None]], bool] = _not_carried
        self.fetched_blocks = 0  # since the daemon started
        self.fetched_bytes = 0  # since the daemon started
        self.latency = Latency(FIRST_LATENCY)  # of a fetch, from its slot until its block is in a tier

    @property
    def in_flight(self) -> tuple[int, int]:
        """Blocks asked of an origin right now, and their bytes."""
        return self._slots.in_use, self._slots.bytes_in_use

    @property
    def ahead_slots(self) -> int:
        """Slots that reads ahead may take."""
        return self._slots.ahead_slots

    def ask(
        self, refs: Sequence[BlockRef], patience: float, answer: Callable[[list[Answer]], None], *, early: bool = False
    ) -> None:
        """As `demand`, and *answer* is called with the outcomes: at once where they are known. early: with the bytes of
        a small block as soon as these have come, where all of them are wanted.

        There is a thread, and a task, only where more than one block is asked for, or where a look-up may take long.
        """
        now = asyncio.get_running_loop().time()
        found = self._look_ups.at_once(refs[0]) if len(refs) == 1 else None
        if found is None:
            self._ask_in_task(refs, now + patience, answer)
            return
        one = self._known(found, now) if isinstance(found, BlockSource) else found
        if isinstance(one, BlockSource):
            takes_all = refs[0].start == 0 and refs[0].size >= one.length
            Waiting(
                self._join(one, ahead=False), now + patience, partial(self._pass_on, refs, now + patience, answer),
                early=early and takes_all and one.length <= MOST_EARLY,
            )  # fmt: skip
        else:
            answer([one or _gone_again()])
        # To guess takes 20 to 45 us: after the answer, and after the task that sends the request.
        if isinstance(found, BlockSource):
            asyncio.get_running_loop().call_soon(self.on_ask, refs[0], found.length)
        elif not isinstance(found, CachefsError):
            self.on_ask(refs[0], 0)

    def _pass_on(
        self, refs: Sequence[BlockRef], until: float, answer: Callable[[list[Answer]], None], flight: Flight
    ) -> None:
        """The flight has landed, or is stuck, or its time is over; or its bytes are here for one who takes them."""
        outcome = flight.early if flight.is_being_stored else self._result(flight)
        if outcome is None:
            self._ask_in_task(refs, until, answer)  # see `demand`
        else:
            answer([outcome])

    def _ask_in_task(self, refs: Sequence[BlockRef], until: float, answer: Callable[[list[Answer]], None]) -> None:
        async def ask() -> None:
            answers: list[Answer]
            try:
                answers = await self.demand(refs, until - asyncio.get_running_loop().time())
            except Exception as error:
                # Whoever asks counts what is not answered, and would wait until its deadline.
                text = f"internal error ({error!r}); see the daemon's log"
                self._errors.add("blocks that readers wait for", text, bug=error)
                answers = [CachefsError(text)] * len(refs)
            answer(answers)

        task = asyncio.create_task(ask())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def demand(self, refs: Sequence[BlockRef], patience: float) -> list[Answer]:
        """Somebody waits for these blocks, at most *patience* seconds. Returns one outcome per block, in order."""
        until = asyncio.get_running_loop().time() + patience
        outcomes = await self._outcomes(refs, ahead=False, until=until)
        refused = [number for number, outcome in enumerate(outcomes) if outcome is None]
        if refused:
            # They were in flight before somebody waited for them, and no tier wanted them. Now one has to take them.
            again = await self._outcomes([refs[number] for number in refused], ahead=False, until=until)
            for number, outcome in zip(refused, again, strict=True):
                outcomes[number] = outcome
        return [outcome or _gone_again() for outcome in outcomes]

    async def ahead(self, refs: Sequence[BlockRef]) -> list[Outcome]:
        """Nobody waits for these blocks yet: what somebody waits for comes first, and the policy may refuse them.

        Returns one outcome per block, in order.
        """
        found = await self._outcomes(refs, ahead=True, until=None)
        return [None if isinstance(one, PassingBlock) else one for one in found]

    async def start(
        self, refs: Sequence[BlockRef], needed: Sequence[float], looked: float, *, transient: bool = False
    ) -> list[Flight | Outcome]:
        """Begin to bring blocks that were in no tier at *looked*, and will be wanted at *needed* (loop times), soonest
        first. transient: also those that no policy admits, as transient blocks.

        Returns for each block its flight, or the outcome where it is known already. The index is not asked again: that
        lets go of the interpreter lock for each block, and the store asks it before it writes.
        """
        sources = self._look_ups.sources_at_once(refs)
        if rest := refs[len(sources) :]:
            sources += await self._threads.background(self._look_ups.find_sources, rest)
        begun: list[Flight | Outcome] = []
        for found, when in zip(sources, needed, strict=True):
            one = self._known(found, looked) if isinstance(found, BlockSource) else found
            if isinstance(one, BlockSource):
                begun.append(self._join(one, ahead=True, needed=when, transient=transient))
            else:
                begun.append(one)
        return begun

    async def hint(self, refs: Sequence[BlockRef]) -> None:
        """Start bringing these blocks, if there is room in the queue, and return."""
        for found in await self._threads.background(self._look_ups.look_up, refs):
            if isinstance(found, BlockSource) and self._slots.ahead_queued < MAX_AHEAD:
                self._join(found, ahead=True)

    async def close(self) -> None:
        """Cancel what is in flight."""
        flights = list(self._flights.values())
        for flight in flights:
            if flight.task is None:
                flight.slot.leave()
        tasks = [*self._asking, *(flight.task for flight in flights if flight.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flight in flights:
            if not flight.has_landed:
                self._end(flight, _stopping())
        await self._ranges.close()
        self.passing.close()

    async def _outcomes(self, refs: Sequence[BlockRef], *, ahead: bool, until: float | None) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        looked = loop.time()
        run = self._threads.background if ahead else self._threads.run
        found = await run(self._look_ups.look_up, refs)
        outcomes = [self._known(one, looked) if isinstance(one, BlockSource) else one for one in found]
        flights = {n: self._join(one, ahead=ahead) for n, one in enumerate(outcomes) if isinstance(one, BlockSource)}
        if flights:
            await self._wait(flights.values(), until)
        for number, flight in flights.items():
            if until is not None and flight.is_being_stored:
                outcomes[number] = await self._pass(flight, "a tier takes long to write one")
        return [
            self._result(flights[number]) if isinstance(outcome, BlockSource) else outcome
            for number, outcome in enumerate(outcomes)
        ]

    async def _wait(self, wanted: Collection[Flight], until: float | None) -> None:
        """Until all have ended, or *until* then (loop time); a reader, who has such a deadline, waits for no disk."""
        loop = asyncio.get_running_loop()
        landings = {flight: flight.landing() for flight in wanted if not flight.has_landed}
        while waiting := [
            landing
            for flight, landing in landings.items()
            if not landing.done() and (until is None or not flight.is_stuck(loop.time()))
        ]:
            timeout = min(max(0.0, until - loop.time()), flights.PUT_PATIENCE) if until is not None else None
            _, left = await asyncio.wait(waiting, timeout=timeout)
            if not left or (until is not None and loop.time() >= until):
                return

    def _known(self, source: BlockSource, looked: float) -> BlockSource | Outcome:
        """The block, if no tier could hold it a moment ago. The outcome of a flight of this block that failed a moment
        ago, or that landed since *looked* (loop time): the look at the store may have missed it. Else the source."""
        passing = self.passing.get(source.key)
        if passing is not None:
            return passing
        landing = self._recent.get(source.key)
        if landing is None:
            return source
        if isinstance(landing.outcome, CachefsError):
            memory = OUTAGE_MEMORY if isinstance(landing.outcome, OriginUnavailable) else FAILURE_MEMORY
            fresh = asyncio.get_running_loop().time() - landing.when < memory
            return landing.outcome if fresh else source
        return landing.outcome if landing.when >= looked and landing.outcome is not None else source

    def _is_futile_hint(self, flight: Flight) -> bool:
        # A caller who knows when a block is needed has asked for room before.
        if flight.needed < math.inf or flight.transient:
            return False
        source = flight.source
        length, when = self._refused.get(source.snapshot, (0, -math.inf))
        return source.length >= length and asyncio.get_running_loop().time() - when < REFUSAL_MEMORY

    def _join(self, source: BlockSource, *, ahead: bool, needed: float = math.inf, transient: bool = False) -> Flight:
        until = asyncio.get_running_loop().time() + self._read_deadline
        flight = self._flights.get(source.key)
        if flight is not None and not ahead and not flight.patience.extend(until):
            flight = None  # it has just been given up
        if flight is None:
            slot = self._slots.slot(source.key, source.length, source.origin.endpoint, ahead=ahead, needed=needed)
            flight = self._flights[source.key] = Flight(source, not ahead, Patience(until), needed, slot)
            flight.transient = transient
            if not source.is_whole:
                self._ranges.wait(source)
            if slot.ask(partial(self._begin, flight)):
                self._begin(flight)
        elif not ahead and not flight.demanded:
            flight.demanded = True
            self._slots.promote(source.key)
            if flight.is_carried:
                # Where it has no slot its bytes have come; to let readers find them takes milliseconds.
                late = source.origin.endpoint.late_after(source.length) if flight.slot.held else 0.0
                late = max(LEAST_LATE, late)
                if late < math.inf:
                    asyncio.get_running_loop().call_later(late, self._fetch_beside, flight)
        elif not ahead and flight.task is None:
            self._slots.promote(source.key)  # this reader's turn may be sooner than that of the one who asked first
        return flight

    def _result(self, flight: Flight) -> Outcome:
        if flight.has_landed:
            return flight.outcome
        why = flight.patience.trouble or "its origin is slow or unreachable"
        return OriginUnavailable(f"{flight.source.subject} did not come within the read deadline; {why}")

    def _begin(self, flight: Flight) -> None:
        """It has its slot."""
        if not (flight.demanded or flight.transient or self._is_futile_hint(flight)):
            flight.began = asyncio.get_running_loop().time()
            flight.is_carried = self.carry(
                flight.source, partial(self._carried, flight), partial(self._arrived, flight)
            )
        if not flight.is_carried:
            flight.task = asyncio.create_task(self._fly(flight))

    def _fetch_beside(self, flight: Flight) -> None:
        """A fetch process is late with it, or does not bring it: it is fetched here. What lands first counts."""
        if flight.task is None and not flight.has_landed:
            flight.task = asyncio.create_task(self._fly(flight))

    @staticmethod
    def _arrived(flight: Flight) -> None:
        """A fetch process has its bytes: unless it is fetched here too, it needs its slot no longer."""
        if flight.task is None:
            flight.slot.give_back()

    def _carried(self, flight: Flight, place: Location | None) -> None:
        """A fetch process has brought it, or another way is better."""
        if flight.has_landed:
            return
        if place is None:
            self._fetch_beside(flight)
            return
        if flight.task is not None:
            flight.task.cancel()
        self._count(flight)
        self._end(flight, place)

    def _count(self, flight: Flight) -> None:
        """Its block has come."""
        self.latency.measure(asyncio.get_running_loop().time() - flight.began)
        self.fetched_blocks += 1
        self.fetched_bytes += flight.source.length

    async def _fly(self, flight: Flight) -> None:
        outcome: Outcome = _stopping()
        try:
            if not flight.slot.held:  # its bytes have come in another way, and are still in no tier
                await flight.slot.take(ahead=not flight.demanded, needed=flight.needed)
            outcome = await self._bring(flight)
        except CachefsError as error:
            outcome = error
            self._errors.add(flight.source.subject, str(error))
        except Exception as error:
            outcome = CachefsError(f"{flight.source.subject}: internal error ({error!r}); see the daemon's log")
            self._errors.add(flight.source.subject, str(outcome), bug=error)
        finally:
            self._end(flight, outcome)

    def _end(self, flight: Flight, outcome: Outcome) -> None:
        if flight.has_landed:
            return  # a fetch process was quicker
        key = flight.source.key
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.source.is_whole:
            self._ranges.forget(flight.source)
        flight.slot.leave()
        if not isinstance(outcome, PassingBlock):  # `passing` says how long that is remembered
            self._remember(key, outcome)
        flight.land(outcome)

    def _remember(self, key: bytes, outcome: Outcome) -> None:
        self._recent[key] = _Landing(asyncio.get_running_loop().time(), outcome)
        self._recent.move_to_end(key)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    async def _bring(self, flight: Flight) -> Location | PassingBlock | None:
        source, patience, clock = flight.source, flight.patience, asyncio.get_running_loop().time
        if not flight.demanded and self._is_futile_hint(flight):
            return None
        flight.began = clock()
        if not flight.demanded:
            # It may have waited long for its slot; its time starts now.
            patience.extend(flight.began + self._read_deadline)
        elif patience.until <= flight.began:
            raise OriginUnavailable(
                f"{source.subject} found no free connection within the read deadline; "
                "its origin is slow, or raise origin.max_connections"
            )
        patience.rest = partial(_rest, flight)
        data = None if source.is_whole else await self._come_along(flight)
        if data is None:
            data = await source.origin.read(source.range, patience)
        if len(data) != source.length:
            raise OriginError(f"{source.subject}: got {len(data)} bytes for {source.length}")
        flight.arrive(data, clock())
        if flight.early is not None and self._puts.has_room:
            flight.slot.leave()  # nobody waits for it any more
        location = await self._store_or_pass(flight)
        self._count(flight)
        if location is None and flight.needed == math.inf:
            self._note_refusal(source)
        return location

    async def _come_along(self, flight: Flight) -> Data | None:
        """The bytes of a block that comes with its neighbours; None where it must be fetched by itself."""
        await asyncio.sleep(0)  # those that were asked for together with it wait for their slots now
        part = self._ranges.begin(flight.source, flight.slot)
        if part is None:
            return None
        try:
            with flight.patience.enforced():
                data = await part
        except TimeoutError:
            raise OriginUnavailable(f"{flight.source.subject} did not come in time") from None
        if data is None:
            await flight.patience.rest(0)  # it had the slot of another one
            if not flight.demanded:
                flight.patience.extend(flight.began + self._read_deadline)
        return data

    def _note_refusal(self, source: BlockSource) -> None:
        now = asyncio.get_running_loop().time()
        self._refused = {key: seen for key, seen in self._refused.items() if now - seen[1] < REFUSAL_MEMORY}
        self._refused[source.snapshot] = source.length, now

    async def _store_or_pass(self, flight: Flight) -> Location | PassingBlock | None:
        source, demanded = flight.source, flight.demanded
        puts = self._puts if demanded else self._puts_ahead
        checksums = flight.early.checksums if flight.early is not None else b""
        transient = demanded or flight.transient
        block = Put(source.key, flight.data, transient=transient, snapshot=source.snapshot, checksums=checksums)
        try:
            stored = await puts.put(block, urgent=demanded and flight.early is None)
        except Exception as error:
            if not flight.demanded:
                raise
            # A bug, which may be of any block of the batch. Readers get the bytes, as they are here.
            self._errors.add("the store", f"internal error ({error!r}); see the daemon's log", bug=error)
            stored = StoreFull("the store has failed")
        if isinstance(stored, StoreFull) and not flight.demanded:
            return None
        return await self._pass(flight, str(stored)) if isinstance(stored, StoreFull) else stored

    async def _pass(self, flight: Flight, reason: str) -> PassingBlock:
        block = flight.early
        if block is None:
            block = await self._threads.run(PassingBlock.of, flight.source.key, flight.data)
        self.passing.add(flight.source.key, block, reason)
        return block


async def _rest(flight: Flight, seconds: float) -> None:
    """Between two attempts. Fetches from other origins have the slot meanwhile."""
    flight.slot.give_back()
    await asyncio.sleep(seconds)
    await flight.slot.take(ahead=not flight.demanded, needed=flight.needed)
    flight.began = asyncio.get_running_loop().time()


def _stopping() -> CachefsError:
    return CachefsError("the daemon is stopping")


def _gone_again() -> CachefsError:
    return OriginUnavailable("the block came and went; read again")


def _not_carried(_: BlockSource, __: Tell, ___: Callable[[], None]) -> bool:
    return False


def _ignore(_: BlockRef, __: int) -> None:
    pass
