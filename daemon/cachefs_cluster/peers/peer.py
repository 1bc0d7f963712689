"""The client's state of one peer: its record, queued requests, connections, and measurements."""

import itertools
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.backoff import Backoff
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers.connection import PeerConnection, PeerExchange
from cachefs_cluster.peers.peer_requests import BlockRequest, PeerCounters, PeerResponse, RequestOptions
from cachefs_cluster.peers.rail import Rail

# Seconds for which a busy peer gets no requests: at first, and at most.
FIRST_BUSY_SECONDS: Final = 0.02
MAX_BUSY_SECONDS: Final = 1.0
log = logging.getLogger(__name__)

# Kinds of requests, each with connections of its own: for blocks that the peer has, and for blocks that it may have to
# fetch, so that the former never wait behind an origin.
HELD_LANE: Final = 0
FETCH_LANE: Final = 1
LANES: Final = (HELD_LANE, FETCH_LANE)
# Connections to one peer, over all rails, by lane: in all, and for requests ahead of readers.
MAX_CONNECTIONS: Final = (4, 16)
MAX_AHEAD: Final = (3, 4)
# Seconds without requests for a block that a peer sent wrong twice; and how many such blocks are remembered.
WRONG_SECONDS: Final = 60.0
_MAX_WRONG: Final = 1024
# Number of blocks whose times are remembered.
_RECENT_COUNT: Final = 64
# Weight of a new time in the smoothed one; and the most seconds that one latency counts as: after this node itself
# stood still, all responses seem to have taken as long.
_SMOOTHING: Final = 1 / 8
_MAX_LATENCY: Final = 1.0
# Seconds after which a measurement counts half. A peer that seems slow gets no requests, so nothing else would show
# that it has recovered.
_HALF_LIFE: Final = 1.0


@dataclass(slots=True, eq=False)
class PendingBlock:
    """A requested block."""

    peer: "Peer"
    request: BlockRequest
    options: RequestOptions
    on_response: Callable[[PeerResponse], None] | None
    # Loop time of the request.
    requested_at: float
    # The batch that it was sent in, once it was.
    batch: "PeerBatch | None" = None
    # It was sent before, on a connection that the peer had closed meanwhile.
    was_resent: bool = False
    # The peer moved or evicted it before, while it was sent, and was asked again.
    has_moved: bool = False
    # How often it was sent again over another rail, as the one before failed.
    rail_changes: int = 0
    # The peer sent wrong bytes before, and is to check its copy.
    is_check_needed: bool = False

    @property
    def lane(self) -> int:
        return FETCH_LANE if self.options.may_fetch else HELD_LANE

    @property
    def is_open(self) -> bool:
        """Return whether a requester still waits for the block."""
        return self.on_response is not None

    def cancel(self) -> None:
        """Withdraw the request: `on_response` is not called any more. May be called at any time, and again."""
        if self.on_response is not None:
            self.on_response = None
            if self.batch is not None:
                self.batch.abort_if_unwanted()

    def finish(self, response: PeerResponse) -> None:
        """Answer the request, unless it has ended."""
        on_response, self.on_response = self.on_response, None
        if on_response is None:
            return
        try:
            on_response(response)
        except Exception:  # a bug costs this block only: others arrived with it
            log.exception("internal error with a block from node %s", self.peer.record.name)


@dataclass(slots=True, eq=False)
class PeerBatch:
    """The blocks of one request."""

    peer: "Peer"
    lane: int
    is_ahead: bool
    rail: Rail
    connection: PeerConnection
    exchange: PeerExchange
    blocks: list[PendingBlock]
    # Numbers of the blocks without an outcome yet, and their bytes.
    open_indexes: set[int]
    bytes_left: int
    # Bytes of `bytes_left` that do not count as in flight, as they arrive in a moment.
    credited_bytes: int = 0
    # Loop time of the last arrival for this batch: for rates.
    measured_until: float = 0.0
    # Why the loop has aborted the connection; "" if it has not.
    abort_reason: str = ""

    @property
    def last_byte_at(self) -> float:
        """Loop time of the last bytes that arrived, or were sent."""
        return self.exchange.last_byte_at

    def abort_if_unwanted(self) -> None:
        """Abort the batch if no requester waits for any of its blocks, which frees its bytes in flight."""
        if not self.abort_reason and self.open_indexes and not any(self.blocks[at].is_open for at in self.open_indexes):
            self.abort("no reader waits for it any longer")

    def abort(self, reason: str) -> None:
        """Shut the connection down. Its receiver then reports the end."""
        self.abort_reason = reason
        self.connection.abort()


