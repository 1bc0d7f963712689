"""Fetches in flight, the readers that wait for them, the outcomes of recent ones, and bypass blocks."""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.block import PIECE_SIZE, BlockLocation, piece_checksums
from cachefs.errors import CachefsError, OriginUnavailable
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.concurrency_limiter import Permit
from cachefs_daemon.origin.base import Data
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.ports import BlockSearch

# Seconds that a block stays, counted from its arrival and not from its last use: the next fetch then finds out whether
# a tier can hold it.
KEPT_SECONDS: Final = 2.0
# Seconds without a bypass block after which the next one is logged again.
QUIET_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class BypassBlock:
    """The bytes of one block, or of a run of whole pieces of it."""

    data: Data
    checksums: bytes  # of all pieces of the block, 8 bytes each; zeros for pieces before *begin*
    begin: int = 0  # offset of *data* in the block, in bytes

    @classmethod
    def of(cls, key: bytes, data: Data, checksums: bytes = b"") -> "BypassBlock":
        """Return a whole block. checksums: computed if empty."""
        return cls(data, checksums or piece_checksums(key, data))

    @classmethod
    def of_part(cls, key: bytes, data: Data, begin: int) -> "BypassBlock":
        """Return a part of a block: whole pieces that start at offset *begin*."""
        first = begin // PIECE_SIZE
        return cls(data, bytes(8 * first) + piece_checksums(key, data, first), begin)

    def pieces(self, start: int, size: int) -> memoryview:
        """Return the whole pieces that cover the bytes [start, start + size); a reader can verify only whole pieces."""
        begin = start // PIECE_SIZE * PIECE_SIZE - self.begin
        return memoryview(self.data)[begin : -(-(start + size) // PIECE_SIZE) * PIECE_SIZE - self.begin]


class BypassBlocks:
    """Keeps the last few bypass blocks and counts all of them. Used on the event loop.

    A bypass block is one that no tier can hold, since memory is short or the disks are full: it is served to waiting
    readers as bytes instead of a location in a tier. A reader takes a large block piece by piece, so the last few
    bypass blocks stay in memory for KEPT_SECONDS; otherwise each piece would cost the origin the whole block.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: bytes of blocks to keep; the newest block is kept even if it is larger."""
        self.count = 0  # since the daemon started
        self._max_bytes = max_bytes
        self._bytes = 0
        # By key, oldest first, with the loop time of arrival.
        self._blocks: OrderedDict[bytes, tuple[BypassBlock, float]] = OrderedDict()
        self._last_arrival = -math.inf  # loop time of the last arrival
        self._expiry_timer: asyncio.TimerHandle | None = None

    def add(self, key: bytes, block: BypassBlock, reason: str) -> None:
        """Keep a block that has arrived. reason: why no tier holds it, for the log."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._last_arrival > QUIET_SECONDS:
            log.warning("blocks go straight to their readers, as no tier can hold them: %s", reason)
        self._last_arrival = loop.time()
        self.count += 1
        self._drop(key)
        self._blocks[key] = block, self._last_arrival
        self._bytes += len(block.data)
        while self._bytes > self._max_bytes and len(self._blocks) > 1:
            self._drop(next(iter(self._blocks)))
        if self._expiry_timer is None:
            self._expiry_timer = loop.call_later(KEPT_SECONDS, self._drop_old)

    def get(self, key: bytes) -> BypassBlock | None:
        """Return the block if it is still kept."""
        found = self._blocks.get(key)
        return found[0] if found is not None else None

    def close(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()

    def _drop(self, key: bytes) -> None:
        gone = self._blocks.pop(key, None)
        if gone is not None:
            self._bytes -= len(gone[0].data)

    def _drop_old(self) -> None:
        loop = asyncio.get_running_loop()
        while self._blocks:
            key, (_, came) = next(iter(self._blocks.items()))
            if loop.time() - came < KEPT_SECONDS:
                self._expiry_timer = loop.call_later(came + KEPT_SECONDS - loop.time(), self._drop_old)
                return
            self._drop(key)
        self._expiry_timer = None


log = logging.getLogger(__name__)

# Seconds that a reader waits for fetched bytes to reach a tier; then it gets the bytes themselves. A write takes
# milliseconds, and where all writes of a disk hang, another tier takes the block after 1 s.
STORE_WAIT_SECONDS: Final = 2.0

# Seconds for which a permanent failure is remembered, such as that of a changed object.
FAILURE_MEMORY_SECONDS: Final = 2.0
# Seconds for which any other failure is remembered. The kernel retries a failed page at once, and must not wait for a
# second deadline; later readers must, since the origin may be back.
OUTAGE_MEMORY_SECONDS: Final = 0.1
# Number of fetches whose outcomes are remembered.
MAX_RECENT_OUTCOMES: Final = 4096

# Response to a waiting reader: the location of the block; or the block itself, if no tier can hold it or has it yet; or
# the error.
BlockResult = BlockLocation | BypassBlock | CachefsError
# Result of a fetch. None if no tier's policy wants the block (only blocks without a waiting reader are refused).
BlockFetchOutcome = BlockResult | None


@dataclass(slots=True, eq=False)
class BlockFetch:
    """A fetch in flight."""

    source: BlockSource
    # Whether a reader waits for the block.
    has_reader: bool
    # Ends a read deadline after the last reader began to wait, or, without readers, after the permit was admitted.
    deadline: Deadline
    permit: Permit
    # Loop time at which the first waiting read began to wait; inf: no read waits.
    waited_since: float = math.inf
    # Runs once the permit is admitted, unless a fetch process fetches the block.
    task: "asyncio.Task[None] | None" = None
    # Loop time at which the permit was last admitted.
    started_at: float = 0.0
    # The bytes, once arrived, and the loop time of arrival.
    data: Data = b""
    arrived_at: float = math.inf
    # Whether the block may become a transient block without a waiting reader.
    may_be_transient: bool = False
    is_done: bool = False
    # The search among the nodes of the cluster.
    peer_search: BlockSearch | None = None
    # Whether this node keeps the block, as far as is known; otherwise it is a mere copy.
    is_kept_here: bool = True
    # Whether only another node has asked for the block. Then no third node is searched.
    is_for_peer: bool = False
    # Whether reads of this node wait for the block.
    has_local_reader: bool = False
    # Error of the origin, while other nodes are asked whether it serves them.
    origin_refusal: CachefsError | None = None
    # Whether the requesting node fetches the block, as this node is overloaded.
    is_delegated: bool = False
    # The peer that gave the block, as shown for stalls; empty for the origin.
    source_peer: str = ""
    # Checksums of all pieces, if known.
    checksums: bytes = b""
    # Result, once the fetch has ended.
    outcome: BlockFetchOutcome = None
    # The bytes for early readers: only while they are being stored.
    early_block: BypassBlock | None = None
    # Called when the fetch ends; and as soon as the bytes have arrived.
    _done_callbacks: "list[Callable[[BlockFetch], None]]" = field(default_factory=list)
    _bytes_callbacks: "list[Callable[[BlockFetch], None]]" = field(default_factory=list)

    @property
    def needed_at(self) -> float:
        """Loop time at which a block that is fetched ahead will be needed; inf: unknown."""
        return self.permit.purpose.needed_at

    def is_stuck(self, now: float) -> bool:
        """Return whether the bytes have waited long for a disk."""
        return now - self.arrived_at >= STORE_WAIT_SECONDS and self.is_being_stored

    @property
    def is_being_stored(self) -> bool:
        """Whether the bytes have arrived, and are in no tier yet."""
        return self.arrived_at < math.inf and not self.is_done

    @property
    def is_running(self) -> bool:
        """Whether the block is being read, or other nodes are asked."""
        return self.permit.is_held or self.task is not None or self.peer_search is not None

    def add_done_callback(self, callback: Callable[["BlockFetch"], None]) -> None:
        """Call *callback* synchronously when the fetch ends, since a turn of the event loop would cost more than the
        callbacks do. The fetch must not have ended yet."""
        self._done_callbacks.append(callback)

    def add_bytes_callback(self, callback: Callable[["BlockFetch"], None]) -> None:
        """Call *callback* when the bytes have arrived, immediately if they have. They are then in `early_block`."""
        if not self.is_being_stored:
            self._bytes_callbacks.append(callback)
            return
        self.make_early_block()
        callback(self)

    def set_bytes(self, data: Data, now: float, checksums: bytes = b"") -> None:
        """Record arrival of the bytes at *now* (loop time). checksums: of all pieces, if known."""
        self.data, self.arrived_at, self.checksums = data, now, checksums
        callbacks, self._bytes_callbacks = self._bytes_callbacks, []
        if callbacks:
            self.make_early_block()
            self._run_callbacks(callbacks)

    def make_early_block(self) -> BypassBlock:
        """Put the arrived bytes into `early_block`."""
        if self.early_block is None:
            self.early_block = BypassBlock.of(self.source.key, self.data, self.checksums)
            self.checksums = self.early_block.checksums
        return self.early_block

    def done_future(self) -> "asyncio.Future[None]":
        """Return a future that is done when the fetch has ended."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def set_ended(_: BlockFetch) -> None:
            if not ended.done():  # otherwise cancelled
                ended.set_result(None)

        self.add_done_callback(set_ended)
        return ended

    def finish(self, outcome: BlockFetchOutcome) -> None:
        """End the fetch with *outcome*."""
        self.outcome, self.is_done = outcome, True
        # No reference may keep the bytes until a garbage collection: the connection reuses their memory.
        self.data, self.early_block, self.peer_search, self.deadline.pause = b"", None, None, asyncio.sleep
        callbacks, self._done_callbacks, self._bytes_callbacks = self._done_callbacks, [], []
        self._run_callbacks(callbacks)

    def _run_callbacks(self, callbacks: "Sequence[Callable[[BlockFetch], None]]") -> None:
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the other callbacks still run
                log.exception("a callback of the fetch of %s failed", self.source.subject)


class FetchWaiter:
    """A reader that waits for a fetch."""

    __slots__ = ("_fetch", "_is_notified", "_on_result", "_timer", "_until")

    def __init__(
        self, fetch: BlockFetch, until: float, on_result: Callable[[BlockFetch], None], *, early: bool
    ) -> None:
        """on_result: called once: when the fetch has ended, is stuck, or at *until* (loop time). early: also when the
        bytes have arrived."""
        self._fetch = fetch
        self._until = until
        self._on_result = on_result
        self._is_notified = False
        self._set_timer(asyncio.get_running_loop())
        fetch.add_done_callback(self._notify)
        if early:
            fetch.add_bytes_callback(self._notify)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(min(self._until, loop.time() + STORE_WAIT_SECONDS), self._check_deadline)

    def _check_deadline(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._until or self._fetch.is_stuck(loop.time()):
            self._notify()
        elif not self._is_notified:
            self._set_timer(loop)

    def _notify(self, _: object = None) -> None:
        if not self._is_notified:
            self._is_notified = True
            self._timer.cancel()
            self._on_result(self._fetch)


@dataclass(frozen=True, slots=True)
class _RecentOutcome:
    # Loop time of the end.
    ended_at: float
    outcome: BlockFetchOutcome
    # Whether only other nodes wanted the block. Its failure then does not apply to readers here, for whom other nodes
    # are asked too.
    was_for_peer: bool


class RecentOutcomes:
    """Outcomes of fetches that have just ended. Used on the event loop."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[bytes, _RecentOutcome] = OrderedDict()  # by block key, oldest first

    def add_outcome(self, fetch: BlockFetch, outcome: BlockFetchOutcome) -> None:
        """Remember the outcome of a fetch that ends now."""
        key = fetch.source.key
        self._outcomes[key] = _RecentOutcome(asyncio.get_running_loop().time(), outcome, fetch.is_for_peer)
        self._outcomes.move_to_end(key)
        if len(self._outcomes) > MAX_RECENT_OUTCOMES:
            self._outcomes.popitem(last=False)

    def outcome_of(self, key: bytes, looked_up_at: float, *, for_peer: bool) -> BlockFetchOutcome:
        """Return the outcome of a fetch that has just failed, or has ended since *looked_up_at* (loop time), as the
        look-up in the store may have missed it; None if there is none. for_peer: another node asks."""
        recent = self._outcomes.get(key)
        if recent is None:
            return None
        if not isinstance(recent.outcome, CachefsError):
            return recent.outcome if recent.ended_at >= looked_up_at else None
        if recent.was_for_peer and not for_peer:
            return None
        is_outage = isinstance(recent.outcome, OriginUnavailable)
        memory = OUTAGE_MEMORY_SECONDS if is_outage else FAILURE_MEMORY_SECONDS
        return recent.outcome if asyncio.get_running_loop().time() - recent.ended_at < memory else None
