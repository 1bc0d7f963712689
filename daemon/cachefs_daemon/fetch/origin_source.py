"""The origins as a source of blocks: requests wait for a permit, then a fetch process or the daemon itself reads.

A fetch process reads a block without a waiting reader that is a whole object, if one is free. The daemon reads all
other blocks: together with their neighbours in one request, or the gaps around the parts that are here, or the block
alone. If the address of the origin changes meanwhile, it retries there.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from cachefs.block import BlockLocation
from cachefs.errors import CachefsError, OriginError, OriginUnavailable
from cachefs.planning.prefetch.fetch_window import FetchLatency
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.block_fetch import BlockFetch
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter, Permit
from cachefs_daemon.fetch.fetch_parts import ORIGIN, FetchParts, FetchResult
from cachefs_daemon.fetch.partial_blocks import BlockPart, PartialBlocks, read_with_parts
from cachefs_daemon.origin.base import Data, ObjectRange, RangeOrigin
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint

# Bytes of a block; None if the block must be fetched by itself.
BytesFuture = asyncio.Future[Data | None]

# Blocks per request, at most.
_MAX_BLOCKS_PER_REQUEST: Final = 64

_Object = tuple[int, bytes, bytes]  # id of the origin, key, version
# Assumed seconds of a fetch before the first measurement: typical of an object store.
FIRST_LATENCY: Final = 0.05

# Divisor of the bytes that may be in flight: the share of partial blocks.
PARTIAL_DIVISOR: Final = 4

# Shortest time in seconds that a reader waits for a fetch process. Once the request is late, the daemon fetches the
# block too. If the late threshold is unknown or long, it does so after 1 s without a report from the process.
MIN_PROCESS_WAIT: Final = 0.1


class MergedReads:
    """Merges reads of neighbouring blocks of one object into one request, if more blocks wait than there are permits.

    The bytes are passed on block by block as they arrive, so no block waits for the ones after it. The best size of a
    request is learned per server (cachefs.planning.requests.request_times). While permits are free, each block has a
    request of its own: several parallel requests are quicker than a large one. Used on the event loop.
    """

    def __init__(self, limiter: ConcurrencyLimiter, read_deadline: float, discard: Callable[[int], None]) -> None:
        """read_deadline: longest time in seconds that a reader waits for an origin. discard: called with the size of
        bytes that arrived in vain."""
        self._limiter = limiter
        self._read_deadline = read_deadline
        self._discard = discard
        self._waiting: dict[_Object, dict[int, BlockSource]] = {}  # blocks that wait for a permit, by offset
        self._parts: dict[int, BytesFuture] = {}  # blocks in merged requests, by id of their source
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests = 0  # merged requests since the daemon started

    def add_waiting_block(self, source: BlockSource) -> None:
        """Register a block that waits for a permit. Call `remove_block` in the end."""
        self._waiting.setdefault(_object(source), {})[source.range.offset] = source

    def remove_block(self, source: BlockSource) -> None:
        """Remove a block that has arrived, or is no longer wanted."""
        self._remove_waiting_block(source)
        part = self._parts.pop(id(source), None)
        if part is not None and not part.cancel() and not part.cancelled() and (data := part.result()) is not None:
            self._discard(len(data))

    def mark_taken(self, source: BlockSource) -> None:
        """Mark the bytes of a block as taken."""
        self._parts.pop(id(source), None)

    def start_request(self, source: BlockSource, permit: Permit) -> BytesFuture | None:
        """Start the request of a block whose *permit* was admitted. Returns its future if it comes with others;
        otherwise None."""
        known = self._parts.get(id(source))
        if known is not None:
            return known
        run = self._neighbours_to_merge(source)
        self._remove_waiting_block(source)
        taken = [source]
        for one in run[1:]:
            if not self._limiter.admit_with_other(one.key, source.origin.endpoint):
                break
            self._remove_waiting_block(one)
            taken.append(one)
        if len(taken) < 2 or not isinstance(source.origin, RangeOrigin):
            return None
        loop = asyncio.get_running_loop()
        parts: list[BytesFuture] = [loop.create_future() for _ in taken]
        self._parts.update(zip(map(id, taken), parts, strict=True))
        task = loop.create_task(self._read(source.origin, taken, parts, permit.split_off()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return parts[0]

    async def close(self) -> None:
        """Cancel all merged requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _remove_waiting_block(self, source: BlockSource) -> None:
        same_object = self._waiting.get(_object(source))
        if same_object is not None and same_object.get(source.range.offset) is source:
            del same_object[source.range.offset]
            if not same_object:
                del self._waiting[_object(source)]

    def _neighbours_to_merge(self, source: BlockSource) -> list[BlockSource]:
        """Return the block and its successors that should come with it."""
        waiting = self._waiting.get(_object(source), {})
        endpoint = source.origin.endpoint
        # This block counts as waiting, and its permit as free.
        share = -(-len(waiting) // (self._limiter.free_permits(endpoint) + 1))
        if share < 2 or not isinstance(source.origin, RangeOrigin) or not source.origin.can_read_ranges:
            return [source]
        most = min(share * source.length, endpoint.request_size(source.length))
        run, end = [source], source.range.offset + source.length
        while len(run) < _MAX_BLOCKS_PER_REQUEST and (one := waiting.get(end)) is not None:
            end += one.length
            # A whole object needs another request: with a checksum that is known only at its end.
            if end - source.range.offset > most or end - source.range.offset == source.range.size:
                break
            run.append(one)
        return run

    async def _read(
        self, origin: RangeOrigin, taken: list[BlockSource], parts: list[BytesFuture], permit: Permit
    ) -> None:
        def arrived(number: int, data: Data) -> None:
            if parts[number].done():
                self._discard(len(data))
            else:
                parts[number].set_result(data)

        first = taken[0].range
        lengths = [one.length for one in taken]
        wanted = ObjectRange(first.key, first.version, first.size, first.offset, sum(lengths))
        self.requests += 1
        try:
            # Upon any failure, each block is fetched by itself, and reports its own error.
            with contextlib.suppress(CachefsError, TimeoutError), Deadline.after(self._read_deadline).enforced():
                await origin.read_parts(wanted, lengths, arrived)
        finally:
            permit.release()
            for part in parts:
                if not part.done():
                    part.set_result(None)


def _object(source: BlockSource) -> _Object:
    return id(source.origin), source.range.key, source.range.version


class OriginSource:
    """Reads blocks from their origins. Used on the event loop."""

    def __init__(
        self,
        parts: FetchParts,
        is_likely_refused: Callable[[BlockFetch], bool],
        start_read: Callable[[BlockFetch], None],
        on_stored: Callable[[BlockFetch, BlockLocation], None],
    ) -> None:
        """is_likely_refused: returns whether no tier is likely to take a block without a waiting reader. start_read:
        starts a task that calls `read`. on_stored: called when a fetch process has put the block into a tier."""
        self._limiter = parts.limiter
        self._read_deadline = parts.read_deadline
        self._sources = parts.sources
        self._counts = parts.counts
        self._fetch_in_process = parts.fetch_in_process
        self._is_likely_refused = is_likely_refused
        self._start_read = start_read
        self._on_stored = on_stored
        self.partial_blocks = PartialBlocks(
            parts.limiter.capacity // PARTIAL_DIVISOR, partial(parts.counts.count_block, ORIGIN, FetchResult.BYPASSED)
        )
        self._merged_reads = MergedReads(parts.limiter, parts.read_deadline, parts.counts.count_discarded)
        self._in_processes: set[BlockFetch] = set()  # fetches that fetch processes have, or have given up
        self._latency = FetchLatency(FIRST_LATENCY)  # of a read, from its permit until its bytes have arrived

    async def close(self) -> None:
        """Cancel all merged requests. The tasks that call `read` have ended."""
        await self._merged_reads.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    def request_block(self, fetch: BlockFetch) -> None:
        """Read the block once it is its turn."""
        if not (fetch.source.is_whole or self.partial_blocks.parts_of(fetch.source.key)):
            self._merged_reads.add_waiting_block(fetch.source)
        fetch.permit.is_ahead = not fetch.has_reader
        if fetch.permit.request(partial(self._start, fetch)):
            self._start(fetch)

    def raise_priority(self, fetch: BlockFetch) -> None:
        """Raise the priority: the first reader waits for the block from now on."""
        self._limiter.promote(fetch.source.key)
        fetch.permit.count_as_demand()
        if fetch in self._in_processes:
            # Without a permit, its bytes have arrived, and their entry into the store takes milliseconds.
            late = fetch.source.origin.endpoint.late_after(fetch.source.length) if fetch.permit.is_held else 0.0
            late = max(MIN_PROCESS_WAIT, late)
            if late < math.inf:
                asyncio.get_running_loop().call_later(late, self._read_in_daemon_too, fetch)

    def withdraw_request(self, fetch: BlockFetch) -> None:
        """Stop waiting for the block's turn: other nodes are asked. A read in progress continues."""
        fetch.permit.cancel_or_release()
        if not fetch.source.is_whole:
            self._merged_reads.remove_block(fetch.source)

    def end_request(self, fetch: BlockFetch) -> None:
        """Forget the block: its fetch has ended."""
        self.withdraw_request(fetch)
        self._in_processes.discard(fetch)
        self.partial_blocks.drop_parts(fetch.source.key)

    def is_in_process(self, fetch: BlockFetch) -> bool:
        """Return whether a fetch process has the block, or has given it up."""
        return fetch in self._in_processes

    def expected_wait(self, endpoint: Endpoint) -> float:
        """Return the seconds that a new read from the server is expected to wait for its turn."""
        waiting, running = self._limiter.waiting_and_running(endpoint)
        return waiting * self._latency.mean / max(1, running)

    def _start(self, fetch: BlockFetch) -> None:
        """Read the block: it is its turn."""
        if fetch.is_kept_here and not (fetch.has_reader or fetch.may_be_transient or self._is_likely_refused(fetch)):
            fetch.started_at = asyncio.get_running_loop().time()
            if self._fetch_in_process(
                fetch.source,
                partial(self._handle_process_result, fetch),
                partial(self._release_permit_on_arrival, fetch),
            ):
                self._in_processes.add(fetch)
                return
        self._start_read(fetch)

    # --- fetch processes ----------------------------------------------------------------------------------------------

    def _read_in_daemon_too(self, fetch: BlockFetch) -> None:
        """Start a read in the daemon, as the fetch process is late or gave up. The first result counts."""
        if fetch.task is None and not fetch.is_done:
            self._start_read(fetch)

    @staticmethod
    def _release_permit_on_arrival(fetch: BlockFetch) -> None:
        """Give the permit back: a fetch process has the bytes. A read in the daemon beside it keeps the permit."""
        if fetch.task is None:
            fetch.permit.release()

    def _handle_process_result(self, fetch: BlockFetch, location: BlockLocation | None) -> None:
        """Handle the result of a fetch process: the block's location, or None if the daemon should read it."""
        if location is not None:
            self._counts.count_block(
                ORIGIN, FetchResult.DISCARDED if fetch.is_done else FetchResult.STORED, fetch.source.length
            )
        if fetch.is_done:
            return
        if location is None:
            self._read_in_daemon_too(fetch)
        else:
            self._on_stored(fetch, location)

    # --- reads --------------------------------------------------------------------------------------------------------

    async def read(self, fetch: BlockFetch) -> bool:
        """Read the block, and put its bytes into the fetch. Returns False, and reads nothing, if no tier is likely to
        take the block. Raises CachefsError."""
        if not fetch.permit.is_held:  # the bytes arrived in another way, and are still in no tier
            await fetch.permit.acquire(ahead=not fetch.has_reader)
        source, deadline, clock = fetch.source, fetch.deadline, asyncio.get_running_loop().time
        if not fetch.has_reader and self._is_likely_refused(fetch):
            return False
        fetch.started_at = clock()
        if not fetch.has_reader:
            # It may have waited long for its permit; its time starts now.
            deadline.extend(fetch.started_at + self._read_deadline)
        elif deadline.until <= fetch.started_at:
            raise OriginUnavailable(
                f"{source.subject} found no free connection within the read deadline; "
                "its origin is slow, or raise origin.max_connections"
            )
        deadline.pause = partial(self._pause_without_permit, fetch)
        parts = self.partial_blocks.pop_parts(source.key)
        merged = None if parts or source.is_whole else await self._join_merged_read(fetch)
        data = merged if merged is not None else await self._read_from_origin(fetch, parts)
        if len(data) != source.length:
            self._counts.count_discarded(len(data))
            raise OriginError(f"{source.subject}: got {len(data)} bytes instead of {source.length}")
        self._latency.measure(clock() - fetch.started_at)
        fetch.set_bytes(data, clock())
        return True

    async def _read_from_origin(self, fetch: BlockFetch, parts: Sequence[BlockPart]) -> Data:
        """Return the bytes from the origin, using the *parts* that are here. If the origin's address changes meanwhile,
        retry there."""
        while True:
            source, deadline = fetch.source, fetch.deadline
            try:
                if parts:
                    return await self._fill_gaps(fetch, parts)
                return await source.origin.read(source.range, deadline)
            except CachefsError:
                parts = ()
                fetch.source = self._sources.renew(source)
                if fetch.source.origin is source.origin or deadline.seconds_left <= 0:
                    raise

    async def _fill_gaps(self, fetch: BlockFetch, parts: Sequence[BlockPart]) -> Data:
        """Read the gaps around the *parts*, in parallel as far as there are permits."""
        source, permits = fetch.source, list[Permit]()
        for number in range(len(parts)):
            permit = self._limiter.new_permit(
                source.key + bytes([number]), 0, source.origin.endpoint, ahead=not fetch.has_reader,
                purpose=fetch.permit.purpose,
            )  # fmt: skip
            if not permit.request(_do_nothing):
                permit.cancel_or_release()
                break
            permits.append(permit)
        try:
            return await read_with_parts(
                source, parts, fetch.deadline, self._counts.count_discarded, at_once=1 + len(permits)
            )
        finally:
            for permit in permits:
                permit.release()

    async def _pause_without_permit(self, fetch: BlockFetch, seconds: float) -> None:
        """Pause between two attempts, and let other fetches have the permit meanwhile."""
        fetch.permit.release()
        await asyncio.sleep(seconds)
        await fetch.permit.acquire(ahead=not fetch.has_reader)
        fetch.started_at = asyncio.get_running_loop().time()
        last_error = fetch.deadline.last_error
        if last_error is not None and self._sources.renew(fetch.source).origin is not fetch.source.origin:
            raise last_error

    async def _join_merged_read(self, fetch: BlockFetch) -> Data | None:
        """Return the bytes of a block that comes with its neighbours in one request; None if it must be read by
        itself."""
        await asyncio.sleep(0)  # lets the blocks requested together with it queue for permits
        part = self._merged_reads.start_request(fetch.source, fetch.permit)
        if part is None:
            return None
        try:
            with fetch.deadline.enforced():
                data = await part
        except TimeoutError:
            raise OriginUnavailable(f"{fetch.source.subject} did not arrive in time") from None
        self._merged_reads.mark_taken(fetch.source)  # now, as the source may be replaced
        if data is None:
            await fetch.deadline.pause(0)  # it shared the permit of another block
            if not fetch.has_reader:
                fetch.deadline.extend(fetch.started_at + self._read_deadline)
        return data


def _do_nothing() -> None:
    pass
