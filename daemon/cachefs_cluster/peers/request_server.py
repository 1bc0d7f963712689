"""Serves one connection of a peer server, from its first byte to its last: requests in, blocks out."""

import contextlib
import errno
import queue
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from cachefs.block import BlockLocation
from cachefs.errors import Busy, CachefsError
from cachefs.messages import BlockRef, FetchedBlock, FetchRequest
from cachefs_cluster.membership.handshake import Greeting, Verdict, explain_verdict, judge_greeting
from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.membership.view import ClusterView
from cachefs_cluster.peers.block_sender import BlockSender, is_in_memory
from cachefs_cluster.peers.daemon_fetch_client import DaemonFetchClient, FetchOutcome, FetchOutcomes
from cachefs_cluster.peers.heartbeats import Heartbeats
from cachefs_cluster.peers.protocol import (
    BLOCK_NOT_FOUND,
    FETCH_FAILED,
    FETCH_YOURSELF,
    HEARTBEAT_SECONDS,
    KEEPALIVE_SECONDS,
    MAX_HEAD,
    NO_DAEMON,
    OVERLOADED,
    SNAPSHOT_NOT_FOUND,
    BlocksRequest,
    InvalidRequest,
    RequestedBlock,
    RequestHead,
    keepalive_chunk,
    last_chunk,
    parse_blocks_request,
    parse_request_head,
    refusal_response,
    response_head,
    status_chunk,
)  # fmt: skip
from cachefs_cluster.peers.wire import ConnectionLost, Wire
from cachefs_daemon.origin.http.head import HEAD_END

# Seconds that a connection may stay idle: of a known node, and of one that has not identified itself yet; and seconds
# within which a request must arrive, from its first byte.
IDLE_SECONDS: Final = 60.0
UNIDENTIFIED_SECONDS: Final = 5.0
REQUEST_SECONDS: Final = 5.0
# Most blocks that all connections of this process together may wait for the daemon to fetch.
MAX_FETCHES: Final = 6144
_RECEIVE_BYTES: Final = 64 << 10
_STATUS: Final = {Verdict.NOT_A_MEMBER: 403, Verdict.UNPROVEN: 403, Verdict.OTHER_PROTOCOL: 505}


@dataclass(slots=True)
class ServedCounters:
    """Counts the blocks that one node received from this server."""

    blocks: int = 0  # includes blocks fetched from the origin for the node
    bytes: int = 0
    fetched: int = 0
    refused: int = 0


class ServedConnection:
    """A connection that the server may close to make room for others."""

    def __init__(self, address: str, rail: str, connection: socket.socket) -> None:
        self.address = address
        self.rail = rail  # the address of this node that the peer has connected to
        self.connection = connection  # after the TLS handshake: the encrypted socket

    def shut_down(self) -> None:
        """Shut the socket down, so that the thread that reads from it sees its end."""
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would let the connection's thread go on without encryption.
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class ServerServices(Protocol):
    """The services of the server that a connection uses."""

    block_sender: BlockSender
    fetch_client: DaemonFetchClient
    heartbeats: Heartbeats
    cluster: str
    view: ClusterView
    # None without a cluster secret, or where nodes have certificates.
    secret: ClusterSecret | None

    def register_member(self, caller: ServedConnection, node: str) -> str:
        """Register the caller as member `node`. Return the reason for rejection, or ""."""

    def note_used(self, caller: ServedConnection) -> None:
        """Mark a member's connection as in use, so that it is not closed for others meanwhile."""

    def note_idle(self, caller: ServedConnection) -> None:
        """Mark the connection as idle: its request is answered."""

    def report_fault(self, address: str, kind: str, text: str) -> None:
        """Report a fault of the peer at *address* to the daemon's error log."""

    def note_newer_epoch(self) -> None:
        """Note that a peer has a newer ring epoch."""

    def counters_of(self, node: str) -> ServedCounters:
        """Return the counters of *node*."""

    def note_served(self, node: str, key: bytes) -> None:
        """Note that *node* received block *key*."""

    def reserve_fetches(self, count: int) -> bool:
        """Reserve room for *count* more fetches of the daemon (negative: release it). Return whether there was room."""


