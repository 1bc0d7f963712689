"""Fetches of blocks through the daemon, for one worker of a mount: all reads of a block share one call."""

import errno
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.messages import BlockRef, FetchedBlock, FetchRequest
from cachefs.mount.fetch_channel import DAEMON_RETRY_SECONDS, FetchChannelClient
from cachefs.mount.read_marks import ReadMarks

# Seconds for which the failure of a block is remembered. The kernel follows a failed readahead with a read of the same
# page, often at another worker. That read must not wait for a whole deadline again.
FAILURE_SECONDS: Final = 1.0
# A fetch that fails within this many seconds before its deadline counts as timed out: the daemon answers a little
# early.
_NEAR_DEADLINE: Final = 1.5


@dataclass(slots=True)
class _InFlightFetch:
    """A fetch in progress."""

    # By trio's clock: the deadline of the read that began the fetch.
    deadline: float
    completed: trio.Event = field(default_factory=trio.Event)
    # One of these two is set when `completed` is.
    answer: FetchedBlock | None = None
    error: CachefsError | None = None
    # Time of trio's clock from which the block is requested again instead of answered with the error.
    forget_at: float = math.inf
    # Whether the fetch had to wait for a daemon that was away.
    was_daemon_away: bool = False
    # Whether the fetch failed because its time was over.
    has_timed_out: bool = False

    @property
    def source(self) -> str:
        """The source that its stalls name (see cachefs.messages.Stall)."""
        if self.was_daemon_away:
            return "daemon"
        return (self.answer.source if self.answer is not None else "") or "origin"


class SharedFetches:
    """The fetches in progress of one worker."""

    def __init__(
        self, channel: FetchChannelClient, failures: ReadMarks, note_stall: Callable[[bytes, float, str], None]
    ) -> None:
        """failures: where all workers of the mount mark blocks whose fetch failed at a read's deadline; note_stall:
        called for each wait with the block's key, the time at which the wait began, and the source."""
        self._channel = channel
        self._failures = failures
        self._record_stall = note_stall
        self._in_flight: dict[bytes, _InFlightFetch] = {}  # by block key: the fetch under way, or its recent failure

    def __contains__(self, key: bytes) -> bool:
        """Return whether the block is being fetched, or its fetch failed a moment ago."""
        return key in self._in_flight

    def fetch_ahead(self, blocks: list[BlockRef], seconds: float) -> None:
        """Start fetches of blocks that no read waits for yet."""
        self._channel.announce_fetch(FetchRequest(blocks=blocks, ahead=True, deadline=seconds))

    async def fetch_block(self, key: bytes, ref: BlockRef, deadline: float) -> FetchedBlock:
        """Return where the daemon has put the block, or its bytes where no tier can hold it.

        Reads of one block share one call, and its failure for FAILURE_SECONDS. When the call fails at the deadline of
        the read that began it, a later read may begin another call.
        """
        began = trio.current_time()
        over: _InFlightFetch | None = None
        while True:
            flight = self._in_flight.get(key)
            if flight is None or flight is over or trio.current_time() > flight.forget_at:
                flight = self._in_flight[key] = _InFlightFetch(deadline)
                await self._run_fetch(flight, key, ref, began)
                break
            has_come_before = flight.completed.is_set()
            with trio.move_on_at(deadline):
                await flight.completed.wait()
            if not flight.completed.is_set():
                self._record_stall(key, began, flight.source)
                raise DaemonUnavailable("the block did not come within the read deadline")
            if has_come_before or not flight.has_timed_out or deadline <= flight.deadline + _NEAR_DEADLINE:
                break
            over = flight
        self._record_stall(key, began, flight.source)
        if flight.answer is None:
            raise flight.error or CachefsError("the mount is ending")
        return flight.answer

    async def _run_fetch(self, flight: _InFlightFetch, key: bytes, ref: BlockRef, began: float) -> None:
        try:
            flight.answer = await self._call_daemon(flight, key, ref, began)
        except CachefsError as error:
            flight.error = error
            self._forget_old_failures()
            now = trio.current_time()
            flight.forget_at = now + FAILURE_SECONDS
            flight.has_timed_out = now > flight.deadline - _NEAR_DEADLINE
            if flight.has_timed_out and error.errno == errno.EIO:
                self._failures.set(key)
        finally:
            flight.completed.set()
            if flight.error is None and self._in_flight.get(key) is flight:
                del self._in_flight[key]

    def _forget_old_failures(self) -> None:
        now = trio.current_time()
        self._in_flight = {key: flight for key, flight in self._in_flight.items() if flight.forget_at >= now}

    async def _call_daemon(self, flight: _InFlightFetch, key: bytes, ref: BlockRef, began: float) -> FetchedBlock:
        # A read that was already waiting when another worker's read failed keeps its own deadline. (Marks count whole
        # milliseconds.)
        age = self._failures.age(key)
        if age < FAILURE_SECONDS and trio.current_time() - began <= age + 0.002:
            raise DaemonUnavailable("the fetch of this block timed out a moment ago, for another read")
        while True:
            left = flight.deadline - trio.current_time()
            flight.was_daemon_away = flight.was_daemon_away or self._channel.is_disconnected
            try:
                [answer] = await self._channel.call(FetchRequest(blocks=[ref], deadline=max(0.0, left)), left)
            except DaemonUnavailable:
                # The daemon may be restarting, and has until the deadline to return.
                flight.was_daemon_away = True
                if trio.current_time() + DAEMON_RETRY_SECONDS > flight.deadline:
                    raise
                await trio.sleep(DAEMON_RETRY_SECONDS)
                continue
            if answer.errno:
                error = CachefsError(answer.message)
                error.errno = answer.errno
                raise error
            return answer
