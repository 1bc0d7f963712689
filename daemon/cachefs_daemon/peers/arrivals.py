"""Handles the responses of peers: blocks, refusals, and connections that end."""

import asyncio
from typing import Final

from cachefs_daemon.cluster.handshake import Verdict
from cachefs_daemon.peers.answers import BUSY, Failed, PeerAnswer, Why
from cachefs_daemon.peers.conclusions import REASONS, TOLD, conclude
from cachefs_daemon.peers.connection import News
from cachefs_daemon.peers.cooling import Cooling
from cachefs_daemon.peers.in_flight import InFlight
from cachefs_daemon.peers.peer import HERE, Batch, Peer
from cachefs_daemon.peers.protocol import NoBlock, Refused
from cachefs_daemon.peers.reaching import Reaching
from cachefs_daemon.runtime.errorlog import ErrorLog

# Seconds between two reports to the membership that a peer is alive.
_HEARD_SECONDS: Final = 1.0


class Arrivals:
    """Turns news of connections into responses to requests and measurements of peers. Used on the event loop."""

    def __init__(self, in_flight: InFlight, reaching: Reaching, cooling: Cooling, errors: ErrorLog) -> None:
        self.is_limited = False  # has a peer retransmitted any packet?
        self._in_flight = in_flight
        self._reaching = reaching
        self._cooling = cooling
        self._errors = errors
        self._loop = asyncio.get_running_loop()

    def take(self, peer: Peer, batch: Batch, news: News) -> None:
        """Handle news of a batch: parts of its response, or the end of its connection."""
        if news.exchange is not batch.exchange and not news.ended:
            return
        self._note_sender(peer, batch)
        if news.outcomes:
            self._take_outcomes(peer, batch, news)
        if news.is_tail:
            self._in_flight.credit(batch)
        if news.refused is not None:
            self._take_refusal(peer, batch, news.refused)
        if news.done or news.ended:
            self._end_batch(peer, batch, news)

    def _note_sender(self, peer: Peer, batch: Batch) -> None:
        """Note who responded, and when, from the head of the response."""
        sender = batch.exchange.parser.sender
        if sender is None or batch.timed:
            return
        exchange = batch.exchange
        batch.timed = exchange.first
        if batch.lane == HERE:
            self._in_flight.window.answered(
                exchange.first - exchange.sent, batch.connection.round_trip(), exchange.first
            )
        if sender.node != peer.record.id:
            return  # a refusal follows: blocks of another node are not accepted
        peer.liveness.served()
        if peer.heard_of != sender.incarnation or exchange.first - peer.heard > _HEARD_SECONDS:
            peer.heard_of, peer.heard = sender.incarnation, exchange.first
            self._reaching.membership.heard(sender.node, sender.incarnation)

    def _take_outcomes(self, peer: Peer, batch: Batch, news: News) -> None:
        now, count, size = self._loop.time(), 0, 0
        is_full = self._in_flight.is_short
        for at, outcome in news.outcomes:
            batch.left.discard(at)
            length = batch.asks[at].wanted.length
            self._in_flight.release(batch, 1, length)
            if not isinstance(outcome, NoBlock):
                count, size = count + 1, size + length
            if conclude(batch.asks[at], outcome, now, self._errors):
                ask = batch.asks[at]
                peer.waiting[ask.lane][ask.how.ahead].appendleft(ask)
        if size:
            exchange = batch.exchange
            if batch.lane == HERE:
                peer.measure(exchange.first - exchange.sent, size, exchange.last - batch.timed, exchange.last)
                self._in_flight.window.received(size, exchange.last, is_full=is_full)
            batch.timed = exchange.last

    def _take_refusal(self, peer: Peer, batch: Batch, refused: Refused) -> None:
        """End all open requests of a batch that the peer refuses."""
        sender = batch.exchange.parser.sender
        name, now = peer.record.name, self._loop.time()
        why = REASONS.get(refused.verdict, Why.FAILED)
        epoch = sender.epoch if sender is not None else 0
        text = f"node {name} at {peer.record.address}: {refused.text or refused.status}"
        answer: PeerAnswer = Failed(text, why, epoch)
        if refused.status == 503:
            peer.liveness.busy(now)
            answer = BUSY
        elif why in (Why.EPOCH, Why.STRANGER):
            self._reaching.run(self._reaching.membership.refresh())
        if refused.verdict in TOLD:
            self._errors.add(f"node {name}", text)
        if why in (Why.STRANGER, Why.REFUSED) and refused.verdict != Verdict.OTHER_INCARNATION:
            self._cooling.cool(peer, text)
        for at in sorted(batch.left):
            ask = batch.asks[at]
            self._in_flight.release(batch, 1, ask.wanted.length)
            if answer is BUSY:
                peer.counters.busy += 1
            else:
                peer.counters.failures += 1
            ask.end(answer)
        batch.left.clear()

    def _end_batch(self, peer: Peer, batch: Batch, news: News) -> None:
        """Close a batch whose response is complete or whose connection has ended. Requests that the peer did not see,
        since it had closed an idle connection, are queued again."""
        connection = batch.connection
        del peer.batches[connection]
        peer.signs[batch.lane] = max(peer.signs[batch.lane], batch.exchange.sign)
        retransmitted = batch.exchange.parser.retransmitted
        if retransmitted and batch.lane == HERE:
            self.is_limited = True
            self._in_flight.window.sent_twice(retransmitted, self._loop.time())
        left = [batch.asks[at] for at in sorted(batch.left)]
        self._in_flight.release(batch, len(left), batch.bytes_left)
        if news.done and not news.ended and not connection.is_closing:
            connection.idle_since = self._loop.time()
            peer.idle.append(connection)
        if not left:
            return
        if news.is_bad:
            text = f"node {peer.record.name} at {peer.record.address} has sent what is no answer: {news.reason}"
            self._errors.add(f"node {peer.record.name}", text)
            self._cooling.cool(peer, text)
        elif batch.aborted or (connection.used and not batch.exchange.first):
            text = batch.aborted or news.reason
        else:
            text = f"node {peer.record.name} at {peer.record.address} has broken off: {news.reason}"
            self._cooling.cool(peer, text)
        is_stale = bool(connection.used and not batch.exchange.first and not batch.aborted and not news.is_bad)
        for ask in reversed(left):
            if is_stale and ask.is_open and not ask.again:
                # The peer closed the connection before it read the request.
                ask.again, ask.batch = True, None
                peer.waiting[batch.lane][batch.ahead].appendleft(ask)
            elif ask.is_open:
                peer.counters.failures += 1
                ask.end(Failed(text, Why.AWAY))
