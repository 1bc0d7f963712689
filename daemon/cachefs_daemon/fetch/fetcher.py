"""Whoever wants blocks on this node asks here: each block is brought once, however many ask for it.

All who ask for a block while it is in flight get its result. The flight is tried until the deadline of the last of
them, and each of them waits until a deadline of its own.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from cachefs.errors import CachefsError, OriginUnavailable
from cachefs.messages import BlockRef, Fetch
from cachefs.planning.prefetch.latency import Latency
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch import flights
from cachefs_daemon.fetch.awaited_snapshots import AwaitedSnapshots
from cachefs_daemon.fetch.bringing import Bringing
from cachefs_daemon.fetch.flights import Answer, Flight, Outcome, Waiting
from cachefs_daemon.fetch.lookups import LookUps
from cachefs_daemon.fetch.part_reads import PartReads
from cachefs_daemon.fetch.passing import Passing, PassingBlock
from cachefs_daemon.fetch.slots import FetchSlots
from cachefs_daemon.fetch.waiting_reads import ReadFailures, WaitingRead
from cachefs_daemon.peers.answers import LACKS_SNAPSHOT, TAKE_IT, LacksSnapshot, TakeIt
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

# Reading ahead is a hint. More reads ahead than this in the queue for slots help nobody.
MAX_AHEAD: Final = 8192

# A peer that asks for a block without haste will want it in so many seconds, for what is known here: as soon as what is
# fetched ahead for this node's own readers (see cachefs_daemon.fetch.prefetcher).
NEEDED_BY_PEER: Final = 0.1

# Bytes of a block that its reader gets before it is stored, at most. To copy a larger one through a socket takes as
# long as to store it, and its readers take it in parts.
MOST_EARLY: Final = 256 << 10

# Is told the outcomes, and where the block came from if that is one which has just come: see `Flight.via`.
Tell = Callable[[list[Answer], str], None]
# Is told what another node is answered, for each block.
PeerTell = Callable[[Sequence[Answer | TakeIt | LacksSnapshot]], None]


class Fetcher:
    """Fetches blocks on demand and ahead of it. Used on the event loop."""

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
        self._look_ups = LookUps(store, resolve)
        self._threads = threads
        self._slots = slots
        self._errors = errors
        self.bringing = Bringing(store, threads, slots, errors, read_deadline)
        self._asking: set[asyncio.Task[None]] = set()  # in which `ask` goes on
        # Is told of a block that a reader waits for, of its bytes, and of its key; 0 and none where it is on the node.
        self.on_ask: Callable[[BlockRef, int, bytes], None] = _ignore
        self.awaited: AwaitedSnapshots | None = None  # None: there are no other nodes
        # Reads parts of blocks for who reads here and there; None: every block comes as a whole.
        self.part_reads: PartReads | None = None

    @property
    def in_flight(self) -> tuple[int, int]:
        """Blocks asked of an origin right now, and their bytes."""
        return self._slots.in_use, self._slots.bytes_in_use

    @property
    def fetched_blocks(self) -> int:
        """That came from origins since the daemon started."""
        return self.bringing.fetched_blocks

    @property
    def fetched_bytes(self) -> int:
        """Of these blocks."""
        return self.bringing.fetched_bytes

    @property
    def latency(self) -> Latency:
        """Of a fetch, from its slot until its block is in a tier."""
        return self.bringing.latency

    @property
    def passing(self) -> Passing:
        """Blocks that no tier can hold."""
        return self.bringing.passing

    @property
    def ahead_slots(self) -> int:
        """Slots that reads ahead may take."""
        return self._slots.ahead_slots

    @property
    def is_waited_for(self) -> bool:
        """Does a reader wait for an origin?"""
        return self._slots.is_waited_for

    @property
    def has_queue(self) -> bool:
        """Do blocks that nobody waits for yet wait for a slot?"""
        return self._ahead_queued > 0

    @property
    def failures(self) -> ReadFailures:
        """Why blocks could not be had."""
        return self.bringing.failures

    def waiting_reads(self, since: float) -> list[WaitingRead]:
        """Blocks, and parts of them, that reads have waited for since *since* (loop time) or longer."""
        parts = self.part_reads.waiting_reads(since) if self.part_reads is not None else []
        return self.bringing.waiting_reads(since) + parts

    def ask(self, refs: Sequence[BlockRef], patience: float, answer: Tell, *, early: bool = False) -> None:
        """As `demand`, and *answer* is called with the outcomes: at once where known. early: with bytes as soon as they
        have come: those of a small block where all of them are wanted, and of a part of a large one.

        There is a thread, and a task, only where more than one block is asked for, or where a look-up may take long.
        """
        until = asyncio.get_running_loop().time() + patience
        found = self._at_once(refs, until, answer, for_peer=False)
        if isinstance(found, BlockSource):
            if early and self.part_reads is not None and self.part_reads.takes(refs[0], found):
                self.part_reads.ask(refs[0], found, until, partial(self._pass_part, refs, found, until, answer))
            else:
                self._wait_for(refs, found, until, answer, early=early)
            # To guess takes 20 to 45 us: after the answer, and after the task that sends the request.
            asyncio.get_running_loop().call_soon(self.on_ask, refs[0], found.length, found.key)
        elif found is not None and not isinstance(found, CachefsError):
            self.on_ask(refs[0], 0, b"")

    def _wait_for(
        self, refs: Sequence[BlockRef], source: BlockSource, until: float, answer: Tell, *, early: bool
    ) -> None:
        takes_all = refs[0].start == 0 and refs[0].size >= source.length
        pass_on = partial(self._pass_on, refs, until, answer, for_peer=False)
        early = early and takes_all and source.length <= MOST_EARLY
        Waiting(self.bringing.join(source, ahead=False), until, pass_on, early=early)

    def _pass_part(
        self, refs: Sequence[BlockRef], source: BlockSource, until: float, answer: Tell, part: PassingBlock | None
    ) -> None:
        if part is not None:
            answer([part], "")
        else:
            self._wait_for(refs, source, until, answer, early=False)

    def read_in_parts(self) -> None:
        """From now on, who reads here and there in large blocks gets its bytes before the rest of them."""
        self.part_reads = PartReads(self.bringing, self._slots)

    def ask_for_peer(self, fetch: Fetch, patience: float, answer: PeerTell) -> None:
        """Another node asks for blocks. They come from the origin, and not from any third node; or the other node is to
        bring one of them itself, where this one is behind (see `Bringing.give`); or to ask the next node, where this
        one does not have the snapshot."""
        until = asyncio.get_running_loop().time() + patience
        snapshots = self.awaited if fetch.await_snapshot else None
        ask = partial(self._ask_for_peer, fetch, until, answer)
        if snapshots is None or not snapshots.wait(fetch.blocks[0].snapshot, until, ask):
            ask()

    def _ask_for_peer(self, fetch: Fetch, until: float, answer: PeerTell) -> None:
        refs = fetch.blocks
        if self.awaited is not None and not self.awaited.is_here(refs[0].snapshot):
            if self.bringing.elsewhere is not None:
                self.bringing.elsewhere.note_reader(refs[0].snapshot, fetch.peer)
            answer([LACKS_SNAPSHOT] * len(refs))
            return

        def tell(answers: list[Answer], _: str) -> None:
            answer(answers)

        source = self._at_once(refs, until, tell, for_peer=True)
        if not isinstance(source, BlockSource):
            return
        if (refusal := self.bringing.refusal(source)) is not None:
            answer([refusal])
            return
        if fetch.may_take and self.bringing.give(source, fetch.peer, ahead=fetch.unhurried):
            answer([TAKE_IT])
            return
        needed = asyncio.get_running_loop().time() + NEEDED_BY_PEER if fetch.unhurried else math.inf
        flight = self.bringing.join(source, ahead=fetch.unhurried, needed=needed, transient=True, for_peer=True)
        pass_on = partial(self._pass_on, refs, until, tell, for_peer=True)
        Waiting(flight, until, pass_on, early=source.length <= MOST_EARLY)

    def _at_once(
        self, refs: Sequence[BlockRef], until: float, answer: Tell, *, for_peer: bool
    ) -> BlockSource | Outcome:
        """The source of a block that has to be brought. Else *answer* is called with what is known of it, which is
        returned; or will be, and None is returned."""
        looked = asyncio.get_running_loop().time()
        found = self._look_ups.at_once(refs[0]) if len(refs) == 1 else None
        if found is None:
            self._ask_in_task(refs, until, answer, for_peer=for_peer)
            return None
        one = self.bringing.known(found, looked, for_peer=for_peer) if isinstance(found, BlockSource) else found
        if not isinstance(one, BlockSource):
            one = one or _gone_again()
            answer([one], "")
        return one

    def _pass_on(self, refs: Sequence[BlockRef], until: float, answer: Tell, flight: Flight, *, for_peer: bool) -> None:
        """The flight has landed, or is stuck, or its time is over; or its bytes are here for one who takes them."""
        outcome = flight.early if flight.is_being_stored else self.bringing.result(flight)
        if outcome is None:
            self._ask_in_task(refs, until, answer, for_peer=for_peer)  # see `demand`
        else:
            answer([outcome], flight.via)

    def _ask_in_task(self, refs: Sequence[BlockRef], until: float, answer: Tell, *, for_peer: bool) -> None:
        async def ask() -> None:
            answers: list[Answer]
            try:
                answers = await self.demand(refs, until - asyncio.get_running_loop().time(), for_peer=for_peer)
            except Exception as error:
                # Whoever asks counts what is not answered, and would wait until its deadline.
                text = f"internal error ({error!r}); see the daemon's log"
                self._errors.add("blocks that readers wait for", text, bug=error)
                answers = [CachefsError(text)] * len(refs)
            answer(answers, "")

        task = asyncio.create_task(ask())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def demand(self, refs: Sequence[BlockRef], patience: float, *, for_peer: bool = False) -> list[Answer]:
        """Somebody waits for these blocks, at most *patience* seconds. Returns one outcome per block, in order.
        for_peer: see `Bringing.join`."""
        until = asyncio.get_running_loop().time() + patience
        outcomes = await self._outcomes(refs, ahead=False, until=until, for_peer=for_peer)
        refused = [number for number, outcome in enumerate(outcomes) if outcome is None]
        if refused:
            # They were in flight before somebody waited for them, and no tier wanted them. Now one has to take them.
            wanted = [refs[number] for number in refused]
            again = await self._outcomes(wanted, ahead=False, until=until, for_peer=for_peer)
            for number, outcome in zip(refused, again, strict=True):
                outcomes[number] = outcome
        return [outcome or _gone_again() for outcome in outcomes]

    async def ahead(self, refs: Sequence[BlockRef]) -> list[Outcome]:
        """Nobody waits for these blocks yet: what somebody waits for comes first, and the policy may refuse them.

        Returns one outcome per block, in order.
        """
        found = await self._outcomes(refs, ahead=True, until=None, for_peer=False)
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
            one = self.bringing.known(found, looked, ahead=True) if isinstance(found, BlockSource) else found
            if isinstance(one, BlockSource):
                begun.append(self.bringing.join(one, ahead=True, needed=when, transient=transient))
            else:
                begun.append(one)
        return begun

    async def hint(self, refs: Sequence[BlockRef]) -> None:
        """Start bringing these blocks, if there is room in the queue, and return."""
        for found in await self._threads.background(self._look_ups.look_up, refs):
            if isinstance(found, BlockSource) and self._ahead_queued < MAX_AHEAD:
                self.bringing.join(found, ahead=True)

    @property
    def _ahead_queued(self) -> int:
        """Reads ahead that wait for a slot."""
        elsewhere = self.bringing.elsewhere
        return self._slots.ahead_queued + (elsewhere.slots.ahead_queued if elsewhere is not None else 0)

    async def close(self) -> None:
        """Cancel what is in flight."""
        if self.part_reads is not None:
            await self.part_reads.close()
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self.bringing.close()

    async def _outcomes(
        self, refs: Sequence[BlockRef], *, ahead: bool, until: float | None, for_peer: bool
    ) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        looked = loop.time()
        run = self._threads.background if ahead else self._threads.run
        found = await run(self._look_ups.look_up, refs)
        outcomes = [
            self.bringing.known(one, looked, for_peer=for_peer, ahead=ahead) if isinstance(one, BlockSource) else one
            for one in found
        ]
        sources = ((number, one) for number, one in enumerate(outcomes) if isinstance(one, BlockSource))
        flights = {number: self.bringing.join(one, ahead=ahead, for_peer=for_peer) for number, one in sources}
        if flights:
            await self._wait(flights.values(), until)
        for number, flight in flights.items():
            if until is not None and flight.is_being_stored:
                outcomes[number] = await self.bringing.pass_on(flight, "a tier takes long to write one")
        return [
            self.bringing.result(flights[number]) if isinstance(outcome, BlockSource) else outcome
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


def _gone_again() -> CachefsError:
    return OriginUnavailable("the block came and went; read again")


def _ignore(_: BlockRef, __: int, ___: bytes) -> None:
    pass
