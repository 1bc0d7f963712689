"""The fetcher makes blocks resident on this node. Concurrent requests for one block share a single fetch.

All requests for a block in flight get its result. The fetch is retried until the latest of their deadlines, and each
request waits until its own.
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

# Reads ahead that may wait for slots. Hints beyond that are dropped: they would come too late to help.
MAX_AHEAD: Final = 8192

# Assumed seconds until a peer needs a block that it requests without hurry: as soon as planned blocks of this node's
# own readers (see cachefs_daemon.fetch.prefetcher).
NEEDED_BY_PEER: Final = 0.1

# Largest block, in bytes, whose readers get its bytes before it is stored. A larger one takes as long to copy through a
# socket as to store, and its readers take it in parts.
MOST_EARLY: Final = 256 << 10

# Called with the outcomes, and the source of a block that has just arrived: see `Flight.via`.
Tell = Callable[[list[Answer], str], None]
# Called with the response to another node, one entry per block.
PeerTell = Callable[[Sequence[Answer | TakeIt | LacksSnapshot]], None]


class Fetcher:
    """Fetches blocks on demand and ahead of demand. Used on the event loop."""

    def __init__(
        self,
        store: BlockStore,
        resolve: Callable[[BlockRef], BlockSource],
        threads: Threads,
        slots: FetchSlots,
        errors: ErrorLog,
        read_deadline: float,
    ) -> None:
        """resolve: returns the source of a block, or raises CachefsError; called in any thread. read_deadline: longest
        time in seconds that a reader waits for an origin."""
        self._look_ups = LookUps(store, resolve)
        self._threads = threads
        self._slots = slots
        self._errors = errors
        self.bringing = Bringing(store, threads, slots, errors, read_deadline)
        self._asking: set[asyncio.Task[None]] = set()  # running `ask` tasks
        # Called for each block that a reader waits for, with its bytes and key; 0 and empty if it is on the node.
        self.on_ask: Callable[[BlockRef, int, bytes], None] = _ignore
        self.awaited: AwaitedSnapshots | None = None  # None: there are no other nodes
        # Reads parts of blocks for random readers. None: every block is fetched as a whole.
        self.part_reads: PartReads | None = None

    @property
    def in_flight(self) -> tuple[int, int]:
        """Blocks requested from origins right now, and their bytes."""
        return self._slots.in_use, self._slots.bytes_in_use

    @property
    def fetched_blocks(self) -> int:
        """Blocks fetched from origins since the daemon started."""
        return self.bringing.fetched_blocks

    @property
    def fetched_bytes(self) -> int:
        """Bytes fetched from origins since the daemon started."""
        return self.bringing.fetched_bytes

    @property
    def latency(self) -> Latency:
        """Time of a fetch, from its slot until its block is in a tier."""
        return self.bringing.latency

    @property
    def passing(self) -> Passing:
        """Bypass blocks."""
        return self.bringing.passing

    @property
    def ahead_slots(self) -> int:
        """Slots that reads ahead may take."""
        return self._slots.ahead_slots

    @property
    def is_waited_for(self) -> bool:
        """Whether a reader waits for an origin."""
        return self._slots.is_waited_for

    @property
    def has_queue(self) -> bool:
        """Whether reads ahead wait for slots."""
        return self._ahead_queued > 0

    @property
    def failures(self) -> ReadFailures:
        """Failures to get blocks."""
        return self.bringing.failures

    def waiting_reads(self, since: float) -> list[WaitingRead]:
        """Return the blocks, and parts of blocks, that reads have waited for since *since* (loop time) or longer."""
        parts = self.part_reads.waiting_reads(since) if self.part_reads is not None else []
        return self.bringing.waiting_reads(since) + parts

    def ask(self, refs: Sequence[BlockRef], patience: float, answer: Tell, *, early: bool = False) -> None:
        """Fetch blocks as `demand` does, and call *answer* with the outcomes: immediately if known. early: pass on
        bytes as soon as they arrive, for a small block that is wanted whole, or for a part of a large one.

        Uses a thread and a task only for several blocks, or if a look-up may block.
        """
        until = asyncio.get_running_loop().time() + patience
        found = self._at_once(refs, until, answer, for_peer=False)
        if isinstance(found, BlockSource):
            if early and self.part_reads is not None and self.part_reads.takes(refs[0], found):
                self.part_reads.ask(refs[0], found, until, partial(self._pass_part, refs, found, until, answer))
            else:
                self._wait_for(refs, found, until, answer, early=early)
            # Guessing takes 20 to 45 us, so it runs after the answer, and after the task that sends the request.
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
        """Serve random reads in large blocks before the rest of the block, from now on."""
        self.part_reads = PartReads(self.bringing, self._slots)

    def ask_for_peer(self, fetch: Fetch, patience: float, answer: PeerTell) -> None:
        """Fetch blocks for another node, from the origin and not from a third node. The response may instead hand the
        fetch back to the other node, if this one is overloaded (see `Bringing.give`), or tell it to ask the next node,
        if this one lacks the snapshot."""
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
        """Return the source of a block that has to be fetched. Otherwise *answer* is called: now, with the returned
        outcome, or later, and None is returned."""
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
        """Pass on the result: the flight has landed, is stuck or out of time, or has bytes for an early reader."""
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
                # The caller counts open requests, and would wait for a missing answer until its deadline.
                text = f"internal error ({error!r}); see the daemon's log"
                self._errors.add("blocks that readers wait for", text, bug=error)
                answers = [CachefsError(text)] * len(refs)
            answer(answers, "")

        task = asyncio.create_task(ask())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def demand(self, refs: Sequence[BlockRef], patience: float, *, for_peer: bool = False) -> list[Answer]:
        """Fetch blocks that a reader waits for, for at most *patience* seconds. Returns one outcome per block, in
        order. for_peer: see `Bringing.join`."""
        until = asyncio.get_running_loop().time() + patience
        outcomes = await self._outcomes(refs, ahead=False, until=until, for_peer=for_peer)
        refused = [number for number, outcome in enumerate(outcomes) if outcome is None]
        if refused:
            # The fetch began ahead, and no tier wanted the block. On demand, a tier must take it.
            wanted = [refs[number] for number in refused]
            again = await self._outcomes(wanted, ahead=False, until=until, for_peer=for_peer)
            for number, outcome in zip(refused, again, strict=True):
                outcomes[number] = outcome
        return [outcome or _gone_again() for outcome in outcomes]

    async def ahead(self, refs: Sequence[BlockRef]) -> list[Outcome]:
        """Fetch blocks that no reader waits for yet: demand comes first, and the policy may refuse them.

        Returns one outcome per block, in order.
        """
        found = await self._outcomes(refs, ahead=True, until=None, for_peer=False)
        return [None if isinstance(one, PassingBlock) else one for one in found]

    async def start(
        self, refs: Sequence[BlockRef], needed: Sequence[float], looked: float, *, transient: bool = False
    ) -> list[Flight | Outcome]:
        """Start fetches of blocks that were in no tier at *looked*, and will be needed at *needed* (loop times, soonest
        first). transient: blocks that no policy admits become transient blocks.

        Returns for each block its flight, or its outcome if known already. The index is not read again: that releases
        the interpreter lock once per block, and the store checks the index before it writes.
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
        """Start fetches of blocks, as far as the queue has room."""
        for found in await self._threads.background(self._look_ups.look_up, refs):
            if isinstance(found, BlockSource) and self._ahead_queued < MAX_AHEAD:
                self.bringing.join(found, ahead=True)

    @property
    def _ahead_queued(self) -> int:
        elsewhere = self.bringing.elsewhere
        return self._slots.ahead_queued + (elsewhere.slots.ahead_queued if elsewhere is not None else 0)

    async def close(self) -> None:
        """Cancel all fetches."""
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
        """Wait until all flights have landed, or until *until* (loop time). With a deadline, stop at flights that are
        stuck at a disk."""
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
