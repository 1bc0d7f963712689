"""Handles the responses of peers: blocks, refusals, and connections that end."""

import asyncio
from typing import Final

from cachefs.planning.requests.rails import MAX_RAILS
from cachefs_cluster.membership.handshake import Verdict
from cachefs_cluster.peers import protocol
from cachefs_cluster.peers.circuit_breaker import CircuitBreaker
from cachefs_cluster.peers.connection import BlockOutcome, ReceiverReport, WrongBytes
from cachefs_cluster.peers.in_flight import BytesInFlight
from cachefs_cluster.peers.peer import HELD_LANE, Peer, PeerBatch, PendingBlock
from cachefs_cluster.peers.peer_connector import PeerConnector
from cachefs_cluster.peers.peer_requests import (
    BLOCK_NOT_FOUND,
    FETCH_YOURSELF,
    PEER_OVERLOADED,
    SNAPSHOT_NOT_FOUND,
    FailureKind,
    PeerBlock,
    PeerRequestFailed,
    PeerResponse,
)
from cachefs_cluster.peers.protocol import BlockStatus, PeerRefusal
from cachefs_daemon.runtime.error_log import ErrorLog

# The kind of failure for each verdict that refuses a request.
FAILURE_KINDS: Final = {
    Verdict.OLD_EPOCH.value: FailureKind.OTHER_EPOCH,
    Verdict.OTHER_LIST.value: FailureKind.OTHER_EPOCH,
    Verdict.OTHER_NODE.value: FailureKind.WRONG_NODE,
    Verdict.OTHER_CLUSTER.value: FailureKind.WRONG_NODE,
    Verdict.OTHER_INCARNATION.value: FailureKind.WRONG_NODE,
    Verdict.OTHER_PROTOCOL.value: FailureKind.REFUSED,
    Verdict.NOT_A_MEMBER.value: FailureKind.REFUSED,
    Verdict.UNPROVEN.value: FailureKind.REFUSED,
}
# Verdicts that an administrator has to act on: they are logged.
LOGGED_VERDICTS: Final = (
    Verdict.OTHER_LIST, Verdict.OTHER_NODE, Verdict.OTHER_CLUSTER, Verdict.OTHER_PROTOCOL, Verdict.NOT_A_MEMBER,
    Verdict.UNPROVEN,
)  # fmt: skip
# Seconds between two reports to the membership that a peer is alive.
_RESPONSE_NOTE_SECONDS: Final = 1.0


def finish_block(block: PendingBlock, outcome: BlockOutcome, now: float, errors: ErrorLog) -> bool:
    """Answer the requester, and count the outcome. Return whether to ask the peer again after wrong bytes."""
    peer = block.peer
    counters = peer.counters
    if isinstance(outcome, PeerBlock):
        counters.blocks += 1
        counters.bytes += block.request.length
        counters.seconds += now - block.requested_at
        peer.recent_seconds.append(now - block.requested_at)
        peer.busy.forget_failures()
        block.finish(outcome)
    elif isinstance(outcome, WrongBytes):
        return _handle_wrong_bytes(block, outcome, now, errors)
    elif outcome.status == protocol.BLOCK_NOT_FOUND:
        counters.not_here += 1
        block.finish(SNAPSHOT_NOT_FOUND if outcome.text == protocol.SNAPSHOT_NOT_FOUND else BLOCK_NOT_FOUND)
    elif outcome.status == protocol.FETCH_YOURSELF:
        counters.delegated += 1
        block.finish(FETCH_YOURSELF)
    elif outcome.status == protocol.OVERLOADED:
        counters.busy += 1
        peer.note_busy(now)
        block.finish(PEER_OVERLOADED)
    else:
        counters.failures += 1
        block.finish(PeerRequestFailed(f"node {peer.record.name}: {outcome.text}"))
    return False


