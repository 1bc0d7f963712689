"""The fetcher makes blocks resident on this node. Concurrent requests for one block share a single fetch.

All requests for a block in flight get its result. The fetch is retried until the latest of their deadlines, and each
request waits until its own.
"""

import asyncio
import math
import resource
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from cachefs.block import BlockLocation
from cachefs.errors import CachefsError, OriginUnavailable
from cachefs.messages import BlockRef, FetchedBlock, FetchRequest
from cachefs.planning.prefetch.fetch_window import FetchLatency
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch import block_fetch
from cachefs_daemon.fetch.block_fetch import (
    BlockFetch,
    BlockFetchOutcome,
    BlockResult,
    BypassBlock,
    BypassBlocks,
    FetchWaiter,
)
from cachefs_daemon.fetch.concurrency_limiter import ReadPurpose
from cachefs_daemon.fetch.fetch_parts import FetchParts
from cachefs_daemon.fetch.in_flight import InFlightFetches
from cachefs_daemon.fetch.random_reads import RandomReads
from cachefs_daemon.fetch.waiting_reads import ReadFailures, WaitingRead
from cachefs_daemon.store.block_store import BlockStore

# Longest time in seconds for a look-up on the loop that had to wait for a disk.
MAX_LOOKUP_SECONDS: Final = 0.01
# Seconds for which threads look up after a longer one.
THREADS_SECONDS: Final = 10.0

LookupResult = BlockSource | BlockLocation | CachefsError
# Reads ahead that may wait for permits. Hints beyond that are dropped: they would come too late to help.
MAX_AHEAD: Final = 8192

# Assumed seconds until a peer needs a block that it requests without hurry: as soon as planned blocks of this node's
# own readers (see cachefs_daemon.fetch.prefetcher).
PEER_NEEDS_BLOCK_IN: Final = 0.1

# Largest block, in bytes, whose readers get its bytes before it is stored. A larger one takes as long to copy through a
# socket as to store, and its readers take it in parts.
MAX_EARLY_BYTES: Final = 256 << 10

# Called with the outcomes, and the source of a block that has just arrived: see `BlockFetch.source_peer`.
ResultCallback = Callable[[list[BlockResult], str], None]
# Result for another node; a FetchedBlock tells it to get the block elsewhere.
PeerOutcome = BlockResult | FetchedBlock
# Called with the response to another node, one entry per block.
PeerResultCallback = Callable[[Sequence[PeerOutcome]], None]
# Fetches the blocks that another node requests, within its deadline in seconds, and passes on the results. It must not
# fetch them from another node.
FetchForPeer = Callable[[FetchRequest, float, PeerResultCallback], None]
# Called for each block that a reader waits for, with its bytes and key; 0 and empty if it is on the node.
DemandListener = Callable[[BlockRef, int, bytes], None]

# Response to another node that is to fetch the block itself, for both nodes.
FETCH_YOURSELF: Final = FetchedBlock(location=b"", must_fetch_itself=True)


