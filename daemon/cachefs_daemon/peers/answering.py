"""Serves one connection of a peer server, from its first byte to its last: requests in, blocks out."""

import contextlib
import errno
import queue
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from cachefs.block import Location
from cachefs.errors import Busy, CachefsError
from cachefs.messages import BlockRef, Fetch, FetchedBlock
from cachefs_daemon.cluster.handshake import Greeting, Verdict, explain, judge
from cachefs_daemon.cluster.secret import ClusterSecret
from cachefs_daemon.cluster.view import ClusterView
from cachefs_daemon.origin.http_head import END
from cachefs_daemon.peers.daemon_fetches import Came, Coming, DaemonFetches
from cachefs_daemon.peers.outlet import Outlet, is_quick
from cachefs_daemon.peers.protocol import (
    BEAT_SECONDS,
    BUSY,
    FAILED,
    LACKS_SNAPSHOT,
    MOST_HEAD,
    NO_DAEMON,
    NOT_HERE,
    SIGN_SECONDS,
    TAKE_IT,
    AskedBlock,
    BadQuestion,
    Question,
    RequestHead,
    answer_head,
    beat,
    last_chunk,
    parse_question,
    parse_request_head,
    refusal,
    short_chunk,
)  # fmt: skip
from cachefs_daemon.peers.signs import Signs
from cachefs_daemon.peers.wire import Gone, Wire

# Seconds that a connection may stay idle: of a known node, and of one that has not identified itself yet; and seconds
# within which a request must arrive, from its first byte.
IDLE_SECONDS: Final = 60.0
UNKNOWN_SECONDS: Final = 5.0
QUESTION_SECONDS: Final = 5.0
# Most blocks that all connections of this process together may wait for the daemon to fetch.
MOST_FETCHES: Final = 6144
_AT_ONCE: Final = 64 << 10
_STATUS: Final = {Verdict.STRANGER: 403, Verdict.UNPROVEN: 403, Verdict.OTHER_PROTOCOL: 505}


@dataclass(slots=True)
class Given:
    """Counts the blocks that one node received from this server."""

    blocks: int = 0  # includes blocks fetched from the origin for the node
    bytes: int = 0
    fetched: int = 0
    refused: int = 0


class Caller:
    """A connection that the server may close to make room for others."""

    def __init__(self, address: str, connection: socket.socket) -> None:
        self.address = address
        self.connection = connection  # after the TLS handshake: the encrypted socket

    def dismiss(self) -> None:
        """Shut the socket down, so that the thread that reads from it sees its end."""
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would let the connection's thread go on without encryption.
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class Host(Protocol):
    """The services of the server that a connection uses."""

    outlet: Outlet
    fetches: DaemonFetches
    signs: Signs
    cluster: str
    view: ClusterView
    # None without a cluster secret, or where nodes have certificates.
    secret: ClusterSecret | None

    def recognise(self, caller: Caller, node: str) -> str:
        """Register the caller as member `node`. Return the reason for rejection, or ""."""

    def note_used(self, caller: Caller) -> None:
        """Mark a member's connection as in use, so that it is not closed for others meanwhile."""

    def note_idle(self, caller: Caller) -> None:
        """Mark the connection as idle: its request is answered."""

    def complain(self, address: str, kind: str, text: str) -> None:
        """Report a fault of the peer at *address* to the daemon's error log."""

    def behind(self) -> None:
        """Note that a peer has a newer ring epoch."""

    def given(self, node: str) -> Given:
        """Return the counters of *node*."""

    def handed_over(self, node: str, key: bytes) -> None:
        """Note that *node* received block *key*."""

    def may_fetch(self, count: int) -> bool:
        """Reserve room for *count* more fetches of the daemon (negative: release it). Return whether there was room."""


