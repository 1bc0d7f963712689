"""Bringing blocks onto this node: each one once, however many ask for it.

A fetch is a *flight* of its own: a reader that goes away (a killed process, a mount that died) leaves it, and those who
came meanwhile get its result. Flights somebody waits for take off before those ahead of any reader.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.block import Location
from cachefs.errors import CachefsError, OriginError, OriginUnavailable
from cachefs.messages import BlockRef
from cachefs_daemon.datasets.catalog import BlockSource
from cachefs_daemon.fetch.slots import FetchSlots
from cachefs_daemon.runtime.errorlog import ErrorLog
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

# The kernel asks again at once for a page that failed; the second try must not wait a second deadline.
FAILURE_MEMORY: Final = 2.0
RECENT: Final = 4096
# Reading ahead is a hint. More than this many waiting flights help nobody.
MAX_AHEAD: Final = 8192

# Until one was measured; an object store's.
FIRST_LATENCY: Final = 0.05

# With a full tier and a policy that never evicts, an ahead block would be fetched only to be thrown away, so after a
# refusal nothing as large is fetched ahead for a moment.
REFUSAL_MEMORY: Final = 1.0

# Where the block is now, why it could not be brought, or None where no tier's policy wants it (ahead only).
Outcome = Location | CachefsError | None


@dataclass(slots=True, eq=False)
class _Flight:
    """demanded: somebody waits for it; deadline: loop time at which reading must have ended, from the first demand;
    needed: loop time at which somebody will want what is fetched ahead (inf: nobody knows)."""

    source: BlockSource
    demanded: bool
    deadline: float
    needed: float
    task: "asyncio.Task[Outcome]" = field(init=False)


@dataclass(frozen=True, slots=True)
class _Landing:
    """When (loop time) a flight ended, and how."""

    when: float
    outcome: Outcome


class Fetcher:
    """Counters: blocks and bytes fetched since the daemon started. latency: of late, how long one takes from its turn
    to its place in a tier, in seconds; spread: how much that varies."""

    def __init__(
        self,
        store: BlockStore,
        resolve: Callable[[BlockRef], BlockSource],
        threads: Threads,
        gate: FetchSlots,
        errors: ErrorLog,
        read_deadline: float,
    ) -> None:
        self._store = store
        self._resolve = resolve
        self._threads = threads
        self._gate = gate
        self._errors = errors
        self._read_deadline = read_deadline
        self._flights: dict[bytes, _Flight] = {}
        self._recent: OrderedDict[bytes, _Landing] = OrderedDict()
        self._refused: dict[str, tuple[int, float]] = {}  # by snapshot: how large it was, when
        self.fetched_blocks = 0
        self.fetched_bytes = 0
        self.latency = FIRST_LATENCY
        self.spread = FIRST_LATENCY

    @property
    def in_flight(self) -> tuple[int, int]:
        """Blocks asked of an origin right now, and their bytes."""
        return self._gate.inside, self._gate.bytes_inside

    async def demand(self, refs: Sequence[BlockRef], patience: float) -> list[Location | CachefsError]:
        """Somebody waits for these blocks, at most *patience* seconds. One outcome per block, in order."""
        until = asyncio.get_running_loop().time() + patience
        outcomes = await self._outcomes(refs, ahead=False, until=until)
        refused = [number for number, outcome in enumerate(outcomes) if outcome is None]
        if refused:
            # They were in flight ahead of us and no tier wanted them; for us one has to take them.
            again = await self._outcomes([refs[number] for number in refused], ahead=False, until=until)
            for number, outcome in zip(refused, again, strict=True):
                outcomes[number] = outcome
        return [outcome or OriginUnavailable("the block came and went; read again") for outcome in outcomes]

    async def ahead(self, refs: Sequence[BlockRef]) -> list[Outcome]:
        """Nobody waits for these blocks yet: they yield to those somebody waits for, and to what the policy wants."""
        return await self._outcomes(refs, ahead=True, until=None)

    async def start(self, refs: Sequence[BlockRef], needed: Sequence[float]) -> list["asyncio.Task[Outcome] | Outcome"]:
        """Begin to bring blocks that will be wanted at *needed* (loop time), the soonest first. The tasks are not to be
        cancelled: others may wait for them."""
        looked = asyncio.get_running_loop().time()
        begun: list[asyncio.Task[Outcome] | Outcome] = []
        for found, when in zip(await self._threads.background(self._look_up, refs), needed, strict=True):
            one = self._known(found, looked) if isinstance(found, BlockSource) else found
            begun.append(self._join(one, ahead=True, needed=when).task if isinstance(one, BlockSource) else one)
        return begun

    async def hint(self, refs: Sequence[BlockRef]) -> None:
        """Start bringing these blocks, if there is room in the queue, and return."""
        for found in await self._threads.background(self._look_up, refs):
            if isinstance(found, BlockSource) and self._gate.ahead_waiting < MAX_AHEAD:
                self._join(found, ahead=True)

    async def close(self) -> None:
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcomes(self, refs: Sequence[BlockRef], *, ahead: bool, until: float | None) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        looked = loop.time()
        run = self._threads.background if ahead else self._threads.run
        found = await run(self._look_up, refs)
        outcomes = [self._known(one, looked) if isinstance(one, BlockSource) else one for one in found]
        flights = {n: self._join(one, ahead=ahead) for n, one in enumerate(outcomes) if isinstance(one, BlockSource)}
        if flights:
            timeout = max(0.0, until - loop.time()) if until is not None else None
            await asyncio.wait({flight.task for flight in flights.values()}, timeout=timeout)
        return [
            self._result(flights[number]) if isinstance(outcome, BlockSource) else outcome
            for number, outcome in enumerate(outcomes)
        ]

    def _look_up(self, refs: Sequence[BlockRef]) -> list[BlockSource | Location | CachefsError]:
        """In a thread: what is here already, and where the rest comes from."""
        return [self._find(ref) for ref in refs]

    def _find(self, ref: BlockRef) -> BlockSource | Location | CachefsError:
        try:
            source = self._resolve(ref)
            if ref.bad:
                self._store.repair(source.key, Location.unpack(ref.bad))
            return self._store.get(source.key) or source
        except CachefsError as error:
            return error
        except ValueError as error:
            return CachefsError(f"block {ref.number} of entry {ref.entry} was complained of wrongly: {error}")

    def _known(self, source: BlockSource, looked: float) -> BlockSource | Outcome:
        """What a flight that ended while we *looked* has brought, or how one failed a moment ago."""
        landing = self._recent.get(source.key)
        if landing is None:
            return source
        if isinstance(landing.outcome, CachefsError):
            fresh = asyncio.get_running_loop().time() - landing.when < FAILURE_MEMORY
            return landing.outcome if fresh else source
        return landing.outcome if landing.when >= looked and landing.outcome is not None else source

    def _is_futile(self, source: BlockSource) -> bool:
        length, when = self._refused.get(source.snapshot, (0, -math.inf))
        return source.length >= length and asyncio.get_running_loop().time() - when < REFUSAL_MEMORY

    def _join(self, source: BlockSource, *, ahead: bool, needed: float = math.inf) -> _Flight:
        now = asyncio.get_running_loop().time()
        flight = self._flights.get(source.key)
        if flight is None:
            flight = _Flight(source, not ahead, now + self._read_deadline, needed)
            flight.task = asyncio.create_task(self._fly(flight))
            self._flights[source.key] = flight
        elif not ahead and not flight.demanded:
            flight.demanded = True
            flight.deadline = now + self._read_deadline
            self._gate.promote(source.key)
        return flight

    def _result(self, flight: _Flight) -> Outcome:
        if flight.task.done():
            return flight.task.result() if not flight.task.cancelled() else CachefsError("the daemon is stopping")
        return OriginUnavailable(
            f"{flight.source.subject} did not come within the read deadline; its origin is slow or unreachable"
        )

    async def _fly(self, flight: _Flight) -> Outcome:
        key = flight.source.key
        outcome: Outcome
        try:
            outcome = await self._bring(flight)
        except CachefsError as error:
            outcome = error
            self._errors.add(flight.source.subject, str(error))
        except Exception as error:
            outcome = CachefsError(f"{flight.source.subject}: internal error ({error!r}); see the daemon's log")
            self._errors.add(flight.source.subject, str(outcome), bug=error)
        finally:
            del self._flights[key]
        self._recent[key] = _Landing(asyncio.get_running_loop().time(), outcome)
        self._recent.move_to_end(key)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return outcome

    async def _bring(self, flight: _Flight) -> Location | None:
        source = flight.source
        ahead = not flight.demanded
        async with self._gate.passage(source.key, source.length, ahead=ahead, needed=flight.needed):
            # Who says when a block is needed has asked for room before.
            if not flight.demanded and flight.needed == math.inf and self._is_futile(source):
                return None
            now = asyncio.get_running_loop().time()
            # What nobody waits for may have waited long for its turn; its time starts now.
            left = flight.deadline - now if flight.demanded else self._read_deadline
            if left <= 0:
                raise OriginUnavailable(
                    f"{source.subject} found no free connection within the read deadline; "
                    "its origin is slow, or raise origin.max_connections"
                )
            data = await source.origin.read(
                source.object, source.version, source.size, source.offset, source.length, left
            )
            if len(data) != source.length:
                raise OriginError(f"{source.subject}: got {len(data)} bytes for {source.length}")
            run = self._threads.run if flight.demanded else self._threads.background
            location = await run(self._store.put, source.key, data, transient=flight.demanded, snapshot=source.snapshot)
            self._measure(asyncio.get_running_loop().time() - now)
        self.fetched_blocks += 1
        self.fetched_bytes += source.length
        if location is None and flight.needed == math.inf:
            self._refused[source.snapshot] = source.length, asyncio.get_running_loop().time()
        return location

    def _measure(self, seconds: float) -> None:
        """Smoothed as TCP does with round-trip times (RFC 6298)."""
        self.spread += (abs(seconds - self.latency) - self.spread) / 16
        self.latency += (seconds - self.latency) / 16
