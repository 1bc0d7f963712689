"""Blocks from other nodes: one window for all of them, batches, connections that stay, and who of them is well."""

import asyncio
import itertools
import logging
import random
import statistics
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from cachefs.planning.requests.receive_window import ReceiveWindow
from cachefs_daemon.cluster.handshake import Greeting, Verdict
from cachefs_daemon.cluster.membership import Membership
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
from cachefs_daemon.peers.conclusions import REASONS, TOLD, conclude
from cachefs_daemon.peers.connecting import CannotConnect, connect, probe
from cachefs_daemon.peers.connection import Exchange, News, PeerConnection
from cachefs_daemon.peers.peer import FETCH, HERE, LANES, Ask, Batch, Peer
from cachefs_daemon.peers.protocol import AskedBlock, NoBlock, Question, Refused, encode_question
from cachefs_daemon.peers.receiver import Receiver
from cachefs_daemon.peers.tls import Certificates
from cachefs_daemon.runtime.errorlog import ErrorLog

log = logging.getLogger(__name__)

# Seconds without a byte after which a peer that owes an answer counts as dead. It sends something every second.
SILENT_SECONDS: Final = 4.0
# Bytes and blocks that all peers together may be asked to bring from origins. They do not come at once, so the window
# has no say; it takes many of them to keep an origin busy.
_MOST_FETCHED: Final = 128 << 20
_MOST_FETCHES: Final = 4096
# Seconds between two looks at deadlines, and seconds that a connection may be idle. Servers close theirs after 60.
_TICK: Final = 0.05
_IDLE_SECONDS: Final = 20.0
# Seconds after which the membership is told again that a peer answers.
_HEARD_SECONDS: Final = 1.0
# Threads that connect and probe. A dead peer takes one for 2 s at a time.
_CONNECTING: Final = 8


