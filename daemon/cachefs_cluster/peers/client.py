"""Requests blocks from other nodes.

A receive window for each network card of this node limits the bytes in flight from all peers together. Requests to one
peer are sent in batches, on connections that stay open, over the rail (an address of the peer) that is loaded least.
Rails that fail get no requests until a probe succeeds.
"""

import asyncio
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from cachefs.planning.requests.rails import RailLoad, choose_rail
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.membership.view import ClusterView, NodeRecord
from cachefs_cluster.peers import protocol
from cachefs_cluster.peers.circuit_breaker import CircuitBreaker
from cachefs_cluster.peers.connecting import CannotConnect
from cachefs_cluster.peers.connection import PeerConnection, PeerExchange, PeerReceiver, ReceiverReport
from cachefs_cluster.peers.in_flight import BytesInFlight, CardTraffic
from cachefs_cluster.peers.peer import FETCH_LANE, HELD_LANE, LANES, MAX_CONNECTIONS, Peer, PeerBatch, PendingBlock
from cachefs_cluster.peers.peer_connector import PeerConnector
from cachefs_cluster.peers.peer_requests import (
    PEER_OVERLOADED,
    BlockRequest,
    FailureKind,
    PeerCounters,
    PeerRequestFailed,
    PeerResponse,
    RequestOptions,
)  # fmt: skip
from cachefs_cluster.peers.protocol import BlocksRequest, RequestedBlock, encode_blocks_request
from cachefs_cluster.peers.rail import Rail
from cachefs_cluster.peers.response_handler import ResponseHandler
from cachefs_cluster.peers.tls import Certificates
from cachefs_daemon.runtime.error_log import ErrorLog

# Seconds of silence after which a peer that owes a response counts as dead. Live peers send something every second.
SILENT_SECONDS: Final = 4.0
# Seconds between two checks of deadlines, and seconds that a connection may stay idle. Servers close theirs after 60.
_TICK: Final = 0.05
_IDLE_SECONDS: Final = 20.0