class BlockLookups:
    """Looks up blocks: in a tier, or else at their origin. Used on the event loop, except for `look_up` and
    `find_sources`, which run in threads.

    A look-up takes 10 us, also beside a busy thread, and to hand it to a thread takes 200 us. So look-ups for waiting
    readers run on the event loop. They read pages of the snapshot and of the index that the mount has just read itself,
    so the pages are in memory. If memory is short and pages had to come from a slow disk after all, look-ups go to
    threads for a while. Reports of bad bytes always do, since they read the tiers.
    """

    def __init__(self, store: BlockStore, resolve: Callable[[BlockRef], BlockSource]) -> None:
        """resolve: returns the source of a block, or raises CachefsError. Called in any thread."""
        self._store = store
        self._resolve = resolve
        self._in_threads_until = -math.inf  # monotonic seconds
        self._disk_reads = count_disk_waits()  # at the last check

    def look_up_now(self, ref: BlockRef) -> LookupResult | None:
        """Return the result without blocking; None if only a thread can look it up."""
        began = time.monotonic()
        if ref.is_tier_slow:
            # A disk hangs, possibly that of the state directory.
            self._in_threads_until = began + THREADS_SECONDS
        if ref.failed_location or ref.is_tier_slow or began < self._in_threads_until:
            return None
        found: LookupResult
        try:
            source = self._resolve(ref)
            found = self._store.get(source.key) or source
        except CachefsError as error:
            found = error
        ended = time.monotonic()
        if ended - began > MAX_LOOKUP_SECONDS:
            self._note_slow(ended)
        return found

    def find_sources_now(self, refs: Sequence[BlockRef]) -> list[LookupResult]:
        """Return the sources of blocks that are in no tier, without blocking. Stops early if look-ups are slow: call
        `find_sources` in a thread for the rest of *refs*."""
        found: list[LookupResult] = []
        began = now = time.monotonic()
        while len(found) < len(refs) and now >= self._in_threads_until and now - began <= MAX_LOOKUP_SECONDS:
            found.append(self._source(refs[len(found)]))
            now = time.monotonic()
        if now - began > MAX_LOOKUP_SECONDS:
            self._note_slow(now)
        return found

    def find_sources(self, refs: Sequence[BlockRef]) -> list[LookupResult]:
        """Return the sources of blocks that are in no tier. Runs in a thread."""
        return [self._source(ref) for ref in refs]

    def _source(self, ref: BlockRef) -> LookupResult:
        try:
            return self._resolve(ref)
        except CachefsError as error:
            return error

    def _note_slow(self, now: float) -> None:
        """Switch to threads, if the delay was due to a disk. On a busy machine processes wait 40 ms for a processor at
        times, where threads would not help."""
        reads, self._disk_reads = self._disk_reads, count_disk_waits()
        if self._disk_reads > reads:
            self._in_threads_until = now + THREADS_SECONDS

    def look_up(self, refs: Sequence[BlockRef]) -> list[LookupResult]:
        """Look up each block. Runs in a thread."""
        return [self._look_up_one(ref) for ref in refs]

    def _look_up_one(self, ref: BlockRef) -> LookupResult:
        try:
            source = self._resolve(ref)
            if ref.is_tier_slow:
                self._store.drop_unresponsive(source.key, BlockLocation.unpack(ref.failed_location))
            elif ref.failed_location:
                self._store.repair(source.key, BlockLocation.unpack(ref.failed_location))
            return self._store.get(source.key) or source
        except CachefsError as error:
            return error
        except ValueError as error:
            return CachefsError(f"block {ref.number} of entry {ref.entry} was reported at an invalid location: {error}")