@dataclass(slots=True, eq=False)
class RequestServer:
    """Serves one connection in the thread that calls `serve`."""

    services: ServerServices
    wire: Wire
    served_connection: ServedConnection
    # Ids of the members that the peer's certificate names; None without certificates.
    proven_ids: frozenset[str] | None
    # Id of the node that asks; "" until it is known.
    node: str = ""
    _greeting: Greeting | None = None  # of the current request
    _unparsed: bytearray = field(default_factory=bytearray)  # bytes received beyond the last request

    @property
    def address(self) -> str:
        return self.served_connection.address

    def serve(self) -> None:
        """Serve requests until the connection ends, for whatever reason."""
        try:
            while self._serve_request():
                pass
        except ConnectionLost as gone:
            if str(gone) and not self.node:
                self.services.report_fault(
                    self.address, "strangers", f"a connection that did not identify itself: {gone}"
                )
        except InvalidRequest as error:
            self.services.report_fault(self.address, "requests", str(error))
            self._refuse(error.status, str(error))

    def _serve_request(self) -> bool:
        """Serve one request. Return False for the last one of the connection. Raises ConnectionLost, InvalidRequest."""
        if not self._unparsed and not self.wire.wait_readable(IDLE_SECONDS if self.node else UNIDENTIFIED_SECONDS):
            return False
        self.services.note_used(self.served_connection)
        until = time.monotonic() + REQUEST_SECONDS
        head = self._read_head(until)
        self._greeting = head.greeting
        body = self._read_body(head.length, until)
        if head.target == "/health" and head.method == "GET":
            return self._send_health(head)
        if head.target != "/blocks" or head.method != "POST":
            self._refuse(404, "there are only POST /blocks and GET /health")
            return False
        if head.greeting is None:
            raise InvalidRequest("a request for blocks without the id of its node")
        if not self._admit(head.greeting):
            return False
        request = parse_blocks_request(body)
        self._send_blocks(request, head.seconds)
        self.services.note_idle(self.served_connection)
        return not head.is_last

    # --- identity of the sender -----------------------------------------------------------------------------------

    def _admit(self, greeting: Greeting) -> bool:
        """Return whether the node may be served. If not, send it the reason."""
        host = self.services
        view = host.view
        verdict = judge_greeting(view, host.cluster, greeting, host.secret)
        if verdict == Verdict.NEWER_EPOCH:
            host.note_newer_epoch()
        if verdict.is_accepted and self.proven_ids is not None and greeting.sender not in self.proven_ids:
            host.report_fault(
                self.address,
                "certificates",
                f"request refused: it claims to be {_node_description(view, greeting.sender)}, but its certificate is "
                "another node's",
            )
            self._refuse(403, f"your certificate is not that of node {greeting.sender}", Verdict.NOT_A_MEMBER)
            return False
        if not verdict.is_accepted:
            text = explain_verdict(verdict, view, host.cluster, greeting)
            if verdict not in (Verdict.OLD_EPOCH, Verdict.OTHER_INCARNATION):
                host.report_fault(self.address, f"node {greeting.sender}", f"request for blocks refused: {text}")
            self._refuse(_STATUS.get(verdict, 409), text, verdict)
            return False
        if self.node != greeting.sender:
            if self.node:
                raise InvalidRequest("requests of two nodes on one connection")
            self.node = greeting.sender
            crowded = host.register_member(self.served_connection, self.node)
            if crowded:
                host.report_fault(self.address, "connections", f"connection refused: {crowded}")
                self._refuse(503, crowded)
                return False
        return True

    def _send_health(self, head: RequestHead) -> bool:
        host = self.services
        text, remark = "ready", ""
        if head.greeting is not None:
            verdict = judge_greeting(host.view, host.cluster, head.greeting, host.secret)
            text = explain_verdict(verdict, host.view, host.cluster, head.greeting) or text
            if not verdict.is_accepted:
                self._refuse(_STATUS.get(verdict, 409), text, verdict)
                return False
            if not host.heartbeats.is_daemon_answering():
                text, remark = "the daemon does not answer", NO_DAEMON
        self.wire.send(refusal_response(200, self._own_identity(serves=True), text, remark))
        return False

    def _refuse(self, status: int, text: str, verdict: str = "") -> None:
        with contextlib.suppress(ConnectionLost):
            self.wire.send(refusal_response(status, self._own_identity(serves=False), text, verdict))

    def _own_identity(self, *, serves: bool) -> tuple[str, str, int, str]:
        """Return this node's id, incarnation, epoch and proof. serves: the request, and its greeting if any, was
        accepted."""
        view, secret, greeting = self.services.view, self.services.secret, self._greeting
        if view.own_record is None:
            return view.me, "", view.epoch, ""
        proof, incarnation = "", view.own_record.incarnation
        if secret is not None and greeting is not None and greeting.nonce:
            scope = greeting.scope(view.me, view.own_record.data_port)
            proof = secret.response_proof(scope, incarnation, serves=serves)
        return view.me, incarnation, view.epoch, proof

    # --- requests -------------------------------------------------------------------------------------------------

    def _read_head(self, until: float) -> RequestHead:
        while (end := self._unparsed.find(HEAD_END)) < 0:
            if len(self._unparsed) > MAX_HEAD:
                raise InvalidRequest(f"the head of a request has more than {MAX_HEAD} bytes", 431)
            self._receive_more(until)
        head = parse_request_head(bytes(self._unparsed[:end]))
        del self._unparsed[: end + len(HEAD_END)]
        return head

    def _read_body(self, length: int, until: float) -> bytes:
        while len(self._unparsed) < length:
            self._receive_more(until)
        body = bytes(self._unparsed[:length])
        del self._unparsed[:length]
        return body

    def _receive_more(self, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise ConnectionLost(f"a request took more than {REQUEST_SECONDS:.0f} s to arrive")
        self._unparsed += self.wire.receive(_RECEIVE_BYTES, left)

    # --- responses ------------------------------------------------------------------------------------------------

    def _send_blocks(self, request: BlocksRequest, seconds: float) -> None:
        until = time.monotonic() + seconds
        before = self.wire.retransmitted_packets()
        counters = self.services.counters_of(self.node)
        self.wire.send(response_head(*self._own_identity(serves=True)), more=True)
        here: list[tuple[int, RequestedBlock, BlockLocation]] = []
        missing: list[tuple[int, RequestedBlock, bytes]] = []  # with the packed location of a damaged copy
        for at, block in enumerate(request.blocks):
            location = self.services.block_sender.find_block(block)
            if location is None:
                missing.append((at, block, b""))
            elif block.check and not self.services.block_sender.has_right_bytes(block, location):
                missing.append((at, block, location.pack()))
            else:
                here.append((at, block, location))
        fetched = _FetchedBlocks(self, request, until, counters)
        fetched.request_missing(missing)
        here.sort(key=lambda one: not is_in_memory(one[2]))
        for at, block, location in here:
            self.send_block(at, block, location, counters)
        fetched.send_as_they_arrive()
        self.wire.send(last_chunk(self.wire.retransmitted_packets() - before))

    def send_block(self, at: int, block: RequestedBlock, location: BlockLocation, counters: ServedCounters) -> None:
        """Send one block, or BLOCK_NOT_FOUND if it is gone. Raises ConnectionLost."""
        if self.services.block_sender.send_block(self.wire, at, block, location):
            self.count_block(block, counters)
        else:
            self.send_without_block(at, BLOCK_NOT_FOUND, counters)

    def count_block(self, block: RequestedBlock, counters: ServedCounters) -> None:
        """Count a block that the node received."""
        counters.blocks += 1
        counters.bytes += block.length
        self.services.note_served(self.node, block.key)

    def send_without_block(self, at: int, status: int, counters: ServedCounters, text: str = "") -> None:
        """Send a chunk without a block. Raises ConnectionLost."""
        counters.refused += 1
        self.wire.send(status_chunk(at, status, text), more=True)


class _FetchedBlocks:
    """The blocks of one request that are not here: asks the daemon for them, and passes them on as they arrive."""

    def __init__(self, server: RequestServer, request: BlocksRequest, until: float, counters: ServedCounters) -> None:
        self._request_server = server
        self._request = request
        self._until = until
        self._counters = counters
        self._outcomes: FetchOutcomes = queue.SimpleQueue()
        self._last_keepalive = 0.0  # time of the last beat, in monotonic seconds
        self._is_flushed = False  # has the wire sent all that it was given?
        # by number in the request: block and number of the daemon's fetch
        self._requested: dict[int, tuple[RequestedBlock, int]] = {}

    @property
    def _waiter(self) -> str:
        """The node that waits, and its rail: each rail has heartbeats, which tell the node which of them is dead."""
        return f"{self._request_server.node} over {self._request_server.served_connection.rail}"

    def request_missing(self, missing: Iterable[tuple[int, RequestedBlock, bytes]]) -> None:
        """Request missing blocks from the daemon, or answer BLOCK_NOT_FOUND or OVERLOADED for them. Raises
        ConnectionLost."""
        host, request = self._request_server.services, self._request
        for at, block, bad in missing:
            if not request.may_fetch and not bad:
                self._request_server.send_without_block(at, BLOCK_NOT_FOUND, self._counters)
            elif not host.reserve_fetches(1):
                self._request_server.send_without_block(at, OVERLOADED, self._counters)
            else:
                # A damaged block goes to the daemon even without `may_fetch`: the daemon checks and repairs it.
                ref = BlockRef(block.snapshot, block.entry, block.number, bad, 0, block.length)
                fetch = FetchRequest(
                    blocks=[ref],
                    deadline=max(0.0, self._until - time.monotonic()),
                    peer=self._request_server.node,
                    unhurried=request.is_ahead,
                    may_take=request.may_delegate,
                    await_snapshot=block.await_snapshot,
                    job=request.job_of(block),
                    urgent_after=block.urgent_after / 1000,
                )
                self._requested[at] = block, host.fetch_client.request_block(at, fetch, self._outcomes)

    def send_as_they_arrive(self) -> None:
        """Send blocks as they arrive, with beats in between, until all have arrived or time is up. Raises
        ConnectionLost."""
        server = self._request_server
        host, waiter = server.services, self._waiter
        host.heartbeats.add_waiter(waiter, self._outcomes)
        try:
            while self._requested and time.monotonic() < self._until + KEEPALIVE_SECONDS:
                came = self._next_outcome()
                if came is None:
                    continue
                at, outcome = came
                block, _ = self._requested.pop(at)
                host.reserve_fetches(-1)
                self._send_outcome(at, block, outcome)
                self._is_flushed = False
            for at in self._requested:
                server.send_without_block(at, FETCH_FAILED, self._counters, "the block did not arrive in time")
        finally:
            host.heartbeats.remove_waiter(waiter, self._outcomes)
            host.reserve_fetches(-len(self._requested))
            for _, number in self._requested.values():
                host.fetch_client.forget_request(number)

    def _next_outcome(self) -> FetchOutcome | None:
        """Return the next outcome; None if none arrived within a beat's pause. Raises ConnectionLost."""
        with contextlib.suppress(queue.Empty):
            return self._outcomes.get_nowait()
        pause = self._send_keepalive()
        with contextlib.suppress(queue.Empty):
            return self._outcomes.get(timeout=pause)
        return None

    def _send_keepalive(self) -> float:
        """Send a beat if one is due or bytes wait to be sent. Return the seconds until the next one. Raises
        ConnectionLost."""
        signs, now = self._request_server.services.heartbeats, time.monotonic()
        speaks = signs.is_sender(self._waiter, self._outcomes)
        lives = speaks and signs.is_daemon_alive(now)
        if lives or not self._is_flushed or now - self._last_keepalive >= KEEPALIVE_SECONDS:
            self._request_server.wire.send(keepalive_chunk(is_alive=lives))
            self._is_flushed, self._last_keepalive = True, now
        return HEARTBEAT_SECONDS if speaks else KEEPALIVE_SECONDS

    def _send_outcome(self, at: int, block: RequestedBlock, outcome: FetchedBlock | CachefsError) -> None:
        server, counters = self._request_server, self._counters
        if isinstance(outcome, Busy) or (isinstance(outcome, FetchedBlock) and outcome.errno == errno.EBUSY):
            server.send_without_block(at, OVERLOADED, counters)
        elif isinstance(outcome, CachefsError):
            server.send_without_block(at, FETCH_FAILED, counters, str(outcome))
        elif outcome.must_fetch_itself:
            server.send_without_block(at, FETCH_YOURSELF, counters)
        elif outcome.is_missing:
            server.send_without_block(at, BLOCK_NOT_FOUND, counters)
        elif outcome.lacks_snapshot:
            server.send_without_block(at, BLOCK_NOT_FOUND, counters, SNAPSHOT_NOT_FOUND)
        elif outcome.errno:
            server.send_without_block(at, FETCH_FAILED, counters, outcome.message)
        elif not outcome.location:
            self._send_bytes(at, block, outcome)
        else:
            self._send_located(at, block, outcome)

    def _send_bytes(self, at: int, block: RequestedBlock, outcome: FetchedBlock) -> None:
        server, counters = self._request_server, self._counters
        if not server.services.block_sender.send_fetched(server.wire, at, block, outcome):
            server.send_without_block(at, FETCH_FAILED, counters, "the block has another length on this node")
            return
        counters.fetched += 1
        server.count_block(block, counters)

    def _send_located(self, at: int, block: RequestedBlock, outcome: FetchedBlock) -> None:
        server, counters = self._request_server, self._counters
        try:
            location = BlockLocation.unpack(outcome.location)
        except ValueError:
            location = None
        if location is None or location.length != block.length:
            server.send_without_block(at, FETCH_FAILED, counters, "the block has another length on this node")
            return
        counters.fetched += 1
        server.send_block(at, block, location, counters)


def _node_description(view: ClusterView, node: str) -> str:
    record = view.get(node)
    return f"{record.name} ({node})" if record is not None else f"a node {node}"
