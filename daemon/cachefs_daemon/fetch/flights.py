"""A fetch in flight, and those who wait for it."""

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

# Seconds for which a reader waits until the bytes that have come are in a tier; then it gets the bytes themselves. A
# block is written in milliseconds, and where all writes of a disk hang, another tier takes it after 1 s.
PUT_PATIENCE: Final = 2.0

# What somebody gets who waits for a block: where it is; or itself, where no tier can hold it, or has it yet; or why it
# did not come.
Answer = Location | PassingBlock | CachefsError
# What came of a fetch. None where no tier's policy wants the block (only blocks that nobody waits for are refused).
Outcome = Answer | None


@dataclass(slots=True, eq=False)
class Flight:
    """A fetch in flight."""

    source: BlockSource
    # True where somebody waits for the block.
    demanded: bool
    # It ends a read deadline after the last one who waits has come, or after it has got its slot if nobody waits.
    patience: Patience
    # Loop time at which somebody will want what is fetched ahead; inf: nobody knows.
    needed: float
    slot: Slot
    # Loop time at which the first waiting read began to wait for the block; inf: no read waits.
    waited_since: float = math.inf
    # Runs once it has its slot, unless a fetch process brings it.
    task: "asyncio.Task[None] | None" = None
    # When it got its slot last, in loop time.
    began: float = 0.0
    # Its bytes, once they have come, and when that was, in loop time.
    data: Data = b""
    came: float = math.inf
    # May it be a transient block although nobody waits for it?
    transient: bool = False
    has_landed: bool = False
    # Was a fetch process to bring it? There is a task then only where that is late, or cannot.
    is_carried: bool = False
    # Where it is looked for among the nodes of the cluster.
    search: Search | None = None
    # Is this node the one that keeps the block, as far as is known? Else it is a copy of another's.
    is_mine: bool = True
    # Has only another node asked for it? Then it is looked for on no third one.
    is_for_peer: bool = False
    # Do reads of this node wait for it?
    is_read_here: bool = False
    # Why its origin does not give it to this node, while others are asked whether it gives it to them.
    refusal: CachefsError | None = None
    # Does another node bring it, which has asked for it itself, since this one is behind?
    is_given: bool = False
    # What brought it, as stalls tell: empty for its origin.
    via: str = ""
    # Of all its pieces, where they are known.
    checksums: bytes = b""
    # What came of it, once it has landed.
    outcome: Outcome = None
    # Its bytes for those who take them before they are in a tier: only while they are being stored.
    early: PassingBlock | None = None
    # Who is told when it has landed, and who is told as soon as its bytes have come.
    _told: "list[Callable[[Flight], None]]" = field(default_factory=list)
    _takers: "list[Callable[[Flight], None]]" = field(default_factory=list)

    def is_stuck(self, now: float) -> bool:
        """Do its bytes wait for a disk?"""
        return now - self.came >= PUT_PATIENCE and self.is_being_stored

    @property
    def is_being_stored(self) -> bool:
        """Have its bytes come, which are in no tier yet?"""
        return self.came < math.inf and not self.has_landed

    @property
    def is_under_way(self) -> bool:
        """Does anybody bring it already?"""
        return self.slot.held or self.task is not None or self.search is not None or self.is_carried

    def on_landing(self, tell: Callable[["Flight"], None]) -> None:
        """Call *tell* when it lands: at once, since a turn of the event loop for each would take longer than what is
        done then. It has not landed yet."""
        self._told.append(tell)

    def on_bytes(self, tell: Callable[["Flight"], None]) -> None:
        """Call *tell* when its bytes have come: at once where they have. Then they are in `early`."""
        if not self.is_being_stored:
            self._takers.append(tell)
            return
        self.show()
        tell(self)

    def arrive(self, data: Data, now: float, checksums: bytes = b"") -> None:
        """Its bytes have come, *now* in loop time. checksums: of all pieces, where they are known."""
        self.data, self.came, self.checksums = data, now, checksums
        takers, self._takers = self._takers, []
        if takers:
            self.show()
            self._tell(takers)

    def show(self) -> PassingBlock:
        """Have its bytes, which have come, in `early`."""
        if self.early is None:
            self.early = PassingBlock.of(self.source.key, self.data, self.checksums)
            self.checksums = self.early.checksums
        return self.early

    def landing(self) -> "asyncio.Future[None]":
        """Is done when it has landed."""
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell(_: Flight) -> None:
            if not landed.done():  # else nobody waits any more
                landed.set_result(None)

        self.on_landing(tell)
        return landed

    def land(self, outcome: Outcome) -> None:
        """It ends with that."""
        self.outcome, self.has_landed = outcome, True
        # Nothing may keep its bytes until Python's collector finds it: the connection uses their memory again.
        self.data, self.early, self.search, self.patience.rest = b"", None, None, asyncio.sleep
        told, self._told, self._takers = self._told, [], []
        self._tell(told)

    def _tell(self, told: "Sequence[Callable[[Flight], None]]") -> None:
        for tell in told:
            try:
                tell(self)
            except Exception:  # the others are told all the same
                log.exception("one who waited for %s was not told", self.source.subject)


class Waiting:
    """One who waits for a flight."""

    __slots__ = ("_flight", "_pass_on", "_timer", "_told", "_until")

    def __init__(self, flight: Flight, until: float, pass_on: Callable[[Flight], None], *, early: bool) -> None:
        """pass_on: is called once: when the flight has landed, or is stuck, or at *until* (loop time). early: also when
        its bytes have come."""
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