class PeerClient:
    """Used on the event loop; a thread of its own receives.

    It has more than 12 attributes: half of them are the parts that it uses, half are what is under way.
    """

    def __init__(
        self, cluster: str, membership: Membership, errors: ErrorLog, certificates: Certificates | None, window: int = 0
    ) -> None:
        """cluster: its name. certificates: None for none. window: bytes that may be on the way from all peers together;
        0 to learn it."""
        self.counters: dict[str, PeerCounters] = {}  # by id of the peer: of those that were asked
        self._cluster = cluster
        self._membership = membership
        self._errors = errors
        self._certificates = certificates
        self._window = ReceiveWindow(window)
        self._loop = asyncio.get_running_loop()
        self._receiver = Receiver(self._take)
        self._threads = ThreadPoolExecutor(_CONNECTING, thread_name_prefix="peers-connect")
        self._peers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = [0, 0]  # bytes, by lane
        self._fetches = 0  # blocks
        self._turn = 0  # which peer is the first to be asked next time
        self._is_flushing = self._is_limited = self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        membership.listen(self._on_view)

    # --- what others ask ------------------------------------------------------------------------------------------

    def ask(self, node: NodeRecord, wanted: Wanted, how: How, answer: Callable[[PeerAnswer], None]) -> Ask:
        """Ask a peer for a block. *answer* is called once, in a later turn of the loop, and at `how.until` at the
        latest (50 ms more where the loop is idle)."""
        now = self._loop.time()
        peer = self._peer(node)
        ask = Ask(peer, wanted, how, answer, now)
        refused = self._refused(peer, wanted, now)
        if refused is not None:
            self._loop.call_soon(ask.end, refused)
            return ask
        peer.waiting[ask.lane][how.ahead].append(ask)
        self._flush_soon()
        self._start_timer()
        return ask

    def usable(self, node_id: str) -> bool:
        """Is it asked at all? False while it does not answer, until a probe has got through to it."""
        peer = self._peers.get(node_id)
        return peer is None or not peer.liveness.cooling

    def last_sign(self, node_id: str, *, fetch: bool) -> float:
        """When it last showed that it gives blocks that it has (fetch: brings those that it has not), in loop time;
        0 for never. A node that brings a block gives a sign every 0.1 s, however long its origin takes."""
        peer = self._peers.get(node_id)
        return peer.sign(FETCH if fetch else HERE) if peer is not None else 0.0

    def doubt(self, node_id: str) -> None:
        """It gives no sign while somebody waits: probe it, and leave it alone where that comes to nothing."""
        peer = self._peers.get(node_id)
        if peer is not None and not (peer.is_doubted or peer.liveness.cooling or self._is_closed):
            peer.is_doubted = True
            self._run(self._settle_doubt(peer))

    def expected_seconds(self, node: NodeRecord, length: int) -> float:
        """From the question until the last byte of a block that it has, if it were asked now. The longer nobody has
        asked it, the less."""
        peer = self._peers.get(node.id)
        rate = self._window.rate
        before = self._in_flight[HERE]
        latency, faded = 0.0, 1.0
        if peer is not None:
            latency, rate = peer.latency, min(rate, peer.rate or rate)
            faded = peer.faded(self._loop.time())
            before += sum(ask.wanted.length for ask in itertools.islice(peer.waiting[HERE][False], 256))
        return (latency + (before + length) / rate) * faded

    def median_seconds(self, node_id: str) -> float:
        """In which half of the last blocks came that this peer was asked for; 0 where there were none."""
        peer = self._peers.get(node_id)
        return statistics.median(peer.recent) if peer is not None and peer.recent else 0.0

    @property
    def window(self) -> int:
        """Bytes that may be on the way from all peers together, for blocks that they have."""
        return self._window.size

    @property
    def in_flight(self) -> tuple[int, int]:
        """Bytes that are on the way now, of blocks that peers have; and of those that they bring."""
        return self._in_flight[HERE], self._in_flight[FETCH]

    async def close(self) -> None:
        """What is asked is answered as failed. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stopping = Failed("the daemon is stopping", Why.AWAY)
        for peer in self._peers.values():
            asks = [*peer.waiting_asks(), *(ask for batch in peer.batches.values() for ask in batch.asks)]
            for ask in asks:
                ask.end(stopping)
        self._receiver.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- asking ---------------------------------------------------------------------------------------------------

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
        """What is known before it is asked."""
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
        """Ask what can be asked: what somebody waits for first, and of all peers in turns."""
        self._is_flushing = False
        peers = [peer for peer in self._peers.values() if peer.is_waited_for]
        if not peers or self._is_closed:
            return
        self._turn = (self._turn + 1) % len(peers)
        peers = peers[self._turn :] + peers[: self._turn]
        for ahead in (False, True):
            for lane in LANES:
                for peer in peers:
                    self._feed(peer, lane, ahead=ahead)

    def _feed(self, peer: Peer, lane: int, *, ahead: bool) -> None:
        queue = peer.waiting[lane][ahead]
        while queue and peer.may_open(lane, ahead=ahead):
            while queue and not queue[0].is_open:
                queue.popleft()
            if not queue or not self._has_room(lane, queue[0].wanted.length, 0):
                return
            if lane == HERE and self._is_worth_waiting(queue):
                return
            if not peer.idle:
                self._open(peer)
                return
            asks = self._pick(peer, lane, ahead=ahead)
            self._send(peer, peer.idle.pop(), asks, lane)

    def _is_worth_waiting(self, queue: deque[Ask]) -> bool:
        """Would the question be for a few of many blocks? Half of what a question costs is the same for each."""
        free, size = self._window.size - self._in_flight[HERE], self._window.size
        if 2 * free >= size or not self._in_flight[HERE]:
            return False
        wanted = 0
        for ask in queue:
            wanted += ask.wanted.length
            if wanted > free:
                return queue[0].wanted.length < size // 4
        return False

    def _has_room(self, lane: int, length: int, before: int) -> bool:
        in_flight = self._in_flight[lane] + before
        if lane == HERE:
            return self._window.room(in_flight, length)
        return in_flight == 0 or (in_flight + length <= _MOST_FETCHED and self._fetches < _MOST_FETCHES)

    def _pick(self, peer: Peer, lane: int, *, ahead: bool) -> list[Ask]:
        """What goes into one question."""
        queue, asks, size = peer.waiting[lane][ahead], list[Ask](), 0
        while queue and len(asks) < protocol.MOST_BLOCKS:
            length = queue[0].wanted.length
            if queue[0].is_open:
                if asks and queue[0].how.may_take != asks[0].how.may_take:
                    break
                if size + length > protocol.MOST_DATA or not self._has_room(lane, length, size):
                    break
                asks.append(queue[0])
                size += length
            queue.popleft()
        return asks

    def _send(self, peer: Peer, connection: PeerConnection, asks: list[Ask], lane: int) -> None:
        now = self._loop.time()
        how = asks[0].how
        lengths = [ask.wanted.length for ask in asks]
        exchange = Exchange([ask.wanted.key for ask in asks], lengths, now)
        if lane == HERE and lengths[-1] > self._window.size // 2:
            exchange.tail = protocol.answer_room(()) + self._window.size // 2
        batch = Batch(peer, lane, how.ahead, connection, exchange, asks, set(range(len(asks))), sum(lengths))
        seconds = max(ask.how.until for ask in asks) - now
        question = Question([_asked(ask) for ask in asks], how.fetch, how.ahead, how.may_take)
        for ask in asks:
            ask.batch = batch
        peer.batches[connection] = batch
        self._in_flight[lane] += batch.bytes_left
        self._fetches += len(asks) if lane == FETCH else 0
        if self._is_limited and lane == HERE:
            connection.limit(self._window.size)
        try:
            connection.send(exchange, encode_question(question, self._greeting(peer.record), seconds))
        except OSError:
            connection.abort()  # its receiver finds out, and tells

    def _greeting(self, record: NodeRecord) -> Greeting:
        view = self._membership.view
        return Greeting(self._cluster, view.me, record.id, record.incarnation, view.epoch)

    # --- connections ----------------------------------------------------------------------------------------------

    def _open(self, peer: Peer) -> None:
        """Make one more connection, unless there are enough that are being made."""
        wanted = 1 if not peer.counters.blocks else 2
        if peer.connecting >= wanted or peer.liveness.cooling:
            return
        peer.connecting += 1
        self._run(self._connect(peer))

    async def _connect(self, peer: Peer) -> None:
        record = peer.record
        try:
            link, tls = await self._loop.run_in_executor(self._threads, connect, record, self._certificates)
        except CannotConnect as error:
            self._fail(peer, str(error), Why.STRANGER if error.is_stranger else Why.AWAY)
            return
        finally:
            peer.connecting -= 1
        connection = PeerConnection(link, tls, record.id)
        if self._is_limited:
            connection.limit(self._window.size)
        connection.idle_since = self._loop.time()
        self._receiver.add(connection)
        if peer.record is record or peer.record.address == record.address:
            peer.idle.append(connection)
        else:
            connection.abort()
        self._flush_soon()
        self._start_timer()

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- what comes -----------------------------------------------------------------------------------------------

    def _take(self, news: News) -> None:
        """Something has come on a connection, or it has ended."""
        if self._is_closed:
            return
        peer = self._peers.get(news.connection.peer)
        batch = peer.batches.get(news.connection) if peer is not None else None
        if peer is None or batch is None:
            if peer is not None and news.ended and news.connection in peer.idle:
                peer.idle.remove(news.connection)
            return
        if news.exchange is not batch.exchange and not news.ended:
            return
        self._note_sender(peer, batch)
        if news.outcomes:
            self._take_outcomes(peer, batch, news)
        if news.is_tail:
            self._credit(batch)
        if news.refused is not None:
            self._take_refusal(peer, batch, news.refused)
        if news.done or news.ended:
            self._end_batch(peer, batch, news)
        self._flush_soon()

    def _note_sender(self, peer: Peer, batch: Batch) -> None:
        """The head of an answer tells who has answered."""
        sender = batch.exchange.parser.sender
        if sender is None or batch.timed:
            return
        exchange = batch.exchange
        batch.timed = exchange.first
        if batch.lane == HERE:
            self._window.answered(exchange.first - exchange.sent, batch.connection.round_trip(), exchange.first)
        if sender.node != peer.record.id:
            return  # a refusal follows, or blocks that prove themselves
        peer.liveness.served()
        if peer.heard_of != sender.incarnation or exchange.first - peer.heard > _HEARD_SECONDS:
            peer.heard_of, peer.heard = sender.incarnation, exchange.first
            self._membership.heard(sender.node, sender.incarnation)

    def _take_outcomes(self, peer: Peer, batch: Batch, news: News) -> None:
        now, count, size = self._loop.time(), 0, 0
        is_full = self._is_full(batch)
        for at, outcome in news.outcomes:
            batch.left.discard(at)
            length = batch.asks[at].wanted.length
            self._release(batch, 1, length)
            if not isinstance(outcome, NoBlock):
                count, size = count + 1, size + length
            if conclude(batch.asks[at], outcome, now, self._errors):
                ask = batch.asks[at]
                peer.waiting[ask.lane][ask.how.ahead].appendleft(ask)
        if size:
            exchange = batch.exchange
            if batch.lane == HERE:
                peer.measure(exchange.first - exchange.sent, size, exchange.last - batch.timed, exchange.last)
                self._window.received(size, exchange.last, is_full=is_full)
            batch.timed = exchange.last

    def _is_full(self, batch: Batch) -> bool:
        """Could more be asked for, if there was room in the window?"""
        return self._in_flight[HERE] + 2 * batch.asks[0].wanted.length > self._window.size

    def _release(self, batch: Batch, blocks: int, size: int) -> None:
        batch.bytes_left -= size
        credit = min(batch.credit, size)
        batch.credit -= credit
        self._in_flight[batch.lane] -= size - credit
        self._fetches -= blocks if batch.lane == FETCH else 0

    def _credit(self, batch: Batch) -> None:
        """All but the tail of a large block has come: what has come is not on the way any more."""
        credit = batch.bytes_left - min(batch.bytes_left, self._window.size // 2)
        batch.credit += credit
        self._in_flight[batch.lane] -= credit

    def _take_refusal(self, peer: Peer, batch: Batch, refused: Refused) -> None:
        """It gives nothing of what was asked."""
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
            self._run(self._membership.refresh())
        if refused.verdict in TOLD:
            self._errors.add(f"node {name}", text)
        if why in (Why.STRANGER, Why.REFUSED) and refused.verdict != Verdict.OTHER_INCARNATION:
            self._cool(peer, text)
        for at in sorted(batch.left):
            ask = batch.asks[at]
            self._release(batch, 1, ask.wanted.length)
            if answer is BUSY:
                peer.counters.busy += 1
            else:
                peer.counters.failures += 1
            ask.end(answer)
        batch.left.clear()

    def _end_batch(self, peer: Peer, batch: Batch, news: News) -> None:
        """The answer is whole, or the connection has ended."""
        connection = batch.connection
        del peer.batches[connection]
        peer.signs[batch.lane] = max(peer.signs[batch.lane], batch.exchange.sign)
        retransmitted = batch.exchange.parser.retransmitted
        if retransmitted and batch.lane == HERE:
            self._is_limited = True
            self._window.sent_twice(retransmitted, self._loop.time())
        left = [batch.asks[at] for at in sorted(batch.left)]
        self._release(batch, len(left), batch.bytes_left)
        if news.done and not news.ended and not connection.is_closing:
            connection.idle_since = self._loop.time()
            peer.idle.append(connection)
        if not left:
            return
        if news.is_bad:
            text = f"node {peer.record.name} at {peer.record.address} has sent what is no answer: {news.reason}"
            self._errors.add(f"node {peer.record.name}", text)
            self._cool(peer, text)
        elif batch.aborted or (connection.used and not batch.exchange.first):
            text = batch.aborted or news.reason
        else:
            text = f"node {peer.record.name} at {peer.record.address} has broken off: {news.reason}"
            self._cool(peer, text)
        is_stale = bool(connection.used and not batch.exchange.first and not batch.aborted and not news.is_bad)
        for ask in reversed(left):
            if is_stale and ask.is_open and not ask.again:
                # It had closed the connection before it saw the question.
                ask.again, ask.batch = True, None
                peer.waiting[batch.lane][batch.ahead].appendleft(ask)
            elif ask.is_open:
                peer.counters.failures += 1
                ask.end(Failed(text, Why.AWAY))

    # --- who is well ----------------------------------------------------------------------------------------------

    def _fail(self, peer: Peer, reason: str, why: Why) -> None:
        """No connection can be made."""
        if why == Why.STRANGER:
            self._errors.add(f"node {peer.record.name}", reason)
        self._cool(peer, reason)
        for ask in [*peer.waiting_asks()]:
            if ask.is_open:
                peer.counters.failures += 1
            ask.end(Failed(reason, why))
        for lane in peer.waiting:
            for queue in lane:
                queue.clear()

    def _cool(self, peer: Peer, reason: str) -> None:
        """It is not asked until a probe gets through."""
        if not peer.liveness.failed(reason, self._loop.time(), random.random()):
            return
        self._errors.add(f"node {peer.record.name}", f"{reason}; other sources are used until it answers")
        self._membership.lost(peer.record.id)
        for connection in peer.idle:
            connection.abort()
        peer.idle.clear()
        for ask in [*peer.waiting_asks()]:
            self._loop.call_soon(ask.end, Failed(reason, Why.AWAY))
        for lane in peer.waiting:
            for queue in lane:
                queue.clear()
        self._run(self._probe(peer))

    async def _settle_doubt(self, peer: Peer) -> None:
        """Does it live?"""
        record, began = peer.record, self._loop.time()
        try:
            work = partial(probe, record, self._certificates, self._greeting(record))
            _, lives = await self._loop.run_in_executor(self._threads, work)
            peer.sign_given(self._loop.time(), fetch=lives)
        except CannotConnect as error:
            if max(map(peer.sign, LANES)) <= began:
                self._cool(peer, str(error))
        finally:
            peer.is_doubted = False

    async def _probe(self, peer: Peer) -> None:
        """Until it answers."""
        liveness = peer.liveness
        while liveness.cooling:
            await asyncio.sleep(max(0.0, liveness.probe_at - self._loop.time()))
            record = peer.record
            if self._membership.view.get(record.id) is None:
                liveness.cooling = False  # it has left: whoever asks for it all the same begins anew
            if not liveness.cooling:
                return
            work = partial(probe, record, self._certificates, self._greeting(record))
            try:
                sender, _ = await self._loop.run_in_executor(self._threads, work)
            except CannotConnect as error:
                liveness.reason = str(error)
                liveness.probed(alive=False, now=self._loop.time(), chance=random.random())
                self._membership.lost(record.id)
            else:
                liveness.probed(alive=True, now=self._loop.time(), chance=random.random())
                log.info("node %s answers again, and is asked for blocks", record.name)
                self._membership.heard(sender.node, sender.incarnation)

    def _on_view(self, view: ClusterView) -> None:
        """Forget nodes that have left. Those of which something is under way are forgotten at the next change."""
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
        """Whose time is over, which peers are silent, which connections nobody uses."""
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
            self._cool(peer, text)
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
        wanted.ref.snapshot, wanted.ref.entry, wanted.ref.number, wanted.key, wanted.length, ask.check
    )  # fmt: skip