@dataclass(slots=True, eq=False)
class Answering:
    """Serves one connection in the thread that calls `run`."""

    host: Host
    wire: Wire
    caller: Caller
    # Ids of the members that the peer's certificate names; None without certificates.
    proven: frozenset[str] | None
    # Id of the node that asks; "" until it is known.
    node: str = ""
    _greeting: Greeting | None = None  # of the current request
    _kept: bytearray = field(default_factory=bytearray)  # bytes received beyond the last request

    @property
    def address(self) -> str:
        return self.caller.address

    def run(self) -> None:
        """Serve requests until the connection ends, for whatever reason."""
        try:
            while self._serve():
                pass
        except Gone as gone:
            if str(gone) and not self.node:
                self.host.complain(self.address, "strangers", f"a connection that has not said who it is: {gone}")
        except BadQuestion as error:
            self.host.complain(self.address, "requests", str(error))
            self._refuse(error.status, str(error))

    def _serve(self) -> bool:
        """Serve one request. Return False for the last one of the connection. Raises Gone, BadQuestion."""
        if not self._kept and not self.wire.wait(IDLE_SECONDS if self.node else UNKNOWN_SECONDS):
            return False
        self.host.note_used(self.caller)
        until = time.monotonic() + QUESTION_SECONDS
        head = self._read_head(until)
        self._greeting = head.greeting
        body = self._read_body(head.length, until)
        if head.target == "/health" and head.method == "GET":
            return self._tell_health(head)
        if head.target != "/blocks" or head.method != "POST":
            self._refuse(404, "there are only POST /blocks and GET /health")
            return False
        if head.greeting is None:
            raise BadQuestion("a request for blocks that does not say which node it is from")
        if not self._welcome(head.greeting):
            return False
        question = parse_question(body)
        self._answer(question, head.seconds)
        self.host.note_idle(self.caller)
        return not head.is_last

    # --- identity of the sender -----------------------------------------------------------------------------------

    def _welcome(self, greeting: Greeting) -> bool:
        """Return whether the node may be served. If not, send it the reason."""
        host = self.host
        view = host.view
        verdict = judge(view, host.cluster, greeting, host.secret)
        if verdict == Verdict.NEWER_EPOCH:
            host.behind()
        if verdict.serves and self.proven is not None and greeting.sender not in self.proven:
            host.complain(
                self.address,
                "certificates",
                f"its certificate is not that of {_named(view, greeting.sender)}, as which it asks for blocks: refused",
            )
            self._refuse(403, f"your certificate is not that of node {greeting.sender}", Verdict.STRANGER)
            return False
        if not verdict.serves:
            text = explain(verdict, view, host.cluster, greeting)
            if verdict not in (Verdict.OLD_EPOCH, Verdict.OTHER_INCARNATION):
                host.complain(self.address, f"node {greeting.sender}", f"it asks for blocks and is refused: {text}")
            self._refuse(_STATUS.get(verdict, 409), text, verdict)
            return False
        if self.node != greeting.sender:
            if self.node:
                raise BadQuestion("a connection on which two nodes ask")
            self.node = greeting.sender
            crowded = host.recognise(self.caller, self.node)
            if crowded:
                host.complain(self.address, "connections", f"{crowded}: no more are taken")
                self._refuse(503, crowded)
                return False
        return True

    def _tell_health(self, head: RequestHead) -> bool:
        host = self.host
        text, remark = "ready", ""
        if head.greeting is not None:
            verdict = judge(host.view, host.cluster, head.greeting, host.secret)
            text = explain(verdict, host.view, host.cluster, head.greeting) or text
            if not verdict.serves:
                self._refuse(_STATUS.get(verdict, 409), text, verdict)
                return False
            if not host.signs.answers():
                text, remark = "the daemon does not answer", NO_DAEMON
        self.wire.send(refusal(200, self._who(serves=True), text, remark))
        return False

    def _refuse(self, status: int, text: str, verdict: str = "") -> None:
        with contextlib.suppress(Gone):
            self.wire.send(refusal(status, self._who(serves=False), text, verdict))

    def _who(self, *, serves: bool) -> tuple[str, str, int, str]:
        """Return this node's id, incarnation, epoch and proof. serves: the request, and its greeting if any, was
        accepted."""
        view, secret, greeting = self.host.view, self.host.secret, self._greeting
        if view.mine is None:
            return view.me, "", view.epoch, ""
        proof, incarnation = "", view.mine.incarnation
        if secret is not None and greeting is not None and greeting.nonce:
            scope = greeting.scope(view.me, view.mine.data_port)
            proof = secret.response_proof(scope, incarnation, serves=serves)
        return view.me, incarnation, view.epoch, proof

    # --- requests -------------------------------------------------------------------------------------------------

    def _read_head(self, until: float) -> RequestHead:
        while (end := self._kept.find(END)) < 0:
            if len(self._kept) > MOST_HEAD:
                raise BadQuestion(f"the head of a request has more than {MOST_HEAD} bytes", 431)
            self._read(until)
        head = parse_request_head(bytes(self._kept[:end]))
        del self._kept[: end + len(END)]
        return head

    def _read_body(self, length: int, until: float) -> bytes:
        while len(self._kept) < length:
            self._read(until)
        body = bytes(self._kept[:length])
        del self._kept[:length]
        return body

    def _read(self, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise Gone(f"a request took more than {QUESTION_SECONDS:.0f} s to come")
        self._kept += self.wire.receive(_AT_ONCE, left)

    # --- responses ------------------------------------------------------------------------------------------------

    def _answer(self, question: Question, seconds: float) -> None:
        until = time.monotonic() + seconds
        before = self.wire.retransmitted()
        given = self.host.given(self.node)
        self.wire.send(answer_head(*self._who(serves=True)), more=True)
        here: list[tuple[int, AskedBlock, Location]] = []
        missing: list[tuple[int, AskedBlock, bytes]] = []  # with the packed location of a damaged copy
        for at, block in enumerate(question.blocks):
            location = self.host.outlet.find(block)
            if location is None:
                missing.append((at, block, b""))
            elif block.check and not self.host.outlet.is_right(block, location):
                missing.append((at, block, location.pack()))
            else:
                here.append((at, block, location))
        fetched = _Fetched(self, question, until, given)
        fetched.ask(missing)
        here.sort(key=lambda one: not is_quick(one[2]))
        for at, block, location in here:
            self.send_block(at, block, location, given)
        fetched.pass_on()
        self.wire.send(last_chunk(self.wire.retransmitted() - before))

    def send_block(self, at: int, block: AskedBlock, location: Location, given: Given) -> None:
        """Send one block, or NOT_HERE if it is gone. Raises Gone."""
        if self.host.outlet.send(self.wire, at, block, location):
            self.count(block, given)
        else:
            self.send_none(at, NOT_HERE, given)

    def count(self, block: AskedBlock, given: Given) -> None:
        """Count a block that the node received."""
        given.blocks += 1
        given.bytes += block.length
        self.host.handed_over(self.node, block.key)

    def send_none(self, at: int, status: int, given: Given, text: str = "") -> None:
        """Send a chunk without a block. Raises Gone."""
        given.refused += 1
        self.wire.send(short_chunk(at, status, text), more=True)


class _Fetched:
    """The blocks of one request that are not here: asks the daemon for them, and passes them on as they arrive."""

    def __init__(self, answering: Answering, question: Question, until: float, given: Given) -> None:
        self._answering = answering
        self._question = question
        self._until = until
        self._given = given
        self._came: Coming = queue.SimpleQueue()
        self._sent = 0.0  # time of the last beat, in monotonic seconds
        self._is_flushed = False  # has the wire sent all that it was given?
        # by number in the request: block and number of the daemon's fetch
        self._asked: dict[int, tuple[AskedBlock, int]] = {}

    def ask(self, missing: Iterable[tuple[int, AskedBlock, bytes]]) -> None:
        """Request missing blocks from the daemon, or answer NOT_HERE or BUSY for them. Raises Gone."""
        host, question = self._answering.host, self._question
        for at, block, bad in missing:
            if not question.fetch and not bad:
                self._answering.send_none(at, NOT_HERE, self._given)
            elif not host.may_fetch(1):
                self._answering.send_none(at, BUSY, self._given)
            else:
                # A damaged block goes to the daemon even without `fetch`: the daemon checks and repairs it.
                ref = BlockRef(block.snapshot, block.entry, block.number, bad, 0, block.length)
                fetch = Fetch(
                    blocks=[ref],
                    deadline=max(0.0, self._until - time.monotonic()),
                    peer=self._answering.node,
                    unhurried=question.ahead,
                    may_take=question.may_take,
                    await_snapshot=block.await_snapshot,
                )
                self._asked[at] = block, host.fetches.ask(at, fetch, self._came)

    def pass_on(self) -> None:
        """Send blocks as they arrive, with beats in between, until all have arrived or time is up. Raises Gone."""
        answering = self._answering
        host, node = answering.host, answering.node
        host.signs.enter(node, self._came)
        try:
            while self._asked and time.monotonic() < self._until + BEAT_SECONDS:
                came = self._next()
                if came is None:
                    continue
                at, outcome = came
                block, _ = self._asked.pop(at)
                host.may_fetch(-1)
                self._pass_on(at, block, outcome)
                self._is_flushed = False
            for at in self._asked:
                answering.send_none(at, FAILED, self._given, "it did not come in time")
        finally:
            host.signs.leave(node, self._came)
            host.may_fetch(-len(self._asked))
            for _, number in self._asked.values():
                host.fetches.forget(number)

    def _next(self) -> Came | None:
        """Return the next outcome; None if none arrived within a beat's pause. Raises Gone."""
        with contextlib.suppress(queue.Empty):
            return self._came.get_nowait()
        pause = self._beat()
        with contextlib.suppress(queue.Empty):
            return self._came.get(timeout=pause)
        return None

    def _beat(self) -> float:
        """Send a beat if one is due or bytes wait to be sent. Return the seconds until the next one. Raises Gone."""
        signs, now = self._answering.host.signs, time.monotonic()
        speaks = signs.speaks(self._answering.node, self._came)
        lives = speaks and signs.lives(now)
        if lives or not self._is_flushed or now - self._sent >= BEAT_SECONDS:
            self._answering.wire.send(beat(lives=lives))
            self._is_flushed, self._sent = True, now
        return SIGN_SECONDS if speaks else BEAT_SECONDS

    def _pass_on(self, at: int, block: AskedBlock, outcome: FetchedBlock | CachefsError) -> None:
        answering, given = self._answering, self._given
        if isinstance(outcome, Busy) or (isinstance(outcome, FetchedBlock) and outcome.errno == errno.EBUSY):
            answering.send_none(at, BUSY, given)
        elif isinstance(outcome, CachefsError):
            answering.send_none(at, FAILED, given, str(outcome))
        elif outcome.take_it:
            answering.send_none(at, TAKE_IT, given)
        elif outcome.not_here:
            answering.send_none(at, NOT_HERE, given)
        elif outcome.lacks_snapshot:
            answering.send_none(at, NOT_HERE, given, LACKS_SNAPSHOT)
        elif outcome.errno:
            answering.send_none(at, FAILED, given, outcome.message)
        elif not outcome.location:
            self._send_bytes(at, block, outcome)
        else:
            self._send_place(at, block, outcome)

    def _send_bytes(self, at: int, block: AskedBlock, outcome: FetchedBlock) -> None:
        answering, given = self._answering, self._given
        if not answering.host.outlet.send_bytes(answering.wire, at, block, outcome):
            answering.send_none(at, FAILED, given, "the block has another length here")
            return
        given.fetched += 1
        answering.count(block, given)

    def _send_place(self, at: int, block: AskedBlock, outcome: FetchedBlock) -> None:
        answering, given = self._answering, self._given
        try:
            location = Location.unpack(outcome.location)
        except ValueError:
            location = None
        if location is None or location.length != block.length:
            answering.send_none(at, FAILED, given, "the block has another length here")
            return
        given.fetched += 1
        answering.send_block(at, block, location, given)


def _named(view: ClusterView, node: str) -> str:
    record = view.get(node)
    return f"{record.name} ({node})" if record is not None else f"a node {node}"
