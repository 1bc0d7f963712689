"""Merges reads of neighbouring blocks of one object into one request, if more blocks wait than there are permits.

The bytes are passed on block by block as they arrive, so no block waits for the ones after it. The best size of a
request is learned per server (cachefs.planning.requests.request_times). While permits are free, each block has a
request of its own: several parallel requests are quicker than a large one.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from cachefs.errors import CachefsError
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter, Permit
from cachefs_daemon.origin.base import Data, ObjectRange, RangeOrigin
from cachefs_daemon.origin.deadline import Deadline

# Bytes of a block; None if the block must be fetched by itself.
BytesFuture = asyncio.Future[Data | None]

# Blocks per request, at most.
_MAX_BLOCKS_PER_REQUEST: Final = 64

_Object = tuple[int, bytes, bytes]  # id of the origin, key, version


class MergedReads:
    """Waiting blocks by object, and merged requests in flight. Used on the event loop."""

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
