"""Manages all fetches in flight, each from its slot until its block is in a tier.

A fetch is independent of the readers that requested it: it continues when a reader goes away (a killed process, a dead
mount), and is retried until the latest deadline of all requests. Reads on demand are fetched before reads ahead.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from cachefs.block import Location
from cachefs.errors import CachefsError, ObjectChanged, OriginError, OriginUnavailable, StoreFull
from cachefs.planning.prefetch.latency import Latency
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.elsewhere import Elsewhere
from cachefs_daemon.fetch.flights import Flight, Outcome
from cachefs_daemon.fetch.held_parts import HeldParts, Part, completed
from cachefs_daemon.fetch.load import Tell
from cachefs_daemon.fetch.passing import Passing, PassingBlock
from cachefs_daemon.fetch.puts import Puts
from cachefs_daemon.fetch.ranges import Ranges
from cachefs_daemon.fetch.route import Route
from cachefs_daemon.fetch.search import Found
from cachefs_daemon.fetch.slots import FetchSlots, Slot
from cachefs_daemon.fetch.tally import ORIGIN, PEER, Became, Tally
from cachefs_daemon.fetch.waiting_reads import ReadFailures, WaitingRead
from cachefs_daemon.origin.base import Data
from cachefs_daemon.origin.patience import Patience
from cachefs_daemon.peers.answers import PeerBlock
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore, Put

# Seconds for which a permanent failure is remembered, such as that of a changed object.
FAILURE_MEMORY: Final = 2.0
# Seconds for which any other failure is remembered. The kernel retries a failed page at once, and must not wait for a
# second deadline; later readers must, since the origin may be back.
OUTAGE_MEMORY: Final = 0.1
# Number of fetches whose outcomes are remembered.
RECENT: Final = 4096
# Assumed seconds of a fetch before the first measurement: typical of an object store.
FIRST_LATENCY: Final = 0.05

# Seconds for which a refusal is remembered. With a full tier and a policy that never evicts, a block fetched ahead
# would be thrown away, so after a refusal nothing as large is fetched ahead for a moment.
REFUSAL_MEMORY: Final = 1.0

# Divisors of the bytes that may be in flight: the share of bypass blocks, and the share of partial blocks.
PASSING_PART: Final = 8
HELD_PART: Final = 4

# Shortest time in seconds that a reader waits for a fetch process. Once the request is late, the daemon fetches the
# block too. If the late threshold is unknown or long, it does so after 1 s without a report from the process.
LEAST_LATE: Final = 0.1

# Seconds that a reader must have left for other nodes to be asked after the origin failed.
LEAST_LEFT: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Landing:
    # Loop time of the end.
    when: float
    outcome: Outcome
    # Whether only other nodes wanted the block. Its failure then does not apply to readers here, for whom other nodes
    # are asked too.
    was_for_peer: bool


class Bringing:
    """All fetches in flight, and the outcomes of recent ones. Used on the event loop."""

    def __init__(
        self, store: BlockStore, threads: Threads, slots: FetchSlots, errors: ErrorLog, read_deadline: float
    ) -> None:
        """read_deadline: longest time in seconds that a reader waits for an origin."""
        self._threads = threads
        self._slots = slots
        self._errors = errors
        self._read_deadline = read_deadline
        self._flights: dict[bytes, Flight] = {}  # by block key
        self._recent: OrderedDict[bytes, _Landing] = OrderedDict()  # by block key, oldest first
        self.failures = ReadFailures()
        self.passing = Passing(slots.capacity // PASSING_PART)
        self.tally = Tally()
        self.parts = HeldParts(slots.capacity // HELD_PART, partial(self.tally.add, ORIGIN, Became.PASSED))
        # Called for each fetched block with its snapshot, ORIGIN or PEER, and its bytes.
        self.on_block: Callable[[str, str, int], None] = lambda snapshot, source, size: None
        self._ranges = Ranges(slots, read_deadline, self.tally.discard)
        self._puts = Puts(store, threads.run)  # for blocks with a waiting reader
        self._puts_ahead = Puts(store, threads.ahead, at_once=1)
        self._refused: dict[str, tuple[int, float]] = {}  # by snapshot: bytes of the last refused block, loop time
        # Lets a fetch process fetch a block without a waiting reader, if one can: see `Carrying.take`.
        self.carry: Callable[[BlockSource, Tell, Callable[[], None]], bool] = _not_carried
        # Returns the current source of a block: its origin may have got another endpoint since the fetch began.
        self.renewed: Callable[[BlockSource], BlockSource] = lambda source: source
        # Returns whether a refresh has replaced the snapshot with this id. Another refresh then does not help its
        # readers.
        self.is_replaced: Callable[[str], bool] = lambda snapshot: False
        self.elsewhere: Elsewhere | None = None  # None: there are no other nodes
        self.fetched_blocks = self.fetched_bytes = 0  # from origins, since the daemon started
        self.peer_blocks = self.peer_bytes = 0  # from peers, since the daemon started
        self.latency = Latency(FIRST_LATENCY)  # of a fetch, from its slot until its block is in a tier
        self._reads = Latency(FIRST_LATENCY)  # of a read from an origin, from its slot until its bytes have arrived

    async def close(self) -> None:
        """Cancel all fetches."""
        flights = list(self._flights.values())
        for flight in flights:
            if flight.search is not None:
                flight.search.cancel()
            if flight.task is None:
                flight.slot.leave()
        tasks = [flight.task for flight in flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flight in flights:
            if not flight.has_landed:
                self._end(flight, _stopping())
        await self._ranges.close()
        self.passing.close()

    def known(
        self, source: BlockSource, looked: float, *, for_peer: bool = False, ahead: bool = False
    ) -> BlockSource | Outcome:
        """Return what is known of a block: the bypass block; or the outcome of a flight that has just failed, or has
        landed since *looked* (loop time), as the look at the store may have missed it; otherwise the source.

        for_peer: another node asks. A failure of a fetch for other nodes alone does not apply to readers here. ahead:
        no read waits for it. A read of this node that meets a failure is counted as failed.
        """
        passing = self.passing.get(source.key)
        if passing is not None:
            return passing
        landing = self._recent.get(source.key)
        if landing is None:
            return source
        if isinstance(landing.outcome, CachefsError):
            if landing.was_for_peer and not for_peer:
                return source
            memory = OUTAGE_MEMORY if isinstance(landing.outcome, OriginUnavailable) else FAILURE_MEMORY
            if asyncio.get_running_loop().time() - landing.when >= memory:
                return source
            if not ahead and not for_peer:
                self.failures.add(source, landing.outcome, time.time(), waited=True)
            return landing.outcome
        return landing.outcome if landing.when >= looked and landing.outcome is not None else source

    def is_flying(self, key: bytes) -> bool:
        """Return whether the block is being fetched, or is queued."""
        return key in self._flights

    def waiting_reads(self, since: float) -> list[WaitingRead]:
        """Return the blocks that reads have waited for since *since* (loop time) or longer."""
        return [
            WaitingRead(
                key=flight.source.key,
                snapshot=flight.source.snapshot,
                endpoint=flight.source.origin.endpoint,
                since=flight.waited_since,
                has_slot=flight.slot.held or flight.is_being_stored,
                peers=flight.search.asked if flight.search is not None else (),
                trouble=flight.patience.trouble,
                is_for_peer=flight.is_for_peer,
            )
            for flight in self._flights.values()
            if flight.waited_since <= since and not flight.has_landed
        ]

    def on_landing(self, key: bytes, tell: Callable[[Flight], None]) -> None:
        """Call *tell* when the flight of the block with this key lands; never, if there is none."""
        if (flight := self._flights.get(key)) is not None:
            flight.on_landing(tell)

    def _is_futile_hint(self, flight: Flight) -> bool:
        # A caller that knows when a block is needed has checked the room before.
        if flight.needed < math.inf or flight.transient:
            return False
        source = flight.source
        length, when = self._refused.get(source.snapshot, (0, -math.inf))
        return source.length >= length and asyncio.get_running_loop().time() - when < REFUSAL_MEMORY

    def join(
        self,
        source: BlockSource,
        *,
        ahead: bool,
        needed: float = math.inf,
        transient: bool = False,
        for_peer: bool = False,
    ) -> Flight:
        """Return the flight of a block, started if there is none.

        for_peer: another node asks. No other node is then asked to fetch the block, so nodes never wait for each other,
        whatever their views of the routes. Nodes that may have the block are only asked whether they do, which they
        answer at once.
        """
        until = asyncio.get_running_loop().time() + self._read_deadline
        flight = self._flights.get(source.key)
        if flight is not None and not ahead and not flight.patience.extend(until):
            flight = None  # it has just been given up
        if flight is None:
            flight = self._new(source, ahead, Patience(until), needed)
            flight.transient, flight.is_for_peer = transient, for_peer
            if not ahead:
                flight.waited_since = until - self._read_deadline
            flight.is_read_here = not ahead and not for_peer
            if self.elsewhere is None or not self._is_looked_for(flight, self.elsewhere):
                self._queue(flight)
            return flight
        flight.is_read_here = flight.is_read_here or not (ahead or for_peer)
        flight.is_for_peer = flight.is_for_peer and for_peer  # if the origin refuses it, other nodes are asked
        if not ahead and not flight.demanded:
            flight.demanded = True
            flight.waited_since = until - self._read_deadline
            self._slots.promote(source.key)
            flight.slot.want()
            if flight.is_carried:
                # Without a slot, its bytes have arrived, and their entry into the store takes milliseconds.
                late = source.origin.endpoint.late_after(source.length) if flight.slot.held else 0.0
                late = max(LEAST_LATE, late)
                if late < math.inf:
                    asyncio.get_running_loop().call_later(late, self._fetch_beside, flight)
        elif not ahead and flight.task is None:
            self._slots.promote(source.key)  # this reader's turn may be sooner than the first asker's
        if flight.search is not None:
            if for_peer and not flight.is_given:
                flight.search.stay()
            if not ahead:
                flight.search.hurry()
        return flight

    def give(self, source: BlockSource, node_id: str, *, ahead: bool) -> bool:
        """Decide whether a requesting node should fetch the block itself, since this node is overloaded. If so, this
        node gets the block from there: other requests here wait for it, and it stays a single read of the origin.

        node_id: the requesting node; ahead: no reader waits there yet.
        """
        flight = self._flights.get(source.key)
        if self.elsewhere is None or (flight is not None and flight.is_under_way):
            return False
        endpoint = source.origin.endpoint
        waiting, running = self._slots.waiting(endpoint)
        node = self.elsewhere.able(node_id, waiting * self._reads.mean / max(1, running), ahead=ahead)
        if node is None:
            return False
        if flight is None:
            until = asyncio.get_running_loop().time() + self._read_deadline
            flight = self._new(source, True, Patience(until), math.inf)
        flight.is_given = True
        if not self._search(flight, self.elsewhere, Route(brings=node)):
            flight.is_given = False
            self._queue(flight)  # the node has just become unusable
            return False
        self.elsewhere.counts.given += 1
        return True

    def _new(self, source: BlockSource, ahead: bool, patience: Patience, needed: float) -> Flight:
        slot = self._slots.slot(source.key, source.length, source.origin.endpoint, ahead=ahead, needed=needed)
        flight = self._flights[source.key] = Flight(source, not ahead, patience, needed, slot)
        return flight

    def _queue(self, flight: Flight) -> None:
        if not (flight.source.is_whole or self.parts.of(flight.source.key)):
            self._ranges.wait(flight.source)
        flight.slot.ahead = not flight.demanded
        if flight.slot.ask(partial(self._begin, flight)):
            self._begin(flight)

    def refusal(self, source: BlockSource) -> CachefsError | None:
        """Return the origin's error for a block that is now being searched on all other nodes; None if there is no such
        search."""
        flight = self._flights.get(source.key)
        return flight.refusal if flight is not None else None

    # --- from other nodes ---------------------------------------------------------------------------------------------

    def _is_looked_for(self, flight: Flight, elsewhere: Elsewhere) -> bool:
        try:
            return self._look_elsewhere(flight, elsewhere)
        # A bug: otherwise the flight would never land, and all readers would wait for their deadlines.
        except Exception as error:
            self._errors.add(flight.source.subject, f"internal error ({error!r}); its origin is asked", bug=error)
            if flight.search is not None:
                flight.search.cancel()
                flight.search = None
            return False

    def _look_elsewhere(self, flight: Flight, elsewhere: Elsewhere) -> bool:
        """Search other nodes for the block. Returns False if none is to be asked."""
        route = elsewhere.route(flight.source)
        if route is None:
            return False
        if flight.is_for_peer:
            asked = Route(route.may_have, before_origin=route.before_origin)
            return asked.leads_elsewhere and self._search(flight, elsewhere, asked)
        flight.is_mine = route.is_mine
        futile = not flight.demanded and self._is_futile_hint(flight)
        return not futile and self._search(flight, elsewhere, route)

    def _search(self, flight: Flight, elsewhere: Elsewhere, route: Route) -> bool:
        may_take = partial(self._slots.is_idle, flight.source.origin.endpoint)
        search = elsewhere.search(flight, route, may_take, partial(self._found, flight))
        if search is None:
            return False
        flight.slot.leave()  # it may be queued for the origin
        if not flight.source.is_whole:
            self._ranges.forget(flight.source)
        flight.search = search
        if flight.is_for_peer and not flight.is_given:
            search.stay()
        search.begin()
        return True

    def _ask_all(self, flight: Flight, error: CachefsError) -> bool:
        """Ask all other nodes after the origin refused this one: they may have other credentials or disks. Returns
        False if that is useless."""
        if self.elsewhere is None or flight.is_for_peer or flight.refusal is not None:
            return False
        if isinstance(error, ObjectChanged) or flight.patience.left < LEAST_LEFT:
            return False
        if flight.search is not None:
            flight.search.cancel()
        search = self.elsewhere.search_all(flight, partial(self._found, flight))
        if search is None:
            return False
        flight.slot.leave()
        flight.refusal, flight.search, flight.task = error, search, None
        search.begin()
        return True

    def _found(self, flight: Flight, found: Found | None) -> None:
        """Handle the result of a search: a peer gave the block, or the origin is to be asked too."""
        if flight.has_landed or flight.is_being_stored:
            return
        if found is None and flight.refusal is not None:
            self._note_failure(flight, flight.refusal)
            self._end(flight, flight.refusal)
            return
        if found is None:
            self._queue(flight)
            return
        if flight.task is not None:
            flight.task.cancel()
        flight.slot.leave()
        flight.began, flight.via = found.asked, f"peer {found.node.name}"
        flight.task = asyncio.create_task(self._fly(flight, found.block))

    def result(self, flight: Flight) -> Outcome:
        if flight.has_landed:
            return flight.outcome
        why = flight.patience.trouble or "its origin is slow or unreachable"
        return OriginUnavailable(f"{flight.source.subject} did not come within the read deadline; {why}")

    def _begin(self, flight: Flight) -> None:
        if flight.is_mine and not (flight.demanded or flight.transient or self._is_futile_hint(flight)):
            flight.began = asyncio.get_running_loop().time()
            flight.is_carried = self.carry(
                flight.source, partial(self._carried, flight), partial(self._arrived, flight)
            )
        if not flight.is_carried:
            flight.task = asyncio.create_task(self._fly(flight))

    def _fetch_beside(self, flight: Flight) -> None:
        """Start a fetch in the daemon, as the fetch process is late or gave up. The first result counts."""
        if flight.task is None and not flight.has_landed:
            flight.task = asyncio.create_task(self._fly(flight))

    @staticmethod
    def _arrived(flight: Flight) -> None:
        """Give the slot back: a fetch process has the bytes. A fetch in the daemon beside it keeps the slot."""
        if flight.task is None:
            flight.slot.give_back()

    def _carried(self, flight: Flight, place: Location | None) -> None:
        """Handle the result of a fetch process: the block's location, or None if the daemon should fetch it."""
        if place is not None:
            self.tally.add(ORIGIN, Became.DISCARDED if flight.has_landed else Became.STORED, flight.source.length)
        if flight.has_landed:
            return
        if place is None:
            self._fetch_beside(flight)
            return
        if flight.task is not None:
            flight.task.cancel()
            flight.via = ""
        self._count(flight)
        self._end(flight, place)

    def _count(self, flight: Flight) -> None:
        self.latency.measure(asyncio.get_running_loop().time() - flight.began)
        if flight.via:
            self.peer_blocks += 1
            self.peer_bytes += flight.source.length
        else:
            self.fetched_blocks += 1
            self.fetched_bytes += flight.source.length
        self.on_block(flight.source.snapshot, PEER if flight.via else ORIGIN, flight.source.length)

    async def _fly(self, flight: Flight, block: PeerBlock | None = None) -> None:
        """Run the flight. block: as a peer gave it; None: ask the origin."""
        outcome: Outcome = _stopping()
        try:
            if block is not None:
                flight.arrive(block.data, asyncio.get_running_loop().time(), block.checksums)
                block = None  # no reference may keep its bytes
                outcome = await self._keep(flight, PEER)
            else:
                if not flight.slot.held:  # the bytes arrived in another way, and are still in no tier
                    await flight.slot.take(ahead=not flight.demanded, needed=flight.needed)
                outcome = await self._bring(flight)
        except CachefsError as error:
            if isinstance(error, ObjectChanged) and self.is_replaced(flight.source.snapshot):
                error = error.of_older_snapshot()
            outcome = error
            if block is None and self._ask_all(flight, error):
                return
            self._note_failure(flight, error)
        except Exception as error:
            outcome = CachefsError(f"{flight.source.subject}: internal error ({error!r}); see the daemon's log")
            self._errors.add(flight.source.subject, str(outcome), bug=error)
        finally:
            if flight.task is asyncio.current_task():  # otherwise a peer was quicker than the origin, or is asked now
                self._end(flight, outcome)

    def _note_failure(self, flight: Flight, error: CachefsError) -> None:
        self._errors.add(flight.source.subject, str(error))
        # The other node counts its own failed read.
        self.failures.add(flight.source, error, time.time(), waited=flight.is_read_here)

    def _end(self, flight: Flight, outcome: Outcome) -> None:
        if flight.has_landed:
            return  # a fetch process was quicker
        key = flight.source.key
        if flight.search is not None:
            flight.search.cancel()
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.source.is_whole:
            self._ranges.forget(flight.source)
        flight.slot.leave()
        self.parts.drop(key)
        if not isinstance(outcome, PassingBlock):  # `passing` decides how long those are remembered
            self._remember(flight, outcome)
        flight.land(outcome)

    def _remember(self, flight: Flight, outcome: Outcome) -> None:
        key = flight.source.key
        self._recent[key] = _Landing(asyncio.get_running_loop().time(), outcome, flight.is_for_peer)
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
        patience.rest = partial(self._rest, flight)
        parts = self.parts.take(source.key)
        come = None if parts or source.is_whole else await self._come_along(flight)
        data = come if come is not None else await self._read(flight, parts)
        if len(data) != source.length:
            self.tally.discard(len(data))
            raise OriginError(f"{source.subject}: got {len(data)} bytes for {source.length}")
        self._reads.measure(clock() - flight.began)
        flight.arrive(data, clock())
        if flight.early is not None and self._puts.has_room:
            flight.slot.leave()  # no reader waits for it any more
        return await self._keep(flight, ORIGIN)

    async def _read(self, flight: Flight, parts: Sequence[Part]) -> Data:
        """Return the bytes from the origin, using the *parts* that are here. If the origin's address changes meanwhile,
        retry there."""
        while True:
            source, patience = flight.source, flight.patience
            try:
                if parts:
                    return await self._complete(flight, parts)
                return await source.origin.read(source.range, patience)
            except CachefsError:
                parts = ()
                flight.source = self.renewed(source)
                if flight.source.origin is source.origin or patience.left <= 0:
                    raise

    async def _complete(self, flight: Flight, parts: Sequence[Part]) -> Data:
        """Read the gaps around the *parts*, in parallel as far as there are slots."""
        source, slots = flight.source, list[Slot]()
        for number in range(len(parts)):
            slot = self._slots.slot(source.key + bytes([number]), 0, source.origin.endpoint, ahead=not flight.demanded)
            if not slot.ask(_nothing):
                slot.leave()
                break
            slots.append(slot)
        try:
            return await completed(source, parts, flight.patience, self.tally.discard, at_once=1 + len(slots))
        finally:
            for slot in slots:
                slot.give_back()

    async def _rest(self, flight: Flight, seconds: float) -> None:
        """Pause between two attempts, and let other fetches have the slot meanwhile."""
        flight.slot.give_back()
        await asyncio.sleep(seconds)
        await flight.slot.take(ahead=not flight.demanded, needed=flight.needed)
        flight.began = asyncio.get_running_loop().time()
        trouble = flight.patience.trouble
        if trouble is not None and self.renewed(flight.source).origin is not flight.source.origin:
            raise trouble

    async def _keep(self, flight: Flight, came_from: str) -> Location | PassingBlock | None:
        became = Became.DISCARDED
        try:
            location = await self._store_or_pass(flight)
            if location is not None:
                became = Became.STORED if isinstance(location, Location) else Became.PASSED
        finally:
            self.tally.add(came_from, became, flight.source.length)
        self._count(flight)
        if location is None and flight.needed == math.inf:
            self._note_refusal(flight.source)
        return location

    async def _come_along(self, flight: Flight) -> Data | None:
        """Return the bytes of a block that comes with its neighbours in one request; None if it must be fetched by
        itself."""
        await asyncio.sleep(0)  # lets the blocks requested together with it queue for slots
        part = self._ranges.begin(flight.source, flight.slot)
        if part is None:
            return None
        try:
            with flight.patience.enforced():
                data = await part
        except TimeoutError:
            raise OriginUnavailable(f"{flight.source.subject} did not come in time") from None
        self._ranges.took(flight.source)  # now, as the source may be replaced
        if data is None:
            await flight.patience.rest(0)  # it shared the slot of another block
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
        transient = demanded or flight.transient
        block = Put(source.key, flight.data, transient, source.snapshot, flight.checksums, is_copy=not flight.is_mine)
        try:
            stored = await puts.put(block, urgent=demanded and flight.early is None)
        except Exception as error:
            if not flight.demanded:
                raise
            # A bug, possibly of any block of the batch. The bytes are here, so readers get them.
            self._errors.add("the store", f"internal error ({error!r}); see the daemon's log", bug=error)
            stored = StoreFull("the store has failed")
        if isinstance(stored, StoreFull) and not flight.demanded:
            return None
        return await self.pass_on(flight, str(stored)) if isinstance(stored, StoreFull) else stored

    async def pass_on(self, flight: Flight, reason: str) -> PassingBlock:
        block = flight.early
        if block is None:
            block = await self._threads.run(PassingBlock.of, flight.source.key, flight.data, flight.checksums)
        self.passing.add(flight.source.key, block, reason)
        return block


def _stopping() -> CachefsError:
    return CachefsError("the daemon is stopping")


def _nothing() -> None:
    pass


def _not_carried(_: BlockSource, __: Tell, ___: Callable[[], None]) -> bool:
    return False