def _handle_wrong_bytes(block: PendingBlock, wrong: WrongBytes, now: float, errors: ErrorLog) -> bool:
    peer = block.peer
    if wrong.moved:
        if not block.has_moved:
            # The peer moved it to another tier or evicted it meanwhile. It has it there, or fetches it if this request
            # says so. Otherwise the requester would go to the origin.
            block.has_moved, block.batch = True, None
            return True
        peer.counters.not_here += 1
        block.finish(BLOCK_NOT_FOUND)
        return False
    peer.counters.wrong += 1
    name, key = peer.record.name, block.request.key.hex()
    if not block.is_check_needed:
        # The peer checks its own copy: if that is damaged, the peer repairs it and answers BLOCK_NOT_FOUND.
        errors.add(f"node {name}", f"node {name} sent wrong bytes for block {key}; asking it to verify its copy")
        block.is_check_needed, block.batch = True, None
        return True
    text = f"node {name} sent wrong bytes for block {key} twice; it gets no request for this block for a minute"
    errors.add(f"node {name}", text)
    peer.note_wrong(block.request.key, now)
    block.finish(PeerRequestFailed(text, FailureKind.WRONG_BYTES))
    return False


class ResponseHandler:
    """Turns news of connections into responses to requests and measurements of peers. Used on the event loop."""

    def __init__(
        self, in_flight: BytesInFlight, reaching: PeerConnector, cooling: CircuitBreaker, errors: ErrorLog
    ) -> None:
        self._in_flight = in_flight
        self._connector = reaching
        self._circuit_breaker = cooling
        self._errors = errors
        self._loop = asyncio.get_running_loop()

    def handle_report(self, peer: Peer, batch: PeerBatch, report: ReceiverReport) -> None:
        """Handle news of a batch: parts of its response, or the end of its connection."""
        if report.exchange is not batch.exchange and not report.has_ended:
            return
        self._note_sender(peer, batch)
        if report.outcomes:
            self._handle_outcomes(peer, batch, report)
        if report.has_only_tail_left:
            self._in_flight.credit_tail(batch)
        if report.refused is not None:
            self._handle_refusal(peer, batch, report.refused)
        if report.is_complete or report.has_ended:
            self._end_batch(peer, batch, report)

    def _note_sender(self, peer: Peer, batch: PeerBatch) -> None:
        """Note who responded, and when, from the head of the response."""
        sender = batch.exchange.parser.sender
        if sender is None or batch.measured_until:
            return
        exchange = batch.exchange
        batch.measured_until = exchange.first_byte_at
        if batch.lane == HELD_LANE:
            self._in_flight.of_batch(batch).window.note_latency(
                exchange.first_byte_at - exchange.sent_at, batch.connection.round_trip(), exchange.first_byte_at
            )
        if sender.node != peer.record.id:
            return  # a refusal follows: blocks of another node are not accepted
        batch.rail.health.note_response()
        if (
            peer.last_incarnation != sender.incarnation
            or exchange.first_byte_at - peer.last_response > _RESPONSE_NOTE_SECONDS
        ):
            peer.last_incarnation, peer.last_response = sender.incarnation, exchange.first_byte_at
            self._connector.membership.note_response(sender.node, sender.incarnation)

    def _handle_outcomes(self, peer: Peer, batch: PeerBatch, report: ReceiverReport) -> None:
        now, count, size = self._loop.time(), 0, 0
        card = self._in_flight.of_batch(batch)
        for at, outcome in report.outcomes:
            batch.open_indexes.discard(at)
            length = batch.blocks[at].request.length
            self._in_flight.release(batch, 1, length)
            if not isinstance(outcome, BlockStatus):
                count, size = count + 1, size + length
            if finish_block(batch.blocks[at], outcome, now, self._errors):
                pending = batch.blocks[at]
                peer.queues[pending.lane][pending.options.is_ahead].appendleft(pending)
        if size:
            exchange = batch.exchange
            card.received_bytes += size
            batch.rail.received_bytes += size
            if batch.lane == HELD_LANE:
                peer.record_response(
                    exchange.first_byte_at - exchange.sent_at,
                    size,
                    exchange.last_byte_at - batch.measured_until,
                    exchange.last_byte_at,
                )
                batch.rail.rate.note_received(size, exchange.last_byte_at)
                card.window.note_received(size, exchange.last_byte_at, is_full=card.has_waiting_requests)
            batch.measured_until = exchange.last_byte_at

    def _handle_refusal(self, peer: Peer, batch: PeerBatch, refused: PeerRefusal) -> None:
        """End all open requests of a batch that the peer refuses."""
        sender = batch.exchange.parser.sender
        name, now = peer.record.name, self._loop.time()
        why = FAILURE_KINDS.get(refused.verdict, FailureKind.FAILED)
        epoch = sender.epoch if sender is not None else 0
        text = f"node {name} at {batch.rail.record.address}: {refused.text or refused.status}"
        response: PeerResponse = PeerRequestFailed(text, why, epoch)
        if refused.status == 503:
            peer.note_busy(now)
            response = PEER_OVERLOADED
        elif why in (FailureKind.OTHER_EPOCH, FailureKind.WRONG_NODE):
            self._connector.start_task(self._connector.membership.refresh())
        if refused.verdict in LOGGED_VERDICTS:
            self._errors.add(f"node {name}", text)
        if why in (FailureKind.WRONG_NODE, FailureKind.REFUSED) and refused.verdict != Verdict.OTHER_INCARNATION:
            self._circuit_breaker.take_out_of_use(peer, batch.rail, text)
            if why == FailureKind.WRONG_NODE and not peer.is_out_of_use:
                return  # the node may be right at its other addresses
        for at in sorted(batch.open_indexes):
            pending = batch.blocks[at]
            self._in_flight.release(batch, 1, pending.request.length)
            if response is PEER_OVERLOADED:
                peer.counters.busy += 1
            else:
                peer.counters.failures += 1
            pending.finish(response)
        batch.open_indexes.clear()

    def _end_batch(self, peer: Peer, batch: PeerBatch, report: ReceiverReport) -> None:
        """Close a batch whose response is complete or whose connection has ended. Requests that the peer did not see,
        since it had closed an idle connection, are queued again, and so are those of a failed rail where the peer has
        others."""
        connection = batch.connection
        del peer.batches[connection]
        peer.last_heartbeats[batch.lane] = max(peer.last_heartbeats[batch.lane], batch.exchange.last_heartbeat)
        retransmitted = batch.exchange.parser.retransmitted
        if retransmitted and batch.lane == HELD_LANE:
            card = self._in_flight.of_batch(batch)
            card.has_retransmissions = True
            card.window.note_retransmissions(retransmitted, self._loop.time())
        left = [batch.blocks[at] for at in sorted(batch.open_indexes)]
        self._in_flight.release(batch, len(left), batch.bytes_left)
        rail, address = batch.rail, batch.rail.record.address
        if not any(one.rail is rail and one.lane == HELD_LANE for one in peer.batches.values()):
            rail.rate.note_idle()
        if report.is_complete and not report.has_ended and not connection.is_closing:
            if rail in peer.rails and not rail.health.is_out_of_use:
                connection.idle_since = self._loop.time()
                rail.idle_connections.append(connection)
            else:
                connection.abort()
        if not left:
            return
        if report.is_invalid:
            text = f"node {peer.record.name} at {address} sent an invalid response: {report.reason}"
            self._errors.add(f"node {peer.record.name}", text)
            self._circuit_breaker.take_out_of_use(peer, rail, text)
        elif batch.abort_reason or (connection.response_count and not batch.exchange.first_byte_at):
            text = batch.abort_reason or report.reason
        else:
            text = f"node {peer.record.name} at {address} closed the connection: {report.reason}"
            self._circuit_breaker.take_out_of_use(peer, rail, text)
        is_stale = bool(
            connection.response_count
            and not batch.exchange.first_byte_at
            and not batch.abort_reason
            and not report.is_invalid
        )
        has_failed = rail.health.is_out_of_use and not peer.is_out_of_use
        for pending in reversed(left):
            if has_failed and pending.is_open and pending.rail_changes < MAX_RAILS:
                pending.rail_changes, pending.batch = pending.rail_changes + 1, None
                peer.queues[batch.lane][batch.is_ahead].appendleft(pending)
            elif is_stale and pending.is_open and not pending.was_resent:
                # The peer closed the connection before it read the request.
                pending.was_resent, pending.batch = True, None
                peer.queues[batch.lane][batch.is_ahead].appendleft(pending)
            elif pending.is_open:
                peer.counters.failures += 1
                pending.finish(PeerRequestFailed(text, FailureKind.UNREACHABLE))