class PeerClient:
    """The client side of the data plane. Used on the event loop; a thread of its own receives."""

    def __init__(
        self,
        cluster: str,
        membership: Membership,
        errors: ErrorLog,
        certificates: Certificates | None,
        window: int,
        secret: ClusterSecret | None = None,
    ) -> None:
        """cluster: name of the cluster. certificates, secret: None without TLS, or without a secret. window: bytes that
        may be in flight from all peers together, through each network card; 0 to measure it."""
        self.counters: dict[str, PeerCounters] = {}  # by id of each peer that was asked
        self._connector = PeerConnector(cluster, membership, certificates, secret)
        self._in_flight = BytesInFlight(window)
        self._circuit_breaker = CircuitBreaker(self._connector, errors)
        self._response_handler = ResponseHandler(self._in_flight, self._connector, self._circuit_breaker, errors)
        self._loop = asyncio.get_running_loop()
        self._receiver = PeerReceiver(self._handle_report)
        self._peers: dict[str, Peer] = {}
        self._peers_with_queue: dict[str, Peer] = {}  # peers with requests to send, and some others
        self._first_peer = 0  # index of the peer that is served first in the next round
        self._is_flushing = self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        membership.add_listener(self._on_view)

    # --- requests of other modules --------------------------------------------------------------------------------

    def request_block(
        self,
        node: NodeRecord,
        request: BlockRequest,
        options: RequestOptions,
        on_response: Callable[[PeerResponse], None],
    ) -> PendingBlock:
        """Request a block from a peer. *on_response* is called once, in a later turn of the loop, and at
        `options.deadline` at the latest (50 ms later where the loop is idle)."""
        now = self._loop.time()
        peer = self._peer(node)
        pending = PendingBlock(peer, request, options, on_response, now)
        refused = self._immediate_response(peer, request, now)
        if refused is not None:
            self._loop.call_soon(pending.finish, refused)
            return pending
        peer.queues[pending.lane][options.is_ahead].append(pending)
        self._peers_with_queue[node.id] = peer
        self._send_queued_soon()
        self._start_timer()
        return pending

    def is_usable(self, node_id: str) -> bool:
        """Return whether the node gets requests. False after a failure, until a probe succeeds."""
        peer = self._peers.get(node_id)
        return peer is None or not peer.is_out_of_use

    def silence_reason(self, node_id: str) -> str:
        """Return why the node gets no requests, or ""."""
        peer = self._peers.get(node_id)
        return peer.out_of_use_reason if peer is not None and peer.is_out_of_use else ""

    def last_heartbeat(self, node_id: str, *, fetch: bool) -> float:
        """Return when the node last showed that it serves blocks (fetch: that it fetches blocks), in loop time; 0 for
        never. A node that fetches a block sends a heartbeat every 0.1 s, however long its origin takes."""
        peer = self._peers.get(node_id)
        return peer.last_heartbeat(FETCH_LANE if fetch else HELD_LANE) if peer is not None else 0.0

    def probe_silent(self, node_id: str) -> None:
        """Probe a node that is silent, such as while readers wait for it, and send no more requests over those of its
        rails whose probes fail."""
        node = self._connector.membership.view.get(node_id)
        if node is not None and not self._is_closed:
            self._circuit_breaker.probe_silent(self._peer(node))

    def expected_seconds(self, node: NodeRecord, length: int) -> float:
        """Estimate the seconds from a request sent now to the last byte of a block that the node has. The estimate
        falls the longer no request measured the node."""
        peer = self._peers.get(node.id)
        rails = peer.usable_rails if peer is not None else []
        cards = [self._in_flight.cards[rail.card] for rail in rails if rail.card in self._in_flight.cards]
        traffic = cards or [*self._in_flight.cards.values()] or [self._in_flight.unmeasured]
        latency, faded, queued, rate = 0.0, 1.0, 0, math.inf
        if peer is not None:
            latency, rate = peer.latency, peer.rate or math.inf
            faded = peer.measurement_weight(self._loop.time())
            queued = sum(pending.request.length for pending in itertools.islice(peer.queues[HELD_LANE][False], 256))
        seconds = min(
            (card.bytes[HELD_LANE] + queued / len(traffic) + length) / min(card.window.rate, rate) for card in traffic
        )
        return (latency + seconds) * faded

    def median_seconds(self, node_id: str) -> float:
        """Return the median seconds of the last blocks requested from this peer; 0 without any."""
        peer = self._peers.get(node_id)
        return statistics.median(peer.recent_seconds) if peer is not None and peer.recent_seconds else 0.0

    @property
    def window(self) -> int:
        """Bytes that may be in flight from all peers together, through all cards, for blocks that they have."""
        cards = self._in_flight.cards or {"": self._in_flight.unmeasured}
        return sum(card.window.size for card in cards.values())

    @property
    def in_flight(self) -> tuple[int, int]:
        """Bytes in flight now: of blocks that peers have, and of blocks that they fetch."""
        return self._in_flight.total(HELD_LANE), self._in_flight.total(FETCH_LANE)

    def rails_of(self, node_id: str) -> Sequence[Rail]:
        """Return the rails of a node; none before a request to it."""
        peer = self._peers.get(node_id)
        return peer.rails if peer is not None else ()

    @property
    def rails_down(self) -> int:
        """The number of rails that do not answer, of nodes that answer over another."""
        alive = (peer for peer in self._peers.values() if not peer.is_out_of_use)
        return sum(rail.health.is_out_of_use for peer in alive for rail in peer.rails)

    def received_by_card(self) -> dict[str, int]:
        """Return the bytes received from other nodes by network card of this node."""
        return {name: card.received_bytes for name, card in self._in_flight.cards.items()}

    async def close(self) -> None:
        """Fail all open requests, and close all connections. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._connector.stop()
        stopping = PeerRequestFailed("the daemon is stopping", FailureKind.UNREACHABLE)
        for peer in self._peers.values():
            blocks = [*peer.queued_blocks(), *(pending for batch in peer.batches.values() for pending in batch.blocks)]
            for pending in blocks:
                pending.finish(stopping)
        self._receiver.close()
        self._connector.close()

    # --- sending requests -----------------------------------------------------------------------------------------

    def _peer(self, node: NodeRecord) -> Peer:
        peer = self._peers.get(node.id)
        if peer is None:
            peer = self._peers[node.id] = Peer(node, [], self.counters.setdefault(node.id, PeerCounters()))
        if peer.record is not node or not peer.rails:
            peer.set_record(node, self._connector.hosts_of(node))
        return peer

    def _immediate_response(self, peer: Peer, request: BlockRequest, now: float) -> PeerResponse | None:
        """Return the response that is known without asking the peer, if any."""
        if self._is_closed:
            return PeerRequestFailed("the daemon is stopping", FailureKind.UNREACHABLE)
        if peer.is_out_of_use:
            return PeerRequestFailed(peer.out_of_use_reason, FailureKind.UNREACHABLE)
        if not peer.busy.is_due(now):
            peer.counters.busy += 1
            return PEER_OVERLOADED
        if peer.has_wrong_bytes(request.key, now):
            return PeerRequestFailed(
                f"node {peer.record.name} sent wrong bytes for this block a moment ago", FailureKind.WRONG_BYTES
            )
        return None

    def _send_queued_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._send_queued)

    def _send_queued(self) -> None:
        """Send all requests that have room: those that readers wait for first, and round robin over peers."""
        self._is_flushing = False
        self._peers_with_queue = {node: peer for node, peer in self._peers_with_queue.items() if peer.has_queued}
        peers = [*self._peers_with_queue.values()]
        if not peers or self._is_closed:
            self._in_flight.note_waiting([])
            return
        self._in_flight.note_requests(peers)
        self._first_peer = (self._first_peer + 1) % len(peers)
        peers = peers[self._first_peer :] + peers[: self._first_peer]
        for ahead in (False, True):
            for lane in LANES:
                for peer in peers:
                    self._send_queued_of(peer, lane, ahead=ahead)
        self._in_flight.note_waiting([peer for peer in peers if any(peer.queues[HELD_LANE])])

    def _send_queued_of(self, peer: Peer, lane: int, *, ahead: bool) -> None:
        queue = peer.queues[lane][ahead]
        while queue and peer.can_send(lane, ahead=ahead):
            while queue and not queue[0].is_open:
                queue.popleft()
            if not queue:
                return
            rail = self._pick_rail(peer, lane, queue)
            if rail is None:
                return
            connection = rail.idle_connections.pop()
            blocks = self._pick_blocks(self._in_flight.card(connection.card), lane, queue)
            self._send_batch(peer, rail, connection, blocks, lane)

    def _pick_rail(self, peer: Peer, lane: int, queue: deque[PendingBlock]) -> Rail | None:
        """Return the rail for the next request, which has an idle connection; None if the request has to wait."""
        rail = self._least_loaded(peer, peer.usable_rails, lane, queue)
        if rail is None or rail.idle_connections:
            return rail
        connected = [each for each in peer.usable_rails if each.idle_connections]
        for each in (rail,) if connected else peer.usable_rails:  # the first one that answers serves the request
            self._open_connection(peer, each)
        return self._least_loaded(peer, connected, lane, queue)

    def _least_loaded(self, peer: Peer, rails: Sequence[Rail], lane: int, queue: deque[PendingBlock]) -> Rail | None:
        """Return the rail that would bring the next block first; None if the request should wait for room."""
        if not rails:
            return None
        now, length, loads = self._loop.time(), queue[0].request.length, list[RailLoad]()
        for rail in rails:
            card = self._in_flight.cards.get(rail.card, self._in_flight.unmeasured)
            has_room = self._in_flight.has_room(card, lane, length, 0) and not (
                lane == HELD_LANE and card.should_wait_for_room(queue)
            )
            if len(rails) == 1:
                return rail if has_room else None
            is_known = card is not self._in_flight.unmeasured
            loads.append(
                RailLoad(
                    peer.rail_bytes_left(lane, rail),
                    rail.rate.value(now),
                    card.bytes[lane],
                    card.window.rate if is_known else 0.0,
                    card.card.distance,
                    rail.used_at,
                    has_room,
                )
            )
        at = choose_rail(loads, length)
        return rails[at] if at is not None else None

    def _pick_blocks(self, card: CardTraffic, lane: int, queue: deque[PendingBlock]) -> list[PendingBlock]:
        """Take the requests for one batch from the queue."""
        blocks, size = list[PendingBlock](), 0
        while queue and len(blocks) < protocol.MAX_BLOCKS:
            length = queue[0].request.length
            if queue[0].is_open:
                if blocks and (
                    queue[0].options.may_delegate != blocks[0].options.may_delegate
                    or size + length > protocol.MAX_DATA
                    or not self._in_flight.has_room(card, lane, length, size)
                ):
                    break
                blocks.append(queue[0])
                size += length
            queue.popleft()
        return blocks

    def _send_batch(
        self, peer: Peer, rail: Rail, connection: PeerConnection, blocks: list[PendingBlock], lane: int
    ) -> None:
        now, card = self._loop.time(), self._in_flight.card(connection.card)
        how = blocks[0].options
        lengths = [pending.request.length for pending in blocks]
        greeting = self._connector.make_greeting(peer.record)
        check = self._connector.make_sender_check(peer.record, greeting)
        exchange = PeerExchange([pending.request.key for pending in blocks], lengths, now, check)
        if lane == HELD_LANE:
            rail.rate.note_request(now)
            if lengths[-1] > card.window.size // 2:
                exchange.tail_bytes = protocol.max_response_bytes(()) + card.window.size // 2
        rail.used_at, rail.card = now, connection.card.name
        batch = PeerBatch(
            peer, lane, how.is_ahead, rail, connection, exchange, blocks, set(range(len(blocks))), sum(lengths)
        )
        seconds = max(pending.options.deadline for pending in blocks) - now
        jobs = list(dict.fromkeys(pending.request.job for pending in blocks if pending.request.job))[
            : protocol.MAX_JOBS
        ]
        numbers = {job: number for number, job in enumerate(jobs, 1)}
        message = BlocksRequest(
            [_requested_block(pending, numbers, now) for pending in blocks],
            how.may_fetch,
            how.is_ahead,
            how.may_delegate,
            jobs,
        )
        for pending in blocks:
            pending.batch = batch
        peer.batches[connection] = batch
        self._in_flight.add_batch(batch)
        if card.has_retransmissions and lane == HELD_LANE:
            connection.limit_receive_buffer(card.window.size)
        try:
            connection.send(exchange, encode_blocks_request(message, greeting, seconds))
        except OSError:
            connection.abort()  # the receiver sees the end and reports it

    # --- connections ----------------------------------------------------------------------------------------------

    def _open_connection(self, peer: Peer, rail: Rail) -> None:
        """Open one more connection over the rail, unless enough are open, or being opened."""
        wanted = 1 if not peer.counters.blocks else 2
        if rail.connecting_count >= wanted or rail.health.is_out_of_use:
            return
        if peer.connection_count >= sum(MAX_CONNECTIONS):
            idle = [each for each in peer.rails if each.idle_connections]
            if idle:  # of another rail: this one has none
                min(idle, key=lambda each: each.used_at).idle_connections.pop(0).abort()
            elif len(peer.rails) > 1:
                return
        rail.connecting_count += 1
        self._connector.start_task(self._connect(peer, rail))

    async def _connect(self, peer: Peer, rail: Rail) -> None:
        try:
            connection = await self._connector.connect(rail.record)
        except CannotConnect as error:
            self._circuit_breaker.fail_connection(peer, rail, error)
            self._send_queued_soon()
            return
        finally:
            rail.connecting_count -= 1
        card = self._in_flight.card(connection.card)
        if card.has_retransmissions:
            connection.limit_receive_buffer(card.window.size)
        connection.idle_since = self._loop.time()
        self._receiver.add(connection)
        if rail in peer.rails:
            rail.card = card.card.name
            rail.idle_connections.append(connection)
        else:
            connection.abort()
        self._send_queued_soon()
        self._start_timer()

    def _handle_report(self, report: ReceiverReport) -> None:
        """Handle news of a connection."""
        if self._is_closed:
            return
        peer = self._peers.get(report.connection.peer)
        batch = peer.batches.get(report.connection) if peer is not None else None
        if peer is not None and batch is not None:
            self._response_handler.handle_report(peer, batch, report)
            if peer.has_queued:  # some requests are to be sent again
                self._peers_with_queue[peer.record.id] = peer
            self._send_queued_soon()
        elif peer is not None and report.has_ended:
            for rail in peer.rails:
                if report.connection in rail.idle_connections:
                    rail.idle_connections.remove(report.connection)

    def _on_view(self, view: ClusterView) -> None:
        """Forget nodes that have left. Nodes with requests in progress are forgotten at the next change."""
        for peer in [one for node, one in self._peers.items() if view.get(node) is None]:
            if not (peer.batches or peer.connecting_count or peer.has_queued):
                for rail in peer.rails:
                    rail.close_idle()
                del self._peers[peer.record.id]

    # --- deadlines ------------------------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = self._loop.call_later(_TICK, self._check_peers)

    def _check_peers(self) -> None:
        """Fail requests whose deadline has passed, abort batches of silent peers, and close idle connections."""
        self._timer = None
        now, is_used = self._loop.time(), False
        for peer in list(self._peers.values()):
            for pending in peer.queued_blocks():
                if pending.options.deadline <= now and pending.is_open:
                    pending.finish(
                        PeerRequestFailed(
                            f"the request to node {peer.record.name} could not be sent before its deadline",
                            FailureKind.LATE,
                        )
                    )
            for batch in list(peer.batches.values()):
                self._check_batch(peer, batch, now)
            for rail in peer.rails:
                while rail.idle_connections and now - rail.idle_connections[0].idle_since > _IDLE_SECONDS:
                    rail.idle_connections.pop(0).abort()
            is_used = is_used or peer.has_connections or peer.has_queued
        if is_used:
            self._start_timer()

    def _check_batch(self, peer: Peer, batch: PeerBatch, now: float) -> None:
        if batch.abort_reason:
            return
        if now - batch.exchange.last_byte_at > SILENT_SECONDS:
            address = batch.rail.record.address
            text = f"node {peer.record.name} at {address} has sent nothing for {SILENT_SECONDS:.0f} s"
            batch.abort(text)
            self._circuit_breaker.take_out_of_use(peer, batch.rail, text)
            return
        for at in sorted(batch.open_indexes):
            pending = batch.blocks[at]
            if pending.options.deadline <= now and pending.is_open:
                peer.counters.failures += 1
                pending.finish(
                    PeerRequestFailed(
                        f"node {peer.record.name} did not send the block before the deadline", FailureKind.LATE
                    )
                )
        batch.abort_if_unwanted()


def _requested_block(pending: PendingBlock, jobs: Mapping[str, int], now: float) -> RequestedBlock:
    """jobs: number of each job of the request; now: loop time."""
    request = pending.request
    return RequestedBlock(
        request.ref.snapshot,
        request.ref.entry,
        request.ref.number,
        request.key,
        request.length,
        pending.is_check_needed,
        pending.options.await_snapshot,
        jobs.get(request.job, 0),
        int(1000 * min(max(0.0, request.urgent_at - now), protocol.MAX_SECONDS)) if pending.options.is_ahead else 0,
    )
