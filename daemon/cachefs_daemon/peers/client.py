"""Requests blocks from other nodes.

One receive window limits the bytes in flight from all peers together. Requests to one peer are sent in batches, on
connections that stay open. Peers that fail get no requests until a probe succeeds.
"""

import asyncio
import itertools
import statistics
from collections.abc import Callable
from typing import Final

from cachefs.planning.requests.receive_window import ReceiveWindow
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cluster.secret import ClusterSecret
from cachefs_daemon.cluster.view import ClusterView, NodeRecord
from cachefs_daemon.peers import protocol
from cachefs_daemon.peers.answers import (
    BUSY,
    Failed,
    How,
    PeerAnswer,
    PeerCounters,
    Wanted,
    Why,
)  # fmt: skip
from cachefs_daemon.peers.arrivals import Arrivals
from cachefs_daemon.peers.connecting import CannotConnect
from cachefs_daemon.peers.connection import Exchange, News, PeerConnection
from cachefs_daemon.peers.cooling import Cooling
from cachefs_daemon.peers.in_flight import InFlight
from cachefs_daemon.peers.peer import FETCH, HERE, LANES, Ask, Batch, Peer
from cachefs_daemon.peers.protocol import AskedBlock, Question, encode_question
from cachefs_daemon.peers.reaching import Reaching
from cachefs_daemon.peers.receiver import Receiver
from cachefs_daemon.peers.tls import Certificates
from cachefs_daemon.runtime.errorlog import ErrorLog

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
        may be in flight from all peers together; 0 to measure it."""
        self.counters: dict[str, PeerCounters] = {}  # by id of each peer that was asked
        self._reaching = Reaching(cluster, membership, certificates, secret)
        self._window = ReceiveWindow(window)
        self._in_flight = InFlight(self._window)
        self._cooling = Cooling(self._reaching, errors)
        self._arrivals = Arrivals(self._in_flight, self._reaching, self._cooling, errors)
        self._loop = asyncio.get_running_loop()
        self._receiver = Receiver(self._take)
        self._peers: dict[str, Peer] = {}
        self._waited_for: dict[str, Peer] = {}  # peers with requests to send, and some others
        self._turn = 0  # index of the peer that is served first in the next round
        self._is_flushing = self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        membership.listen(self._on_view)

    # --- requests of other modules --------------------------------------------------------------------------------

    def ask(self, node: NodeRecord, wanted: Wanted, how: How, answer: Callable[[PeerAnswer], None]) -> Ask:
        """Request a block from a peer. *answer* is called once, in a later turn of the loop, and at `how.until` at the
        latest (50 ms later where the loop is idle)."""
        now = self._loop.time()
        peer = self._peer(node)
        ask = Ask(peer, wanted, how, answer, now)
        refused = self._refused(peer, wanted, now)
        if refused is not None:
            self._loop.call_soon(ask.end, refused)
            return ask
        peer.waiting[ask.lane][how.ahead].append(ask)
        self._waited_for[node.id] = peer
        self._flush_soon()
        self._start_timer()
        return ask

    def usable(self, node_id: str) -> bool:
        """Return whether the node gets requests. False after a failure, until a probe succeeds."""
        peer = self._peers.get(node_id)
        return peer is None or not peer.liveness.cooling

    def silence(self, node_id: str) -> str:
        """Return why the node gets no requests, or ""."""
        peer = self._peers.get(node_id)
        return peer.liveness.reason if peer is not None and peer.liveness.cooling else ""

    def last_sign(self, node_id: str, *, fetch: bool) -> float:
        """Return when the node last showed that it serves blocks (fetch: that it fetches blocks), in loop time; 0 for
        never. A node that fetches a block sends a heartbeat every 0.1 s, however long its origin takes."""
        peer = self._peers.get(node_id)
        return peer.sign(FETCH if fetch else HERE) if peer is not None else 0.0

    def doubt(self, node_id: str) -> None:
        """Probe a node that is silent while readers wait for it, and send it no more requests if the probe fails."""
        peer = self._peers.get(node_id)
        if peer is not None and not self._is_closed:
            self._cooling.doubt(peer)

    def expected_seconds(self, node: NodeRecord, length: int) -> float:
        """Estimate the seconds from a request sent now to the last byte of a block that the node has. The estimate
        falls the longer no request measured the node."""
        peer = self._peers.get(node.id)
        rate, before = self._window.rate, self._in_flight.bytes[HERE]
        latency, faded = 0.0, 1.0
        if peer is not None:
            latency, rate = peer.latency, min(rate, peer.rate or rate)
            faded = peer.faded(self._loop.time())
            before += sum(ask.wanted.length for ask in itertools.islice(peer.waiting[HERE][False], 256))
        return (latency + (before + length) / rate) * faded

    def median_seconds(self, node_id: str) -> float:
        """Return the median seconds of the last blocks requested from this peer; 0 without any."""
        peer = self._peers.get(node_id)
        return statistics.median(peer.recent) if peer is not None and peer.recent else 0.0

    @property
    def window(self) -> int:
        """Bytes that may be in flight from all peers together, for blocks that they have."""
        return self._window.size

    @property
    def in_flight(self) -> tuple[int, int]:
        """Bytes in flight now: of blocks that peers have, and of blocks that they fetch."""
        return self._in_flight.bytes[HERE], self._in_flight.bytes[FETCH]

    async def close(self) -> None:
        """Fail all open requests, and close all connections. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._reaching.stop()
        stopping = Failed("the daemon is stopping", Why.AWAY)
        for peer in self._peers.values():
            asks = [*peer.waiting_asks(), *(ask for batch in peer.batches.values() for ask in batch.asks)]
            for ask in asks:
                ask.end(stopping)
        self._receiver.close()
        self._reaching.close()

    # --- sending requests -----------------------------------------------------------------------------------------

    def _peer(self, node: NodeRecord) -> Peer:
        peer = self._peers.get(node.id)
        if peer is None:
            peer = self._peers[node.id] = Peer(node, self.counters.setdefault(node.id, PeerCounters()))
        elif peer.record is not node:
            moved = (peer.record.host, peer.record.data_port, peer.record.name) != (
                node.host,
                node.data_port,
                node.name,
            )
            peer.record = node
            if moved:
                for connection in peer.idle:
                    connection.abort()
                peer.idle.clear()
        return peer

    def _refused(self, peer: Peer, wanted: Wanted, now: float) -> PeerAnswer | None:
        """Return the response that is known without asking the peer, if any."""
        if self._is_closed:
            return Failed("the daemon is stopping", Why.AWAY)
        if peer.liveness.cooling:
            return Failed(peer.liveness.reason, Why.AWAY)
        if peer.liveness.is_busy(now):
            peer.counters.busy += 1
            return BUSY
        if peer.is_wrong(wanted.key, now):
            return Failed(f"node {peer.record.name} had other bytes for the block a moment ago", Why.WRONG)
        return None

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send all requests that have room: those that readers wait for first, and round robin over peers."""
        self._is_flushing = False
        self._waited_for = {node: peer for node, peer in self._waited_for.items() if peer.is_waited_for}
        peers = [*self._waited_for.values()]
        if not peers or self._is_closed:
            self._in_flight.is_short = False
            return
        self._in_flight.note_waiting(peers)
        self._turn = (self._turn + 1) % len(peers)
        peers = peers[self._turn :] + peers[: self._turn]
        for ahead in (False, True):
            for lane in LANES:
                for peer in peers:
                    self._feed(peer, lane, ahead=ahead)
        self._in_flight.is_short = any(queue for peer in peers for queue in peer.waiting[HERE])

    def _feed(self, peer: Peer, lane: int, *, ahead: bool) -> None:
        queue = peer.waiting[lane][ahead]
        while queue and peer.may_open(lane, ahead=ahead):
            while queue and not queue[0].is_open:
                queue.popleft()
            if not queue or not self._in_flight.has_room(lane, queue[0].wanted.length, 0):
                return
            if lane == HERE and self._in_flight.is_worth_waiting(queue):
                return
            if not peer.idle:
                self._open(peer)
                return
            asks = self._pick(peer, lane, ahead=ahead)
            self._send(peer, peer.idle.pop(), asks, lane)

    def _pick(self, peer: Peer, lane: int, *, ahead: bool) -> list[Ask]:
        """Take the requests for one batch from the queue."""
        queue, asks, size = peer.waiting[lane][ahead], list[Ask](), 0
        while queue and len(asks) < protocol.MOST_BLOCKS:
            length = queue[0].wanted.length
            if queue[0].is_open:
                if asks and queue[0].how.may_take != asks[0].how.may_take:
                    break
                if size + length > protocol.MOST_DATA or not self._in_flight.has_room(lane, length, size):
                    break
                asks.append(queue[0])
                size += length
            queue.popleft()
        return asks

    def _send(self, peer: Peer, connection: PeerConnection, asks: list[Ask], lane: int) -> None:
        now = self._loop.time()
        how = asks[0].how
        lengths = [ask.wanted.length for ask in asks]
        greeting = self._reaching.greeting(peer.record)
        check = self._reaching.checks(peer.record, greeting)
        exchange = Exchange([ask.wanted.key for ask in asks], lengths, now, check)
        if lane == HERE and lengths[-1] > self._window.size // 2:
            exchange.tail = protocol.answer_room(()) + self._window.size // 2
        batch = Batch(peer, lane, how.ahead, connection, exchange, asks, set(range(len(asks))), sum(lengths))
        seconds = max(ask.how.until for ask in asks) - now
        question = Question([_asked(ask) for ask in asks], how.fetch, how.ahead, how.may_take)
        for ask in asks:
            ask.batch = batch
        peer.batches[connection] = batch
        self._in_flight.sent(batch)
        if self._arrivals.is_limited and lane == HERE:
            connection.limit(self._window.size)
        try:
            connection.send(exchange, encode_question(question, greeting, seconds))
        except OSError:
            connection.abort()  # the receiver sees the end and reports it

    # --- connections ----------------------------------------------------------------------------------------------

    def _open(self, peer: Peer) -> None:
        """Open one more connection, unless enough are being opened."""
        wanted = 1 if not peer.counters.blocks else 2
        if peer.connecting >= wanted or peer.liveness.cooling:
            return
        peer.connecting += 1
        self._reaching.run(self._connect(peer))

    async def _connect(self, peer: Peer) -> None:
        record = peer.record
        try:
            connection = await self._reaching.connect(record)
        except CannotConnect as error:
            self._cooling.fail(peer, str(error), Why.STRANGER if error.is_stranger else Why.AWAY)
            return
        finally:
            peer.connecting -= 1
        if self._arrivals.is_limited:
            connection.limit(self._window.size)
        connection.idle_since = self._loop.time()
        self._receiver.add(connection)
        if peer.record is record or peer.record.address == record.address:
            peer.idle.append(connection)
        else:
            connection.abort()
        self._flush_soon()
        self._start_timer()

    def _take(self, news: News) -> None:
        """Handle news of a connection."""
        if self._is_closed:
            return
        peer = self._peers.get(news.connection.peer)
        batch = peer.batches.get(news.connection) if peer is not None else None
        if peer is not None and batch is not None:
            self._arrivals.take(peer, batch, news)
            if peer.is_waited_for:  # some requests are to be sent again
                self._waited_for[peer.record.id] = peer
            self._flush_soon()
        elif peer is not None and news.ended and news.connection in peer.idle:
            peer.idle.remove(news.connection)

    def _on_view(self, view: ClusterView) -> None:
        """Forget nodes that have left. Nodes with requests in progress are forgotten at the next change."""
        for peer in [one for node, one in self._peers.items() if view.get(node) is None]:
            if not (peer.batches or peer.connecting or peer.is_waited_for):
                for connection in peer.idle:
                    connection.abort()
                del self._peers[peer.record.id]

    # --- deadlines ------------------------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = self._loop.call_later(_TICK, self._look)

    def _look(self) -> None:
        """Fail requests whose deadline has passed, abort batches of silent peers, and close idle connections."""
        self._timer = None
        now, is_used = self._loop.time(), False
        for peer in list(self._peers.values()):
            for ask in peer.waiting_asks():
                if ask.how.until <= now and ask.is_open:
                    ask.end(Failed(f"node {peer.record.name} could not be asked in time", Why.LATE))
            for batch in list(peer.batches.values()):
                self._look_at(peer, batch, now)
            while peer.idle and now - peer.idle[0].idle_since > _IDLE_SECONDS:
                peer.idle.pop(0).abort()
            is_used = is_used or bool(peer.batches or peer.idle or peer.is_waited_for)
        if is_used:
            self._start_timer()

    def _look_at(self, peer: Peer, batch: Batch, now: float) -> None:
        if batch.aborted:
            return
        if now - batch.exchange.last > SILENT_SECONDS:
            text = f"node {peer.record.name} at {peer.record.address} says nothing any more ({SILENT_SECONDS:.0f} s)"
            batch.abort(text)
            self._cooling.cool(peer, text)
            return
        for at in sorted(batch.left):
            ask = batch.asks[at]
            if ask.how.until <= now and ask.is_open:
                peer.counters.failures += 1
                ask.end(Failed(f"node {peer.record.name} has not sent it in time", Why.LATE))
        batch.given_up()


def _asked(ask: Ask) -> AskedBlock:
    wanted = ask.wanted
    return AskedBlock(
        wanted.ref.snapshot,
        wanted.ref.entry,
        wanted.ref.number,
        wanted.key,
        wanted.length,
        ask.check,
        ask.how.await_snapshot,
    )
