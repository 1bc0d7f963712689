"""Fetches in flight, and the readers that wait for them."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.block import Location
from cachefs.errors import CachefsError
from cachefs_daemon.datasets.block_source import BlockSource
from cachefs_daemon.fetch.passing import PassingBlock
from cachefs_daemon.fetch.search import Search
from cachefs_daemon.fetch.slots import Slot
from cachefs_daemon.origin.base import Data
from cachefs_daemon.origin.patience import Patience

log = logging.getLogger(__name__)

# Seconds that a reader waits for fetched bytes to reach a tier; then it gets the bytes themselves. A write takes
# milliseconds, and where all writes of a disk hang, another tier takes the block after 1 s.
PUT_PATIENCE: Final = 2.0

# Response to a waiting reader: the location of the block; or the block itself, if no tier can hold it or has it yet; or
# the error.
Answer = Location | PassingBlock | CachefsError
# Result of a fetch. None if no tier's policy wants the block (only blocks without a waiting reader are refused).
Outcome = Answer | None


@dataclass(slots=True, eq=False)
class Flight:
    """A fetch in flight."""

    source: BlockSource
    # Whether a reader waits for the block.
    demanded: bool
    # Ends a read deadline after the last reader began to wait, or, without readers, after the slot was admitted.
    patience: Patience
    # Loop time at which a block that is fetched ahead will be needed; inf: unknown.
    needed: float
    slot: Slot
    # Loop time at which the first waiting read began to wait; inf: no read waits.
    waited_since: float = math.inf
    # Runs once the slot is admitted, unless a fetch process fetches the block.
    task: "asyncio.Task[None] | None" = None
    # Loop time at which the slot was last admitted.
    began: float = 0.0
    # The bytes, once arrived, and the loop time of arrival.
    data: Data = b""
    came: float = math.inf
    # Whether the block may become a transient block without a waiting reader.
    transient: bool = False
    has_landed: bool = False
    # Whether a fetch process was to fetch it. A task then runs only if the process is late, or cannot.
    is_carried: bool = False
    # The search among the nodes of the cluster.
    search: Search | None = None
    # Whether this node keeps the block, as far as is known; otherwise it is a mere copy.
    is_mine: bool = True
    # Whether only another node has asked for the block. Then no third node is searched.
    is_for_peer: bool = False
    # Whether reads of this node wait for the block.
    is_read_here: bool = False
    # Error of the origin, while other nodes are asked whether it serves them.
    refusal: CachefsError | None = None
    # Whether the requesting node fetches the block, as this node is overloaded.
    is_given: bool = False
    # The peer that gave the block, as shown for stalls; empty for the origin.
    via: str = ""
    # Checksums of all pieces, if known.
    checksums: bytes = b""
    # Result, once landed.
    outcome: Outcome = None
    # The bytes for early readers: only while they are being stored.
    early: PassingBlock | None = None
    # Called upon landing; and as soon as the bytes have arrived.
    _told: "list[Callable[[Flight], None]]" = field(default_factory=list)
    _takers: "list[Callable[[Flight], None]]" = field(default_factory=list)

    def is_stuck(self, now: float) -> bool:
        """Return whether the bytes have waited long for a disk."""
        return now - self.came >= PUT_PATIENCE and self.is_being_stored

    @property
    def is_being_stored(self) -> bool:
        """Whether the bytes have arrived, and are in no tier yet."""
        return self.came < math.inf and not self.has_landed

    @property
    def is_under_way(self) -> bool:
        """Whether the fetch is already running in any way."""
        return self.slot.held or self.task is not None or self.search is not None or self.is_carried

    def on_landing(self, tell: Callable[["Flight"], None]) -> None:
        """Call *tell* synchronously upon landing, since a turn of the event loop would cost more than the callbacks do.
        The flight must not have landed yet."""
        self._told.append(tell)

    def on_bytes(self, tell: Callable[["Flight"], None]) -> None:
        """Call *tell* when the bytes have arrived, immediately if they have. They are then in `early`."""
        if not self.is_being_stored:
            self._takers.append(tell)
            return
        self.show()
        tell(self)

    def arrive(self, data: Data, now: float, checksums: bytes = b"") -> None:
        """Record arrival of the bytes at *now* (loop time). checksums: of all pieces, if known."""
        self.data, self.came, self.checksums = data, now, checksums
        takers, self._takers = self._takers, []
        if takers:
            self.show()
            self._tell(takers)

    def show(self) -> PassingBlock:
        """Put the arrived bytes into `early`."""
        if self.early is None:
            self.early = PassingBlock.of(self.source.key, self.data, self.checksums)
            self.checksums = self.early.checksums
        return self.early

    def landing(self) -> "asyncio.Future[None]":
        """Return a future that is done when the flight has landed."""
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell(_: Flight) -> None:
            if not landed.done():  # otherwise cancelled
                landed.set_result(None)

        self.on_landing(tell)
        return landed

    def land(self, outcome: Outcome) -> None:
        """End the flight with *outcome*."""
        self.outcome, self.has_landed = outcome, True
        # No reference may keep the bytes until a garbage collection: the connection reuses their memory.
        self.data, self.early, self.search, self.patience.rest = b"", None, None, asyncio.sleep
        told, self._told, self._takers = self._told, [], []
        self._tell(told)

    def _tell(self, told: "Sequence[Callable[[Flight], None]]") -> None:
        for tell in told:
            try:
                tell(self)
            except Exception:  # the other callbacks still run
                log.exception("one who waited for %s was not told", self.source.subject)


class Waiting:
    """A reader that waits for a flight."""

    __slots__ = ("_flight", "_pass_on", "_timer", "_told", "_until")

    def __init__(self, flight: Flight, until: float, pass_on: Callable[[Flight], None], *, early: bool) -> None:
        """pass_on: called once: when the flight has landed, is stuck, or at *until* (loop time). early: also when the
        bytes have arrived."""
        self._flight = flight
        self._until = until
        self._pass_on = pass_on
        self._told = False
        self._set_timer(asyncio.get_running_loop())
        flight.on_landing(self._tell)
        if early:
            flight.on_bytes(self._tell)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(min(self._until, loop.time() + PUT_PATIENCE), self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._until or self._flight.is_stuck(loop.time()):
            self._tell()
        elif not self._told:
            self._set_timer(loop)

    def _tell(self, _: object = None) -> None:
        if not self._told:
            self._told = True
            self._timer.cancel()
            self._pass_on(self._flight)