def count_disk_waits() -> int:
    """Return how often this thread has waited for a page from a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


class Fetcher:
    """Fetches blocks on demand and ahead of demand. Used on the event loop."""

    def __init__(self, parts: FetchParts) -> None:
        self._lookups = BlockLookups(parts.store, parts.sources.resolve)
        self._threads = parts.threads
        self._limiter = parts.limiter
        self._errors = parts.errors
        self._peers = parts.peers
        self.in_flight_fetches = InFlightFetches(parts)
        self._request_tasks: set[asyncio.Task[None]] = set()  # running tasks of `request_on_demand`
        self._demand_listeners: list[DemandListener] = []
        # Reads parts of blocks for random readers. None: every block is fetched as a whole.
        self._random_reads = (
            RandomReads(self.in_flight_fetches, parts.limiter, parts.sources.renew)
            if parts.reads_parts and not parts.peers.has_nodes
            else None
        )

    def add_demand_listener(self, listener: DemandListener) -> None:
        """Call *listener* for each block that a reader waits for, from now on."""
        self._demand_listeners.append(listener)

    @property
    def in_flight(self) -> tuple[int, int]:
        """Blocks requested from origins right now, and their bytes."""
        return self._limiter.in_use, self._limiter.bytes_in_use

    @property
    def fetched_blocks(self) -> int:
        """Blocks fetched from origins since the daemon started."""
        return self.in_flight_fetches.fetched_blocks

    @property
    def fetched_bytes(self) -> int:
        """Bytes fetched from origins since the daemon started."""
        return self.in_flight_fetches.fetched_bytes

    @property
    def latency(self) -> FetchLatency:
        """Time of a fetch, from its permit until its block is in a tier."""
        return self.in_flight_fetches.latency

    @property
    def bypass_blocks(self) -> BypassBlocks:
        """Bypass blocks."""
        return self.in_flight_fetches.bypass_blocks

    @property
    def ahead_permits(self) -> int:
        """Permits that reads ahead may take."""
        return self._limiter.ahead_permits

    @property
    def weights(self) -> dict[str, float]:
        """Weights of jobs where they share an origin; 1 where missing. May be changed."""
        return self._limiter.weights

    @property
    def has_waiting_reader(self) -> bool:
        """Whether a reader waits for an origin."""
        return self._limiter.has_waiting_reader

    @property
    def has_queued_ahead(self) -> bool:
        """Whether reads ahead wait for permits."""
        return self._ahead_queued > 0

    @property
    def failures(self) -> ReadFailures:
        """Failures to get blocks."""
        return self.in_flight_fetches.failures

    def waiting_reads(self, since: float) -> list[WaitingRead]:
        """Return the blocks, and parts of blocks, that reads have waited for since *since* (loop time) or longer."""
        parts = self._random_reads.waiting_reads(since) if self._random_reads is not None else []
        return self.in_flight_fetches.waiting_reads(since) + parts

    def request_on_demand(
        self, refs: Sequence[BlockRef], seconds: float, on_result: ResultCallback, *, may_be_early: bool = False
    ) -> None:
        """Fetch blocks as `fetch_on_demand` does, and call *on_result* with the outcomes: immediately if known.
        may_be_early: pass on bytes as soon as they arrive, for a small block that is wanted whole, or for a part of a
        large one.

        Uses a thread and a task only for several blocks, or if a look-up may block.
        """
        until = asyncio.get_running_loop().time() + seconds
        found = self._result_or_source(refs, until, on_result, for_peer=False)
        if isinstance(found, BlockSource):
            if may_be_early and self._random_reads is not None and self._random_reads.can_read_part(refs[0], found):
                self._random_reads.read_part(
                    refs[0], found, until, partial(self._return_part, refs, found, until, on_result)
                )
            else:
                self._wait_for_fetch(refs, found, until, on_result, early=may_be_early)
            # Guessing takes 20 to 45 us, so it runs after the response, and after the task that sends the request.
            for listener in self._demand_listeners:
                asyncio.get_running_loop().call_soon(listener, refs[0], found.length, found.key)
        elif found is not None and not isinstance(found, CachefsError):
            for listener in self._demand_listeners:
                listener(refs[0], 0, b"")

    def _wait_for_fetch(
        self, refs: Sequence[BlockRef], source: BlockSource, until: float, on_result: ResultCallback, *, early: bool
    ) -> None:
        takes_all = refs[0].start == 0 and refs[0].size >= source.length
        pass_on = partial(self._return_result, refs, until, on_result, for_peer=False)
        early = early and takes_all and source.length <= MAX_EARLY_BYTES
        FetchWaiter(self.in_flight_fetches.join_or_start_fetch(source, ahead=False), until, pass_on, early=early)

    def _return_part(
        self,
        refs: Sequence[BlockRef],
        source: BlockSource,
        until: float,
        on_result: ResultCallback,
        part: BypassBlock | None,
    ) -> None:
        if part is not None:
            on_result([part], "")
        else:
            self._wait_for_fetch(refs, source, until, on_result, early=False)

    def request_for_peer(self, fetch: FetchRequest, until: float, on_result: PeerResultCallback) -> None:
        """Fetch blocks for another node until *until* (loop time), from the origin, or from a third node that has them.
        The response may instead hand the fetch back to the other node, if this one is overloaded (see
        `InFlightFetches.delegate_fetch`)."""
        refs = fetch.blocks

        def pass_outcomes(outcomes: list[BlockResult], _: str) -> None:
            on_result(outcomes)

        source = self._result_or_source(refs, until, pass_outcomes, for_peer=True)
        if not isinstance(source, BlockSource):
            return
        if (refusal := self.in_flight_fetches.origin_refusal(source)) is not None:
            on_result([refusal])
            return
        if fetch.may_take and self.in_flight_fetches.delegate_fetch(source, fetch.peer, ahead=fetch.unhurried):
            on_result([FETCH_YOURSELF])
            return
        now = asyncio.get_running_loop().time()
        purpose = ReadPurpose(
            fetch.job, now + PEER_NEEDS_BLOCK_IN if fetch.unhurried else math.inf, now + fetch.urgent_after
        )
        peer_fetch = self.in_flight_fetches.join_or_start_fetch(
            source, ahead=fetch.unhurried, purpose=purpose, may_be_transient=True, for_peer=True
        )
        pass_on = partial(self._return_result, refs, until, pass_outcomes, for_peer=True)
        FetchWaiter(peer_fetch, until, pass_on, early=source.length <= MAX_EARLY_BYTES)

    def _result_or_source(
        self, refs: Sequence[BlockRef], until: float, on_result: ResultCallback, *, for_peer: bool
    ) -> BlockSource | BlockFetchOutcome:
        """Return the source of a block that has to be fetched. Otherwise *on_result* is called: now, with the returned
        outcome, or later, and None is returned."""
        looked_up_at = asyncio.get_running_loop().time()
        found = self._lookups.look_up_now(refs[0]) if len(refs) == 1 else None
        if found is None:
            self._fetch_in_task(refs, until, on_result, for_peer=for_peer)
            return None
        one = (
            self.in_flight_fetches.recent_outcome_or_source(found, looked_up_at, for_peer=for_peer)
            if isinstance(found, BlockSource)
            else found
        )
        if not isinstance(one, BlockSource):
            one = one or _evicted_before_read()
            on_result([one], "")
        return one

    def _return_result(
        self, refs: Sequence[BlockRef], until: float, on_result: ResultCallback, fetch: BlockFetch, *, for_peer: bool
    ) -> None:
        """Pass on the result: the fetch has ended, is stuck or out of time, or has bytes for an early reader."""
        outcome = fetch.early_block if fetch.is_being_stored else self.in_flight_fetches.outcome_of(fetch)
        if outcome is None:
            self._fetch_in_task(refs, until, on_result, for_peer=for_peer)  # see `fetch_on_demand`
        else:
            on_result([outcome], fetch.source_peer)

    def _fetch_in_task(
        self, refs: Sequence[BlockRef], until: float, on_result: ResultCallback, *, for_peer: bool
    ) -> None:
        async def request_blocks() -> None:
            outcomes: list[BlockResult]
            try:
                outcomes = await self.fetch_on_demand(
                    refs, until - asyncio.get_running_loop().time(), for_peer=for_peer
                )
            except Exception as error:
                # The caller counts open requests, and would wait for a missing response until its deadline.
                text = f"internal error ({error!r}); see the daemon's log"
                self._errors.add("blocks that readers wait for", text, bug=error)
                outcomes = [CachefsError(text)] * len(refs)
            on_result(outcomes, "")

        task = asyncio.create_task(request_blocks())
        self._request_tasks.add(task)
        task.add_done_callback(self._request_tasks.discard)

    async def fetch_on_demand(
        self, refs: Sequence[BlockRef], seconds: float, *, for_peer: bool = False
    ) -> list[BlockResult]:
        """Fetch blocks that a reader waits for, for at most *seconds* seconds. Returns one outcome per block, in
        order. for_peer: see `InFlightFetches.join_or_start_fetch`."""
        until = asyncio.get_running_loop().time() + seconds
        outcomes = await self._fetch_outcomes(refs, ahead=False, until=until, for_peer=for_peer)
        refused = [number for number, outcome in enumerate(outcomes) if outcome is None]
        if refused:
            # The fetch began ahead, and no tier wanted the block. On demand, a tier must take it.
            refused_refs = [refs[number] for number in refused]
            again = await self._fetch_outcomes(refused_refs, ahead=False, until=until, for_peer=for_peer)
            for number, outcome in zip(refused, again, strict=True):
                outcomes[number] = outcome
        return [outcome or _evicted_before_read() for outcome in outcomes]

    async def fetch_ahead(self, refs: Sequence[BlockRef]) -> list[BlockFetchOutcome]:
        """Fetch blocks that no reader waits for yet: demand comes first, and the policy may refuse them.

        Returns one outcome per block, in order.
        """
        found = await self._fetch_outcomes(refs, ahead=True, until=None, for_peer=False)
        return [None if isinstance(one, BypassBlock) else one for one in found]

    async def start_fetches(
        self,
        refs: Sequence[BlockRef],
        purposes: Sequence[ReadPurpose],
        looked_up_at: float,
        *,
        may_be_transient: bool = False,
    ) -> list[BlockFetch | BlockFetchOutcome]:
        """Start fetches of blocks that were in no tier at *looked_up_at* (loop time). purposes: of each block, those
        that are needed soonest first. may_be_transient: blocks that no policy admits become transient blocks.

        Returns for each block its fetch, or its outcome if known already. The index is not read again: that releases
        the interpreter lock once per block, and the store checks the index before it writes.
        """
        sources = self._lookups.find_sources_now(refs)
        if remaining := refs[len(sources) :]:
            sources += await self._threads.background(self._lookups.find_sources, remaining)
        begun: list[BlockFetch | BlockFetchOutcome] = []
        for found, purpose in zip(sources, purposes, strict=True):
            one = (
                self.in_flight_fetches.recent_outcome_or_source(found, looked_up_at, ahead=True)
                if isinstance(found, BlockSource)
                else found
            )
            if isinstance(one, BlockSource):
                begun.append(
                    self.in_flight_fetches.join_or_start_fetch(
                        one, ahead=True, purpose=purpose, may_be_transient=may_be_transient
                    )
                )
            else:
                begun.append(one)
        return begun

    async def start_hinted_fetches(self, refs: Sequence[BlockRef]) -> None:
        """Start fetches of blocks, as far as the queue has room."""
        for found in await self._threads.background(self._lookups.look_up, refs):
            if isinstance(found, BlockSource) and self._ahead_queued < MAX_AHEAD:
                self.in_flight_fetches.join_or_start_fetch(found, ahead=True)

    @property
    def _ahead_queued(self) -> int:
        return self._limiter.queued_ahead + self._peers.queued_ahead

    async def close(self) -> None:
        """Cancel all fetches."""
        if self._random_reads is not None:
            await self._random_reads.close()
        for task in self._request_tasks:
            task.cancel()
        await asyncio.gather(*self._request_tasks, return_exceptions=True)
        await self.in_flight_fetches.close()

    async def _fetch_outcomes(
        self, refs: Sequence[BlockRef], *, ahead: bool, until: float | None, for_peer: bool
    ) -> list[BlockFetchOutcome]:
        loop = asyncio.get_running_loop()
        looked_up_at = loop.time()
        run = self._threads.background if ahead else self._threads.run
        found = await run(self._lookups.look_up, refs)
        outcomes = [
            self.in_flight_fetches.recent_outcome_or_source(one, looked_up_at, for_peer=for_peer, ahead=ahead)
            if isinstance(one, BlockSource)
            else one
            for one in found
        ]
        sources = ((number, one) for number, one in enumerate(outcomes) if isinstance(one, BlockSource))
        fetches = {
            number: self.in_flight_fetches.join_or_start_fetch(one, ahead=ahead, for_peer=for_peer)
            for number, one in sources
        }
        if fetches:
            await self._wait_until_done(fetches.values(), until)
        for number, fetch in fetches.items():
            if until is not None and fetch.is_being_stored:
                outcomes[number] = await self.in_flight_fetches.bypass(fetch, "a tier is slow to write a block")
        return [
            self.in_flight_fetches.outcome_of(fetches[number]) if isinstance(outcome, BlockSource) else outcome
            for number, outcome in enumerate(outcomes)
        ]

    async def _wait_until_done(self, fetches: Collection[BlockFetch], until: float | None) -> None:
        """Wait until all fetches have ended, or until *until* (loop time). With a deadline, stop at fetches that are
        stuck at a disk."""
        loop = asyncio.get_running_loop()
        ends = {fetch: fetch.done_future() for fetch in fetches if not fetch.is_done}
        while waiting := [
            end for fetch, end in ends.items() if not end.done() and (until is None or not fetch.is_stuck(loop.time()))
        ]:
            timeout = min(max(0.0, until - loop.time()), block_fetch.STORE_WAIT_SECONDS) if until is not None else None
            _, left = await asyncio.wait(waiting, timeout=timeout)
            if not left or (until is not None and loop.time() >= until):
                return


def _evicted_before_read() -> CachefsError:
    return OriginUnavailable("the block was evicted before it was read; read again")
