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

from cachefs.block import BlockLocation
from cachefs.errors import CachefsError, ObjectChanged, OriginError, OriginUnavailable, StoreFull
from cachefs.planning.prefetch.latency import FetchLatency
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.block_fetch import BlockFetch, BlockFetchOutcome
from cachefs_daemon.fetch.bypass import BypassBlock, BypassBlocks
from cachefs_daemon.fetch.concurrency_limiter import Permit
from cachefs_daemon.fetch.fetch_counts import ORIGIN, PEER, FetchResult
from cachefs_daemon.fetch.fetch_parts import FetchParts
from cachefs_daemon.fetch.merged_reads import MergedReads
from cachefs_daemon.fetch.partial_blocks import BlockPart, PartialBlocks, read_with_parts
from cachefs_daemon.fetch.tier_writes import TierWrites
from cachefs_daemon.fetch.waiting_reads import ReadFailures, WaitingRead
from cachefs_daemon.origin.base import Data
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.ports import BlockSearch, FoundBlock
from cachefs_daemon.store.block_store import BlockToStore

# Seconds for which a permanent failure is remembered, such as that of a changed object.
FAILURE_MEMORY_SECONDS: Final = 2.0
# Seconds for which any other failure is remembered. The kernel retries a failed page at once, and must not wait for a
# second deadline; later readers must, since the origin may be back.
OUTAGE_MEMORY_SECONDS: Final = 0.1
# Number of fetches whose outcomes are remembered.
MAX_RECENT_OUTCOMES: Final = 4096
# Assumed seconds of a fetch before the first measurement: typical of an object store.
FIRST_LATENCY: Final = 0.05

# Seconds for which a refusal is remembered. With a full tier and a policy that never evicts, a block fetched ahead
# would be thrown away, so after a refusal nothing as large is fetched ahead for a moment.
REFUSAL_MEMORY_SECONDS: Final = 1.0

# Divisors of the bytes that may be in flight: the share of bypass blocks, and the share of partial blocks.
BYPASS_DIVISOR: Final = 8
PARTIAL_DIVISOR: Final = 4

# Shortest time in seconds that a reader waits for a fetch process. Once the request is late, the daemon fetches the
# block too. If the late threshold is unknown or long, it does so after 1 s without a report from the process.
MIN_PROCESS_WAIT: Final = 0.1

# Seconds that a reader must have left for other nodes to be asked after the origin failed.
MIN_SECONDS_FOR_PEERS: Final = 1.0


# Called for each fetched block with its snapshot, ORIGIN or PEER, and its bytes.
BlockListener = Callable[[str, str, int], None]


@dataclass(frozen=True, slots=True)
class _RecentOutcome:
    # Loop time of the end.
    ended_at: float
    outcome: BlockFetchOutcome
    # Whether only other nodes wanted the block. Its failure then does not apply to readers here, for whom other nodes
    # are asked too.
    was_for_peer: bool


