"""What the client knows of one peer: who it is, what is asked of it, its connections, and how well it does."""

import itertools
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cachefs_daemon.cluster.view import NodeRecord
from cachefs_daemon.peers.answers import How, PeerAnswer, PeerCounters, Wanted
from cachefs_daemon.peers.connection import Exchange, PeerConnection
from cachefs_daemon.peers.liveness import Liveness

log = logging.getLogger(__name__)

# Kinds of questions, which have connections of their own: for blocks that the peer has, and for those that it may have
# to bring, so that the former never wait behind an origin.
HERE: Final = 0
FETCH: Final = 1
LANES: Final = (HERE, FETCH)
# Connections to one peer, by lane: all, and those for what is asked ahead of readers.
MOST_CONNECTIONS: Final = (4, 16)
MOST_AHEAD: Final = (3, 4)
# Seconds for which a peer is not asked again for a block that was wrong twice; and such blocks that are remembered.
WRONG_SECONDS: Final = 60.0
_MOST_WRONG: Final = 1024
# Blocks of which the times are remembered.
_RECENT: Final = 64
# The part of each new time in the smoothed one, and seconds that a latency counts as, at most: where this node stood
# still itself, all answers seem to have taken as long.
_SMOOTHING: Final = 1 / 8
_LONGEST: Final = 1.0
# Seconds after which what was measured counts half. A peer that seems slow is not asked, so nothing else would ever
# show that it is not any more.
_FADING: Final = 1.0


@dataclass(slots=True, eq=False)
class Ask:
    """A block that a peer is asked for."""

    peer: "Peer"
    wanted: Wanted
    how: How
    answer: Callable[[PeerAnswer], None] | None
    # Of the event loop, when it was asked.
    began: float
    # The connection it is asked on, once it is.
    batch: "Batch | None" = None
    # It was asked once before, on a connection that had been closed meanwhile.
    again: bool = False
    # What came before was not the block.
    check: bool = False

    @property
    def lane(self) -> int:
        """HERE or FETCH."""
        return FETCH if self.how.fetch else HERE

    @property
    def is_open(self) -> bool:
        """Does anybody wait for it?"""
        return self.answer is not None

    def cancel(self) -> None:
        """Nobody waits for it any more: `answer` is not called from now on. May be called at any time, and again."""
        if self.answer is not None:
            self.answer = None
            if self.batch is not None:
                self.batch.given_up()

    def end(self, answer: PeerAnswer) -> None:
        """That has come of it."""
        tell, self.answer = self.answer, None
        if tell is None:
            return
        try:
            tell(answer)
        except Exception:  # a bug costs this block only: others have come with it
            log.exception("internal error with a block from node %s", self.peer.record.name)


@dataclass(slots=True, eq=False)
class Batch:
    """What is asked in one question."""

    peer: "Peer"
    lane: int
    ahead: bool
    connection: PeerConnection
    exchange: Exchange
    asks: list[Ask]
    # Numbers of those for which nothing has come yet, and their bytes.
    left: set[int]
    bytes_left: int
    # Of these, bytes that count no more, as they come in a moment.
    credit: int = 0
    # When something has last come for one of them, in loop time: for rates.
    timed: float = 0.0
    # Why the loop has ended its connection; empty where it has not.
    aborted: str = ""

    def given_up(self) -> None:
        """Somebody waits no more. Where nobody does, it is ended, and so are the bytes on the way."""
        if not self.aborted and self.left and not any(self.asks[at].is_open for at in self.left):
            self.abort("nobody waits for it any more")

    def abort(self, reason: str) -> None:
        """Its receiver tells of the end."""
        self.aborted = reason
        self.connection.abort()


@dataclass(slots=True, eq=False)
class Peer:
    """One peer."""

    record: NodeRecord
    counters: PeerCounters = field(default_factory=PeerCounters)
    liveness: Liveness = field(default_factory=Liveness)
    # What waits to be asked, by lane: what somebody waits for, and what not.
    waiting: tuple[tuple[deque[Ask], deque[Ask]], ...] = field(
        default_factory=lambda: tuple((deque(), deque()) for _ in LANES)
    )
    # Connections with no question, those used last at the end; the others; and those that are being made.
    idle: list[PeerConnection] = field(default_factory=list)
    batches: dict[PeerConnection, Batch] = field(default_factory=dict)
    connecting: int = 0
    # By lane: when it last gave a sign on a connection that has no question now, in loop time.
    signs: list[float] = field(default_factory=lambda: [0.0 for _ in LANES])
    # It gave none, and is being probed.
    is_doubted: bool = False
    # Smoothed: seconds to the first byte of an answer, and bytes a second behind it; 0 where nothing was measured.
    latency: float = 0.0
    rate: float = 0.0
    measured: float = 0.0  # when they were last, in monotonic seconds
    # The incarnation with which it answered last, and when the membership was told so, in monotonic seconds.
    heard_of: str = ""
    heard: float = 0.0
    # Seconds that the last blocks took, from the question to the last byte.
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    # By key: until when, in loop time, it is not asked for that block.
    _wrong: "OrderedDict[bytes, float]" = field(default_factory=OrderedDict)

    @property
    def is_waited_for(self) -> bool:
        """Does anything wait to be asked?"""
        return any(queue for lane in self.waiting for queue in lane)

    def waiting_asks(self) -> "itertools.chain[Ask]":
        """All that wait to be asked."""
        return itertools.chain.from_iterable(queue for lane in self.waiting for queue in lane)

    def sign(self, lane: int) -> float:
        """When it last showed that it gives blocks (of lane FETCH: that it brings them), in loop time; 0 for never."""
        signs = [one.exchange.sign for one in self.batches.values() if one.lane == lane]
        return max(self.signs[lane], *signs) if signs else self.signs[lane]

    def sign_given(self, now: float, *, fetch: bool) -> None:
        """It shows that it gives blocks (fetch: and brings them), in another way than by an answer."""
        self.signs[HERE] = now
        if fetch:
            self.signs[FETCH] = now

    def may_open(self, lane: int, *, ahead: bool) -> bool:
        """Is there a connection for one more question of that lane, or may there be?"""
        of_lane = [batch for batch in self.batches.values() if batch.lane == lane]
        if ahead:
            return sum(batch.ahead for batch in of_lane) < MOST_AHEAD[lane] and len(of_lane) < MOST_CONNECTIONS[lane]
        return len(of_lane) < MOST_CONNECTIONS[lane]

    def faded(self, now: float) -> float:
        """By how much what was measured has lost weight: from 1 to 0."""
        return math.pow(0.5, min(64.0, max(0.0, now - self.measured) / _FADING))

    def measure(self, latency: float, length: int, seconds: float, now: float) -> None:
        """An answer began after *latency*, and then *length* bytes took *seconds*."""
        self.measured, latency = now, min(latency, _LONGEST)
        self.latency += (latency - self.latency) * (_SMOOTHING if self.latency else 1.0)
        if seconds > 0:
            rate = length / seconds
            self.rate += (rate - self.rate) * (_SMOOTHING if self.rate else 1.0)

    def note_wrong(self, key: bytes, now: float) -> None:
        """It gave something else for that block, twice."""
        self._wrong[key] = now + WRONG_SECONDS
        self._wrong.move_to_end(key)
        if len(self._wrong) > _MOST_WRONG:
            self._wrong.popitem(last=False)

    def is_wrong(self, key: bytes, now: float) -> bool:
        """Is it not to be asked for that block?"""
        return now < self._wrong.get(key, 0.0)