@dataclass(slots=True, eq=False)
class Peer:
    """State of one peer."""

    record: NodeRecord
    # Its addresses, the record's `host` first.
    rails: list[Rail]
    counters: PeerCounters = field(default_factory=PeerCounters)
    # The pauses after it answered BUSY: it is alive, and gets no requests for a moment.
    busy: Backoff = field(default_factory=lambda: Backoff(FIRST_BUSY_SECONDS, MAX_BUSY_SECONDS))
    # Queued requests by lane: those that readers wait for, and those ahead of readers.
    queues: tuple[tuple[deque[PendingBlock], deque[PendingBlock]], ...] = field(
        default_factory=lambda: tuple((deque(), deque()) for _ in LANES)
    )
    # Busy connections with their batches.
    batches: dict[PeerConnection, PeerBatch] = field(default_factory=dict)
    # By lane: loop time of the last heartbeat on connections that are idle now.
    last_heartbeats: list[float] = field(default_factory=lambda: [0.0 for _ in LANES])
    # The peer was silent, and is being probed.
    is_being_probed: bool = False
    # Smoothed seconds to the first byte of a response, and bytes a second after it; 0 before the first measurement.
    latency: float = 0.0
    rate: float = 0.0
    measured_at: float = 0.0  # time of the last measurement, in monotonic seconds
    # The incarnation that answered last, and when the membership was told of it, in monotonic seconds.
    last_incarnation: str = ""
    last_response: float = 0.0
    # Seconds that each of the last blocks took, from the request to the last byte.
    recent_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_COUNT))
    # By key: the loop time until which the peer gets no request for the block.
    _wrong: "OrderedDict[bytes, float]" = field(default_factory=OrderedDict)

    @property
    def usable_rails(self) -> list[Rail]:
        """The rails that get requests: those that answer."""
        usable = [rail for rail in self.rails if not rail.health.is_out_of_use]
        return [rail for rail in usable if not rail.is_suspect] or usable

    @property
    def is_out_of_use(self) -> bool:
        """Whether it gets no requests: no rail of it answers."""
        return all(rail.health.is_out_of_use for rail in self.rails)

    @property
    def out_of_use_reason(self) -> str:
        """Why it gets no requests."""
        return "; ".join(rail.health.reason for rail in self.rails)

    def set_record(self, record: NodeRecord, hosts: Sequence[str]) -> None:
        """Take the node's record in a new view. Rails that it does not have any more are closed."""
        known = {(rail.record.address, rail.record.name): rail for rail in self.rails}
        self.record, self.rails = record, []
        for host in hosts:
            there = record.at(host)
            rail = known.pop((there.address, there.name), None) or Rail(there)
            rail.record = there
            self.rails.append(rail)
        for rail in known.values():
            rail.close_idle()

    def note_busy(self, now: float) -> None:
        """Record that it answered BUSY."""
        if self.busy.is_due(now):
            self.busy.note_failure(now)

    @property
    def has_connections(self) -> bool:
        """Whether any connection to it is open."""
        return bool(self.batches or any(rail.idle_connections for rail in self.rails))

    @property
    def connecting_count(self) -> int:
        """The number of connections that are being opened."""
        return sum(rail.connecting_count for rail in self.rails)

    @property
    def connection_count(self) -> int:
        """The number of connections, with those that are being opened."""
        return len(self.batches) + sum(len(rail.idle_connections) + rail.connecting_count for rail in self.rails)

    @property
    def has_queued(self) -> bool:
        """Return whether any request is queued."""
        return any(queue for lane in self.queues for queue in lane)

    def queued_blocks(self) -> "itertools.chain[PendingBlock]":
        """Return all queued requests."""
        return itertools.chain.from_iterable(queue for lane in self.queues for queue in lane)

    def last_heartbeat(self, lane: int) -> float:
        """Return the loop time at which the peer last proved that it serves blocks (FETCH_LANE: fetches them); 0 for
        never."""
        signs = [one.exchange.last_heartbeat for one in self.batches.values() if one.lane == lane]
        return max(self.last_heartbeats[lane], *signs) if signs else self.last_heartbeats[lane]

    def note_heartbeat(self, now: float, *, fetch: bool) -> None:
        """Record that a probe proved that the peer serves blocks (fetch: and fetches blocks)."""
        self.last_heartbeats[HELD_LANE] = now
        if fetch:
            self.last_heartbeats[FETCH_LANE] = now

    def bytes_left(self, lane: int, card: str) -> int:
        """Return the bytes that were requested in the lane and have not arrived, through one card of this node."""
        return sum(
            batch.bytes_left
            for batch in self.batches.values()
            if batch.lane == lane and batch.connection.card.name == card
        )

    def rail_bytes_left(self, lane: int, rail: Rail) -> int:
        """Return the bytes that were requested in the lane over a rail and have not arrived."""
        return sum(batch.bytes_left for batch in self.batches.values() if batch.lane == lane and batch.rail is rail)

    def can_send(self, lane: int, *, ahead: bool) -> bool:
        """Return whether the lane has, or may open, a connection for one more request."""
        of_lane = [batch for batch in self.batches.values() if batch.lane == lane]
        if ahead:
            return sum(batch.is_ahead for batch in of_lane) < MAX_AHEAD[lane] and len(of_lane) < MAX_CONNECTIONS[lane]
        return len(of_lane) < MAX_CONNECTIONS[lane]

    def measurement_weight(self, now: float) -> float:
        """Return the weight that measurements still have, from 1 to 0."""
        return math.pow(0.5, min(64.0, max(0.0, now - self.measured_at) / _HALF_LIFE))

    def record_response(self, latency: float, length: int, seconds: float, now: float) -> None:
        """Record a response: it began after *latency* seconds, and then *length* bytes took *seconds*."""
        self.measured_at, latency = now, min(latency, _MAX_LATENCY)
        self.latency += (latency - self.latency) * (_SMOOTHING if self.latency else 1.0)
        if seconds > 0:
            rate = length / seconds
            self.rate += (rate - self.rate) * (_SMOOTHING if self.rate else 1.0)

    def note_wrong(self, key: bytes, now: float) -> None:
        """Record that the peer sent wrong bytes for the block twice."""
        self._wrong[key] = now + WRONG_SECONDS
        self._wrong.move_to_end(key)
        if len(self._wrong) > _MAX_WRONG:
            self._wrong.popitem(last=False)

    def has_wrong_bytes(self, key: bytes, now: float) -> bool:
        """Return whether the peer gets no request for the block."""
        return now < self._wrong.get(key, 0.0)
