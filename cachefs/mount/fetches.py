"""Blocks that a worker of a mount has the daemon bring to the node: one call for all reads that wait for a block."""

import errno
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.messages import BlockRef, Fetch, FetchedBlock
from cachefs.mount.fetch_channel import DAEMON_RETRY, FetchChannel
from cachefs.mount.read_marks import ReadMarks

# Seconds for which the failure of a block is remembered. The kernel follows a failed readahead with a read of the same
# page, which must not wait for a whole deadline again. It often comes to another worker.
FAILURE_SECONDS: Final = 1.0
# A fetch that ends no more than so many seconds before its deadline has ended because of it: the daemon answers a
# little before.
_NEAR_DEADLINE: Final = 1.5


@dataclass(slots=True)
class _Flight:
    """A fetch that reads wait for."""

    # When it ends at the latest, by trio's clock: the deadline of the read that has begun it.
    deadline: float
    landed: trio.Event = field(default_factory=trio.Event)
    # Once it has landed, one of these two is set.
    answer: FetchedBlock | None = None
    error: CachefsError | None = None
    # The time of trio's clock from which on the block is asked for again, and not answered with the error.
    forget_at: float = math.inf
    # Was a part of the wait for a daemon that was not there?
    daemon_away: bool = False
    # Has it failed because its time was over?
    timed_out: bool = False

    @property
    def source(self) -> str:
        """What its readers wait for, as stalls tell (see cachefs.messages.Stall)."""
        if self.daemon_away:
            return "daemon"
        return (self.answer.source if self.answer is not None else "") or "origin"


class Fetches:
    """The fetches of one worker."""

    def __init__(
        self, channel: FetchChannel, failures: ReadMarks, note_stall: Callable[[bytes, float, str], None]
    ) -> None:
        """failures: where all workers of the mount mark blocks that were waited for in vain until a read's deadline;
        note_stall: is told of each wait: the block's key, when it began, for what it was."""
        self._channel = channel
        self._failures = failures
        self._note_stall = note_stall
        self._flights: dict[bytes, _Flight] = {}  # by block key: the fetch under way, or its recent failure

    def __contains__(self, key: bytes) -> bool:
        """Is the block being fetched, or has that failed a moment ago?"""
        return key in self._flights

    def ahead(self, blocks: list[BlockRef], seconds: float) -> None:
        """Have blocks brought for which nobody waits yet."""
        self._channel.send(Fetch(blocks=blocks, ahead=True, deadline=seconds))

    async def fetch(self, key: bytes, ref: BlockRef, deadline: float) -> FetchedBlock:
        """Where the daemon has put the block, or its bytes where no tier can hold it. Reads of one block share one
        call, and its failure for a moment.

        A read that has come later than the one that has begun the call may wait on when that one's time is over.
        """
        began = trio.current_time()
        over: _Flight | None = None
        while True:
            flight = self._flights.get(key)
            if flight is None or flight is over or trio.current_time() > flight.forget_at:
                flight = self._flights[key] = _Flight(deadline)
                await self._fly(flight, key, ref, began)
                break
            has_come_before = flight.landed.is_set()
            with trio.move_on_at(deadline):
                await flight.landed.wait()
            if not flight.landed.is_set():
                self._note_stall(key, began, flight.source)
                raise DaemonUnavailable("the block did not come within the read deadline")
            if has_come_before or not flight.timed_out or deadline <= flight.deadline + _NEAR_DEADLINE:
                break
            over = flight
        self._note_stall(key, began, flight.source)
        if flight.answer is None:
            raise flight.error or CachefsError("the mount is ending")
        return flight.answer

    async def _fly(self, flight: _Flight, key: bytes, ref: BlockRef, began: float) -> None:
        try:
            flight.answer = await self._ask(flight, key, ref, began)
        except CachefsError as error:
            flight.error = error
            self._forget_old_failures()
            now = trio.current_time()
            flight.forget_at = now + FAILURE_SECONDS
            flight.timed_out = now > flight.deadline - _NEAR_DEADLINE
            if flight.timed_out and error.errno == errno.EIO:
                self._failures.set(key)
        finally:
            flight.landed.set()
            if flight.error is None and self._flights.get(key) is flight:
                del self._flights[key]

    def _forget_old_failures(self) -> None:
        now = trio.current_time()
        self._flights = {key: flight for key, flight in self._flights.items() if flight.forget_at >= now}

    async def _ask(self, flight: _Flight, key: bytes, ref: BlockRef, began: float) -> FetchedBlock:
        # A read that was waiting already when another one failed has a deadline of its own.
        # (Marks count whole milliseconds.)
        age = self._failures.age(key)
        if age < FAILURE_SECONDS and trio.current_time() - began <= age + 0.002:
            raise DaemonUnavailable("another read of the block has waited for it in vain until a moment ago")
        while True:
            left = flight.deadline - trio.current_time()
            flight.daemon_away = flight.daemon_away or self._channel.is_away
            try:
                [answer] = await self._channel.call(Fetch(blocks=[ref], deadline=max(0.0, left)), left)
            except DaemonUnavailable:
                # The daemon may be restarting: it has time until the deadline to come back.
                flight.daemon_away = True
                if trio.current_time() + DAEMON_RETRY > flight.deadline:
                    raise
                await trio.sleep(DAEMON_RETRY)
                continue
            if answer.errno:
                error = CachefsError(answer.message)
                error.errno = answer.errno
                raise error
            return answer