class InFlightFetches:
    """All fetches in flight, and the outcomes of recent ones. Used on the event loop."""

    def __init__(self, parts: FetchParts) -> None:
        slots, self._threads, self._errors = parts.limiter, parts.threads, parts.errors
        self._limiter = slots
        self._read_deadline = parts.read_deadline
        self._sources = parts.sources
        self._peers = parts.peers
        self._fetch_in_process = parts.fetch_in_process
        self._fetches: dict[bytes, BlockFetch] = {}  # by block key
        self._recent: OrderedDict[bytes, _RecentOutcome] = OrderedDict()  # by block key, oldest first
        self.failures = ReadFailures()
        self.bypass_blocks = BypassBlocks(slots.capacity // BYPASS_DIVISOR)
        self.counts = parts.counts
        self.partial_blocks = PartialBlocks(
            slots.capacity // PARTIAL_DIVISOR, partial(self.counts.count_block, ORIGIN, FetchResult.BYPASSED)
        )
        self._block_listeners: list[BlockListener] = []
        self._merged_reads = MergedReads(slots, parts.read_deadline, self.counts.count_discarded)
        self._tier_writes = TierWrites(parts.store, parts.threads.run)  # for blocks with a waiting reader
        self._tier_writes_ahead = TierWrites(parts.store, parts.threads.ahead, batches_at_once=1)
        self._refused: dict[str, tuple[int, float]] = {}  # by snapshot: bytes of the last refused block, loop time
        self.fetched_blocks = self.fetched_bytes = 0  # from origins, since the daemon started
        self.peer_blocks = self.peer_bytes = 0  # from peers, since the daemon started
        self.latency = FetchLatency(FIRST_LATENCY)  # of a fetch, from its slot until its block is in a tier
        self._read_latency = FetchLatency(
            FIRST_LATENCY
        )  # of a read from an origin, from its slot until its bytes have arrived

    def add_block_listener(self, listener: BlockListener) -> None:
        """Call *listener* for each fetched block from now on."""
        self._block_listeners.append(listener)

    async def close(self) -> None:
        """Cancel all fetches."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            if fetch.peer_search is not None:
                fetch.peer_search.cancel()
            if fetch.task is None:
                fetch.permit.cancel_or_release()
        tasks = [flight.task for flight in fetches if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for fetch in fetches:
            if not fetch.is_done:
                self._finish_fetch(fetch, _daemon_stopping())
        await self._merged_reads.close()
        self.bypass_blocks.close()

    def recent_outcome_or_source(
        self, source: BlockSource, looked_up_at: float, *, for_peer: bool = False, ahead: bool = False
    ) -> BlockSource | BlockFetchOutcome:
        """Return what is known of a block: the bypass block; or the outcome of a flight that has just failed, or has
        landed since *looked_up_at* (loop time), as the look at the store may have missed it; otherwise the source.

        for_peer: another node asks. A failure of a fetch for other nodes alone does not apply to readers here. ahead:
        no read waits for it. A read of this node that meets a failure is counted as failed.
        """
        passing = self.bypass_blocks.get(source.key)
        if passing is not None:
            return passing
        landing = self._recent.get(source.key)
        if landing is None:
            return source
        if isinstance(landing.outcome, CachefsError):
            if landing.was_for_peer and not for_peer:
                return source
            memory = OUTAGE_MEMORY_SECONDS if isinstance(landing.outcome, OriginUnavailable) else FAILURE_MEMORY_SECONDS
            if asyncio.get_running_loop().time() - landing.ended_at >= memory:
                return source
            if not ahead and not for_peer:
                self.failures.add_failure(source, landing.outcome, time.time(), waited=True)
            return landing.outcome
        return landing.outcome if landing.ended_at >= looked_up_at and landing.outcome is not None else source

    def is_fetching(self, key: bytes) -> bool:
        """Return whether the block is being fetched, or is queued."""
        return key in self._fetches

    def waiting_reads(self, since: float) -> list[WaitingRead]:
        """Return the blocks that reads have waited for since *since* (loop time) or longer."""
        return [
            WaitingRead(
                key=fetch.source.key,
                snapshot=fetch.source.snapshot,
                endpoint=fetch.source.origin.endpoint,
                since=fetch.waited_since,
                has_permit=fetch.permit.is_held or fetch.is_being_stored,
                peers=fetch.peer_search.requested_nodes if fetch.peer_search is not None else (),
                trouble=fetch.deadline.last_error,
                is_for_peer=fetch.is_for_peer,
            )
            for fetch in self._fetches.values()
            if fetch.waited_since <= since and not fetch.is_done
        ]

    def add_done_callback(self, key: bytes, callback: Callable[[BlockFetch], None]) -> None:
        """Call *callback* when the flight of the block with this key lands; never, if there is none."""
        if (fetch := self._fetches.get(key)) is not None:
            fetch.add_done_callback(callback)

    def _is_likely_refused(self, fetch: BlockFetch) -> bool:
        # A caller that knows when a block is needed has checked the room before.
        if fetch.needed_at < math.inf or fetch.may_be_transient:
            return False
        source = fetch.source
        length, when = self._refused.get(source.snapshot, (0, -math.inf))
        return source.length >= length and asyncio.get_running_loop().time() - when < REFUSAL_MEMORY_SECONDS

    def join_or_start_fetch(
        self,
        source: BlockSource,
        *,
        ahead: bool,
        needed_at: float = math.inf,
        may_be_transient: bool = False,
        for_peer: bool = False,
    ) -> BlockFetch:
        """Return the flight of a block, started if there is none.

        for_peer: another node asks. No other node is then asked to fetch the block, so nodes never wait for each other,
        whatever their views of the routes. Nodes that may have the block are only asked whether they do, which they
        answer at once.
        """
        until = asyncio.get_running_loop().time() + self._read_deadline
        fetch = self._fetches.get(source.key)
        if fetch is not None and not ahead and not fetch.deadline.extend(until):
            fetch = None  # it has just been given up
        if fetch is None:
            fetch = self._add_fetch(source, ahead, Deadline(until), needed_at)
            fetch.may_be_transient, fetch.is_for_peer = may_be_transient, for_peer
            if not ahead:
                fetch.waited_since = until - self._read_deadline
            fetch.has_local_reader = not ahead and not for_peer
            if not self._try_peers_first(fetch):
                self._queue_for_permit(fetch)
            return fetch
        fetch.has_local_reader = fetch.has_local_reader or not (ahead or for_peer)
        fetch.is_for_peer = fetch.is_for_peer and for_peer  # if the origin refuses it, other nodes are asked
        if not ahead and not fetch.has_reader:
            fetch.has_reader = True
            fetch.waited_since = until - self._read_deadline
            self._limiter.promote(source.key)
            fetch.permit.count_as_demand()
            if fetch.is_in_process:
                # Without a slot, its bytes have arrived, and their entry into the store takes milliseconds.
                late = source.origin.endpoint.late_after(source.length) if fetch.permit.is_held else 0.0
                late = max(MIN_PROCESS_WAIT, late)
                if late < math.inf:
                    asyncio.get_running_loop().call_later(late, self._fetch_in_daemon_too, fetch)
        elif not ahead and fetch.task is None:
            self._limiter.promote(source.key)  # this reader's turn may be sooner than the first asker's
        if fetch.peer_search is not None:
            if for_peer and not fetch.is_delegated:
                fetch.peer_search.forbid_delegation()
            if not ahead:
                fetch.peer_search.raise_priority()
        return fetch

    def delegate_fetch(self, source: BlockSource, node_id: str, *, ahead: bool) -> bool:
        """Decide whether a requesting node should fetch the block itself, since this node is overloaded. If so, this
        node gets the block from there: other requests here wait for it, and it stays a single read of the origin.

        node_id: the requesting node; ahead: no reader waits there yet.
        """
        fetch = self._fetches.get(source.key)
        if fetch is not None and fetch.is_running:
            return False
        endpoint = source.origin.endpoint
        waiting, running = self._limiter.waiting_and_running(endpoint)
        if not self._peers.can_delegate(node_id, waiting * self._read_latency.mean / max(1, running), ahead=ahead):
            return False
        if fetch is None:
            until = asyncio.get_running_loop().time() + self._read_deadline
            fetch = self._add_fetch(source, True, Deadline(until), math.inf)
        fetch.is_delegated = True
        search = self._peers.search_delegated(fetch, node_id, partial(self._handle_search_result, fetch))
        if search is None:
            fetch.is_delegated = False
            self._queue_for_permit(fetch)  # the node has just become unusable
            return False
        self._start_peer_search(fetch, search)
        return True

    def _add_fetch(self, source: BlockSource, ahead: bool, deadline: Deadline, needed_at: float) -> BlockFetch:
        slot = self._limiter.new_permit(
            source.key, source.length, source.origin.endpoint, ahead=ahead, needed_at=needed_at
        )
        fetch = self._fetches[source.key] = BlockFetch(source, not ahead, deadline, needed_at, slot)
        return fetch

    def _queue_for_permit(self, fetch: BlockFetch) -> None:
        if not (fetch.source.is_whole or self.partial_blocks.parts_of(fetch.source.key)):
            self._merged_reads.add_waiting_block(fetch.source)
        fetch.permit.is_ahead = not fetch.has_reader
        if fetch.permit.request(partial(self._start_fetch, fetch)):
            self._start_fetch(fetch)

    def origin_refusal(self, source: BlockSource) -> CachefsError | None:
        """Return the origin's error for a block that is now being searched on all other nodes; None if there is no such
        search."""
        fetch = self._fetches.get(source.key)
        return fetch.origin_refusal if fetch is not None else None

    # --- from other nodes ---------------------------------------------------------------------------------------------

    def _try_peers_first(self, fetch: BlockFetch) -> bool:
        """Search other nodes for the block. Returns False if none is to be asked."""
        try:
            route = self._peers.find_route(fetch)
            if route is None:
                return False
            fetch.is_kept_here = route.is_kept_here
            if not fetch.has_reader and self._is_likely_refused(fetch):
                return False
            search = route.search(partial(self._handle_search_result, fetch))
            if search is None:
                return False
            self._start_peer_search(fetch, search)
            return True
        # A bug: otherwise the flight would never land, and all readers would wait for their deadlines.
        except Exception as error:
            self._errors.add(fetch.source.subject, f"internal error ({error!r}); its origin is asked", bug=error)
            if fetch.peer_search is not None:
                fetch.peer_search.cancel()
                fetch.peer_search = None
            return False

    def _start_peer_search(self, fetch: BlockFetch, search: BlockSearch) -> None:
        fetch.permit.cancel_or_release()  # it may be queued for the origin
        if not fetch.source.is_whole:
            self._merged_reads.remove_block(fetch.source)
        fetch.peer_search = search
        if fetch.is_for_peer and not fetch.is_delegated:
            search.forbid_delegation()
        search.start()

    def _search_all_nodes(self, fetch: BlockFetch, error: CachefsError) -> bool:
        """Ask all other nodes after the origin refused this one: they may have other credentials or disks. Returns
        False if that is useless."""
        if fetch.is_for_peer or fetch.origin_refusal is not None:
            return False
        if isinstance(error, ObjectChanged) or fetch.deadline.seconds_left < MIN_SECONDS_FOR_PEERS:
            return False
        if fetch.peer_search is not None:
            fetch.peer_search.cancel()
        search = self._peers.search_all(fetch, partial(self._handle_search_result, fetch))
        if search is None:
            return False
        fetch.permit.cancel_or_release()
        fetch.origin_refusal, fetch.peer_search, fetch.task = error, search, None
        search.start()
        return True

    def _handle_search_result(self, fetch: BlockFetch, found: FoundBlock | None) -> None:
        """Handle the result of a search: a peer gave the block, or the origin is to be asked too."""
        if fetch.is_done or fetch.is_being_stored:
            return
        if found is None and fetch.origin_refusal is not None:
            self._note_failure(fetch, fetch.origin_refusal)
            self._finish_fetch(fetch, fetch.origin_refusal)
            return
        if found is None:
            self._queue_for_permit(fetch)
            return
        if fetch.task is not None:
            fetch.task.cancel()
        fetch.permit.cancel_or_release()
        fetch.started_at, fetch.source_peer = found.requested_at, f"peer {found.node_name}"
        fetch.task = asyncio.create_task(self._run_fetch(fetch, found))

    def outcome_of(self, fetch: BlockFetch) -> BlockFetchOutcome:
        if fetch.is_done:
            return fetch.outcome
        why = fetch.deadline.last_error or "its origin is slow or unreachable"
        return OriginUnavailable(f"{fetch.source.subject} did not come within the read deadline; {why}")

    def _start_fetch(self, fetch: BlockFetch) -> None:
        if fetch.is_kept_here and not (fetch.has_reader or fetch.may_be_transient or self._is_likely_refused(fetch)):
            fetch.started_at = asyncio.get_running_loop().time()
            fetch.is_in_process = self._fetch_in_process(
                fetch.source,
                partial(self._handle_process_result, fetch),
                partial(self._release_permit_on_arrival, fetch),
            )
        if not fetch.is_in_process:
            fetch.task = asyncio.create_task(self._run_fetch(fetch))

    def _fetch_in_daemon_too(self, fetch: BlockFetch) -> None:
        """Start a fetch in the daemon, as the fetch process is late or gave up. The first result counts."""
        if fetch.task is None and not fetch.is_done:
            fetch.task = asyncio.create_task(self._run_fetch(fetch))

    @staticmethod
    def _release_permit_on_arrival(fetch: BlockFetch) -> None:
        """Give the slot back: a fetch process has the bytes. A fetch in the daemon beside it keeps the slot."""
        if fetch.task is None:
            fetch.permit.release()

    def _handle_process_result(self, fetch: BlockFetch, place: BlockLocation | None) -> None:
        """Handle the result of a fetch process: the block's location, or None if the daemon should fetch it."""
        if place is not None:
            self.counts.count_block(
                ORIGIN, FetchResult.DISCARDED if fetch.is_done else FetchResult.STORED, fetch.source.length
            )
        if fetch.is_done:
            return
        if place is None:
            self._fetch_in_daemon_too(fetch)
            return
        if fetch.task is not None:
            fetch.task.cancel()
            fetch.source_peer = ""
        self._count_fetched(fetch)
        self._finish_fetch(fetch, place)

    def _count_fetched(self, fetch: BlockFetch) -> None:
        self.latency.measure(asyncio.get_running_loop().time() - fetch.started_at)
        if fetch.source_peer:
            self.peer_blocks += 1
            self.peer_bytes += fetch.source.length
        else:
            self.fetched_blocks += 1
            self.fetched_bytes += fetch.source.length
        for listener in self._block_listeners:
            listener(fetch.source.snapshot, PEER if fetch.source_peer else ORIGIN, fetch.source.length)

    async def _run_fetch(self, fetch: BlockFetch, block: FoundBlock | None = None) -> None:
        """Run the flight. block: as a peer gave it; None: ask the origin."""
        outcome: BlockFetchOutcome = _daemon_stopping()
        try:
            if block is not None:
                fetch.set_bytes(block.data, asyncio.get_running_loop().time(), block.checksums)
                block = None  # no reference may keep its bytes
                outcome = await self._store_and_count(fetch, PEER)
            else:
                if not fetch.permit.is_held:  # the bytes arrived in another way, and are still in no tier
                    await fetch.permit.acquire(ahead=not fetch.has_reader, needed_at=fetch.needed_at)
                outcome = await self._read_and_store(fetch)
        except CachefsError as error:
            if isinstance(error, ObjectChanged) and self._sources.is_replaced(fetch.source.snapshot):
                error = error.for_older_snapshot()
            outcome = error
            if block is None and self._search_all_nodes(fetch, error):
                return
            self._note_failure(fetch, error)
        except Exception as error:
            outcome = CachefsError(f"{fetch.source.subject}: internal error ({error!r}); see the daemon's log")
            self._errors.add(fetch.source.subject, str(outcome), bug=error)
        finally:
            if fetch.task is asyncio.current_task():  # otherwise a peer was quicker than the origin, or is asked now
                self._finish_fetch(fetch, outcome)

    def _note_failure(self, fetch: BlockFetch, error: CachefsError) -> None:
        self._errors.add(fetch.source.subject, str(error))
        # The other node counts its own failed read.
        self.failures.add_failure(fetch.source, error, time.time(), waited=fetch.has_local_reader)

    def _finish_fetch(self, fetch: BlockFetch, outcome: BlockFetchOutcome) -> None:
        if fetch.is_done:
            return  # a fetch process was quicker
        key = fetch.source.key
        if fetch.peer_search is not None:
            fetch.peer_search.cancel()
        if self._fetches.get(key) is fetch:
            del self._fetches[key]
        if not fetch.source.is_whole:
            self._merged_reads.remove_block(fetch.source)
        fetch.permit.cancel_or_release()
        self.partial_blocks.drop_parts(key)
        if not isinstance(outcome, BypassBlock):  # `bypass_blocks` decides how long those are remembered
            self._remember_outcome(fetch, outcome)
        fetch.finish(outcome)

    def _remember_outcome(self, fetch: BlockFetch, outcome: BlockFetchOutcome) -> None:
        key = fetch.source.key
        self._recent[key] = _RecentOutcome(asyncio.get_running_loop().time(), outcome, fetch.is_for_peer)
        self._recent.move_to_end(key)
        if len(self._recent) > MAX_RECENT_OUTCOMES:
            self._recent.popitem(last=False)

    async def _read_and_store(self, fetch: BlockFetch) -> BlockLocation | BypassBlock | None:
        source, patience, clock = fetch.source, fetch.deadline, asyncio.get_running_loop().time
        if not fetch.has_reader and self._is_likely_refused(fetch):
            return None
        fetch.started_at = clock()
        if not fetch.has_reader:
            # It may have waited long for its slot; its time starts now.
            patience.extend(fetch.started_at + self._read_deadline)
        elif patience.until <= fetch.started_at:
            raise OriginUnavailable(
                f"{source.subject} found no free connection within the read deadline; "
                "its origin is slow, or raise origin.max_connections"
            )
        patience.pause = partial(self._pause_without_permit, fetch)
        parts = self.partial_blocks.pop_parts(source.key)
        come = None if parts or source.is_whole else await self._join_merged_read(fetch)
        data = come if come is not None else await self._read_from_origin(fetch, parts)
        if len(data) != source.length:
            self.counts.count_discarded(len(data))
            raise OriginError(f"{source.subject}: got {len(data)} bytes for {source.length}")
        self._read_latency.measure(clock() - fetch.started_at)
        fetch.set_bytes(data, clock())
        if fetch.early_block is not None and self._tier_writes.has_room:
            fetch.permit.cancel_or_release()  # no reader waits for it any more
        return await self._store_and_count(fetch, ORIGIN)

    async def _read_from_origin(self, fetch: BlockFetch, parts: Sequence[BlockPart]) -> Data:
        """Return the bytes from the origin, using the *parts* that are here. If the origin's address changes meanwhile,
        retry there."""
        while True:
            source, patience = fetch.source, fetch.deadline
            try:
                if parts:
                    return await self._fill_gaps(fetch, parts)
                return await source.origin.read(source.range, patience)
            except CachefsError:
                parts = ()
                fetch.source = self._sources.renew(source)
                if fetch.source.origin is source.origin or patience.seconds_left <= 0:
                    raise

    async def _fill_gaps(self, fetch: BlockFetch, parts: Sequence[BlockPart]) -> Data:
        """Read the gaps around the *parts*, in parallel as far as there are slots."""
        source, slots = fetch.source, list[Permit]()
        for number in range(len(parts)):
            slot = self._limiter.new_permit(
                source.key + bytes([number]), 0, source.origin.endpoint, ahead=not fetch.has_reader
            )
            if not slot.request(_do_nothing):
                slot.cancel_or_release()
                break
            slots.append(slot)
        try:
            return await read_with_parts(
                source, parts, fetch.deadline, self.counts.count_discarded, at_once=1 + len(slots)
            )
        finally:
            for slot in slots:
                slot.release()

    async def _pause_without_permit(self, fetch: BlockFetch, seconds: float) -> None:
        """Pause between two attempts, and let other fetches have the slot meanwhile."""
        fetch.permit.release()
        await asyncio.sleep(seconds)
        await fetch.permit.acquire(ahead=not fetch.has_reader, needed_at=fetch.needed_at)
        fetch.started_at = asyncio.get_running_loop().time()
        trouble = fetch.deadline.last_error
        if trouble is not None and self._sources.renew(fetch.source).origin is not fetch.source.origin:
            raise trouble

    async def _store_and_count(self, fetch: BlockFetch, came_from: str) -> BlockLocation | BypassBlock | None:
        became = FetchResult.DISCARDED
        try:
            location = await self._store_or_bypass(fetch)
            if location is not None:
                became = FetchResult.STORED if isinstance(location, BlockLocation) else FetchResult.BYPASSED
        finally:
            self.counts.count_block(came_from, became, fetch.source.length)
        self._count_fetched(fetch)
        if location is None and fetch.needed_at == math.inf:
            self._note_refusal(fetch.source)
        return location

    async def _join_merged_read(self, fetch: BlockFetch) -> Data | None:
        """Return the bytes of a block that comes with its neighbours in one request; None if it must be fetched by
        itself."""
        await asyncio.sleep(0)  # lets the blocks requested together with it queue for slots
        part = self._merged_reads.start_request(fetch.source, fetch.permit)
        if part is None:
            return None
        try:
            with fetch.deadline.enforced():
                data = await part
        except TimeoutError:
            raise OriginUnavailable(f"{fetch.source.subject} did not come in time") from None
        self._merged_reads.mark_taken(fetch.source)  # now, as the source may be replaced
        if data is None:
            await fetch.deadline.pause(0)  # it shared the slot of another block
            if not fetch.has_reader:
                fetch.deadline.extend(fetch.started_at + self._read_deadline)
        return data

    def _note_refusal(self, source: BlockSource) -> None:
        now = asyncio.get_running_loop().time()
        self._refused = {key: seen for key, seen in self._refused.items() if now - seen[1] < REFUSAL_MEMORY_SECONDS}
        self._refused[source.snapshot] = source.length, now

    async def _store_or_bypass(self, fetch: BlockFetch) -> BlockLocation | BypassBlock | None:
        source, demanded = fetch.source, fetch.has_reader
        puts = self._tier_writes if demanded else self._tier_writes_ahead
        transient = demanded or fetch.may_be_transient
        block = BlockToStore(
            source.key, fetch.data, transient, source.snapshot, fetch.checksums, is_copy=not fetch.is_kept_here
        )
        try:
            stored = await puts.write_block(block, is_urgent=demanded and fetch.early_block is None)
        except Exception as error:
            if not fetch.has_reader:
                raise
            # A bug, possibly of any block of the batch. The bytes are here, so readers get them.
            self._errors.add("the store", f"internal error ({error!r}); see the daemon's log", bug=error)
            stored = StoreFull("the store has failed")
        if isinstance(stored, StoreFull) and not fetch.has_reader:
            return None
        return await self.bypass(fetch, str(stored)) if isinstance(stored, StoreFull) else stored

    async def bypass(self, fetch: BlockFetch, reason: str) -> BypassBlock:
        block = fetch.early_block
        if block is None:
            block = await self._threads.run(BypassBlock.of, fetch.source.key, fetch.data, fetch.checksums)
        self.bypass_blocks.add(fetch.source.key, block, reason)
        return block


def _daemon_stopping() -> CachefsError:
    return CachefsError("the daemon is stopping")


def _do_nothing() -> None:
    pass
