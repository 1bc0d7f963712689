"""The wire protocol between nodes: HTTP/1.1, with one request for many blocks and one response with all of them.

    POST /blocks                     headers with the sender and the addressee, and a Question in msgpack
    200, Transfer-Encoding: chunked  one chunk per block, in the order in which they are ready, and one for the end

A chunk is a header of 8 bytes and its content: for a block, the checksums of its pieces, its bytes, and a byte that
tells whether the block was still at its location after it was sent; for a failure, the text. While a block is fetched,
an empty chunk (KEEPALIVE) every KEEPALIVE_SECONDS tells a server that waits from one that has stopped. On one
connection of each node the beat comes every HEARTBEAT_SECONDS and also tells that the daemon behind the server is
alive.

No input is trusted: everything has a bound, and a response that does not match its request is rejected.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from cachefs.block import KEY_SIZE, SSD, piece_count
from cachefs.job_messages import MAX_JOB_NAME
from cachefs_cluster.membership.handshake import Greeting
from cachefs_cluster.membership.secret import ClusterSecret, is_nonce, proofs_match
from cachefs_cluster.membership.view import PROTOCOL, is_id
from cachefs_daemon.consumer_checks import MAX_OWNER
from cachefs_daemon.origin.http.head import HEAD_END, MAX_HEAD_BYTES, MalformedHead, parse_head, parse_header_lines

# Limits of one request: blocks and their bytes; bytes of its body and of its head; seconds of its deadline.
MAX_BLOCKS: Final = 256
MAX_DATA: Final = 64 << 20
# Most jobs that one request names. Blocks of further jobs are requested without one.
MAX_JOBS: Final = 64
MAX_BODY: Final = 64 << 10
MAX_HEAD: Final = 4 << 10
MAX_SECONDS: Final = 3600.0
# Bytes of a text with a reason, and of the body of a response without blocks.
MAX_TEXT: Final = 500
_MAX_REFUSAL: Final = 2 << 10
# Most seconds between two chunks of a response; and on one connection of each node, while the daemon is alive.
KEEPALIVE_SECONDS: Final = 1.0
HEARTBEAT_SECONDS: Final = 0.1
_MAX_EPOCH: Final = 1 << 63

# The verdict in a probe's response if the server is alive but its daemon does not answer.
NO_DAEMON: Final = "no-daemon"
# Status of a chunk.
BLOCK_FOLLOWS: Final = 0
BLOCK_NOT_FOUND: Final = 1
FETCH_YOURSELF: Final = 2
OVERLOADED: Final = 3
FETCH_FAILED: Final = 4
KEEPALIVE: Final = 5
LAST: Final = 6
# Text of BLOCK_NOT_FOUND if the node lacks the snapshot too. Nodes of earlier releases read BLOCK_NOT_FOUND alone.
SNAPSHOT_NOT_FOUND: Final = "no snapshot"
# Number in chunks that belong to no block.
NO_BLOCK: Final = 0xFFFF
# Tier of a block that is in no tier. In a beat, the tier field tells whether the daemon is alive.
NO_TIER: Final = 255
_ALIVE: Final = 1
# The byte after a block: whether the block was still at its location when its last byte was sent. If it had moved,
# other bytes may have been sent without any fault.
STAYED: Final = b"\1"
MOVED: Final = b"\0"

_HEAD: Final = struct.Struct("<HBBI")  # number in the request, status, tier, bytes of content
HEAD_SIZE: Final = _HEAD.size
_LAST_CHUNK: Final = b"0\r\n\r\n"
_LINE_END: Final = b"\r\n"
# Most hexadecimal digits of a chunk's size: 64 MiB and a little.
_MAX_DIGITS: Final = 8

# Header with the proof that a node knows the cluster's secret.
PROOF: Final = b"x-cachefs-proof"

_PHRASES: Final = {200: "OK", 403: "Forbidden", 404: "Not Found", 409: "Conflict", 503: "Service Unavailable"}


class InvalidRequest(Exception):
    """An invalid request. The text is one line."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class InvalidResponse(Exception):
    """An invalid response. The text is one line."""


class RequestedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block in a request."""

    # Its place at the origin: id of the snapshot, number of the file, and number of the block in the file.
    snapshot: Annotated[str, Meta(max_length=64)]
    entry: Annotated[int, Meta(ge=0, lt=1 << 48)]
    number: Annotated[int, Meta(ge=0, lt=1 << 32)]
    key: Annotated[bytes, Meta(min_length=KEY_SIZE, max_length=KEY_SIZE)]
    length: Annotated[int, Meta(ge=1, le=MAX_DATA)]
    # The block arrived with wrong bytes before: verify the copy before it is sent.
    check: bool = False
    # Wait a while for a snapshot that is on its way. Nodes of earlier releases always wait.
    await_snapshot: bool = True
    # The job that reads the block: its number among `BlocksRequest.jobs`, counted from 1; 0: none.
    job: Annotated[int, Meta(ge=0, le=MAX_JOBS)] = 0
    # Milliseconds until the block is urgent for the job (cachefs.planning.prefetch.job_demand).
    urgent_after: Annotated[int, Meta(ge=0, le=int(MAX_SECONDS * 1000))] = 0


class BlocksRequest(msgspec.Struct, frozen=True, array_like=True):
    """The body of a request."""

    blocks: Annotated[list[RequestedBlock], Meta(min_length=1, max_length=MAX_BLOCKS)]
    # Fetch blocks that are not here from the origin.
    may_fetch: bool = False
    # The blocks are read ahead: no reader waits for them yet.
    is_ahead: bool = False
    # The requester is ready to fetch the blocks from the origin itself.
    may_delegate: bool = False
    # Names of the jobs that read the blocks, with their owners. The node that fetches a block charges its job.
    jobs: Annotated[list[Annotated[str, Meta(max_length=MAX_JOB_NAME + MAX_OWNER)]], Meta(max_length=MAX_JOBS)] = []

    def job_of(self, block: RequestedBlock) -> str:
        """Return the job that reads a block of this request; empty for none."""
        return self.jobs[block.job - 1] if 0 < block.job <= len(self.jobs) else ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BlocksRequest).decode


@dataclass(frozen=True, slots=True)
class RequestHead:
    method: str
    target: str
    # Sender and addressee; None without the headers, as from a person with curl.
    greeting: Greeting | None
    seconds: float  # until the response's deadline
    length: int  # of the body
    is_last: bool  # the client closes the connection after the response


def encode_blocks_request(request: BlocksRequest, greeting: Greeting, seconds: float) -> bytes:
    """Return a whole request for blocks, with its head."""
    body = _encode(request)
    head = (
        f"POST /blocks HTTP/1.1\r\nHost: {greeting.addressee}\r\n{_headers(greeting)}"
        f"X-Cachefs-Deadline: {max(1, int(min(seconds, MAX_SECONDS) * 1000))}\r\n"
        f"Content-Type: application/msgpack\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii", "replace") + body


def encode_probe(greeting: Greeting) -> bytes:
    """Return a request that only asks which node is there."""
    head = f"GET /health HTTP/1.1\r\nHost: {greeting.addressee}\r\n{_headers(greeting)}Connection: close\r\n\r\n"
    return head.encode("ascii", "replace")


def _headers(greeting: Greeting) -> str:
    return (
        f"X-Cachefs-Protocol: {greeting.protocol}\r\nX-Cachefs-Cluster: {greeting.cluster}\r\n"
        f"X-Cachefs-From: {greeting.sender}\r\nX-Cachefs-To: {greeting.addressee} {greeting.incarnation}\r\n"
        f"X-Cachefs-Epoch: {greeting.epoch}\r\n"
        + (f"X-Cachefs-Nonce: {greeting.nonce}\r\nX-Cachefs-Proof: {greeting.proof}\r\n" if greeting.nonce else "")
    )


def parse_request_head(text: bytes) -> RequestHead:
    """Parse a request's head. text: without the empty line at its end. Raises InvalidRequest."""
    if len(text) > MAX_HEAD:
        raise InvalidRequest(f"the head of a request has more than {MAX_HEAD} bytes", 431)
    lines = text.split(_LINE_END)
    if text.count(b"\r") != len(lines) - 1 or text.count(b"\n") != len(lines) - 1:
        raise InvalidRequest("the head of a request has a CR or LF within a line")
    start = lines[0].split(b" ")
    if len(start) != 3 or start[2] != b"HTTP/1.1" or not lines[0].isascii():
        raise InvalidRequest(f"a request begins with {lines[0][:40]!r}, which is not HTTP/1.1")
    try:
        headers = parse_header_lines(lines[1:])
    except MalformedHead as error:
        raise InvalidRequest(f"the head of a request: {error}") from None
    if b"transfer-encoding" in headers:
        raise InvalidRequest("a request without Content-Length", 411)
    length = _parse_number(headers, b"content-length", 0, MAX_BODY, 413)
    millis = _parse_number(headers, b"x-cachefs-deadline", 60_000, int(MAX_SECONDS * 1000))
    is_last = b"close" in headers.get(b"connection", b"").lower()
    method, target = start[0].decode(), start[1].decode()
    return RequestHead(method, target, _parse_greeting(headers), millis / 1000, length, is_last)


def _parse_greeting(headers: dict[bytes, bytes]) -> Greeting | None:
    if b"x-cachefs-from" not in headers:
        return None
    cluster, sender, receiver = (
        headers.get(name, b"").decode("ascii", "replace")
        for name in (b"x-cachefs-cluster", b"x-cachefs-from", b"x-cachefs-to")
    )
    addressee, _, incarnation = receiver.partition(" ")
    if not (is_id(sender) and is_id(addressee) and (not incarnation or is_id(incarnation)) and len(cluster) <= 253):
        raise InvalidRequest("the node ids of a request are not 16 hex digits each")
    epoch = _parse_number(headers, b"x-cachefs-epoch", 0, _MAX_EPOCH)
    protocol = _parse_number(headers, b"x-cachefs-protocol", PROTOCOL, 1 << 16)
    nonce, proof = (headers.get(name, b"").decode("ascii", "replace") for name in (b"x-cachefs-nonce", PROOF))
    if nonce and not is_nonce(nonce):
        raise InvalidRequest("the nonce of a request is not 32 hex digits")
    return Greeting(cluster, sender, addressee, incarnation, epoch, protocol, nonce, proof)


def _parse_number(headers: dict[bytes, bytes], name: bytes, missing: int, most: int, status: int = 400) -> int:
    value = headers.get(name)
    if value is None:
        return missing
    if not value.isdigit() or len(value) > 20 or int(value) > most:
        raise InvalidRequest(f"{name.decode()}: {value[:20].decode('latin-1')!r} is not a number up to {most}", status)
    return int(value)


def parse_blocks_request(body: bytes | bytearray | memoryview) -> BlocksRequest:
    """Raises InvalidRequest."""
    try:
        request = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body of a request is invalid ({error})") from None
    if sum(block.length for block in request.blocks) > MAX_DATA:
        raise InvalidRequest(f"a request for more than {MAX_DATA >> 20} MiB", 413)
    return request


# --- responses --------------------------------------------------------------------------------------------------------


def response_head(node: str, incarnation: str, epoch: int, proof: str = "") -> bytes:
    """Return the head of a response with blocks. proof: of the cluster's secret, for the nonce of the request."""
    return (
        "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
        f"{_identity_headers(node, incarnation, epoch, proof)}"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()


def refusal_response(status: int, identity: tuple[str, str, int, str], text: str, verdict: str = "") -> bytes:
    """Return a response without blocks. identity: this node's id, incarnation, ring epoch, and proof."""
    body = (" ".join(text.split())[:MAX_TEXT] + "\n").encode("ascii", "replace")
    extra = f"X-Cachefs-Verdict: {verdict}\r\n" if verdict else ""
    extra += f"Connection: close\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"HTTP/1.1 {status} {_PHRASES.get(status, 'No')}\r\n{_identity_headers(*identity)}{extra}".encode() + body


def _identity_headers(node: str, incarnation: str, epoch: int, proof: str = "") -> str:
    lines = f"X-Cachefs-Protocol: {PROTOCOL}\r\nX-Cachefs-From: {node} {incarnation}\r\nX-Cachefs-Epoch: {epoch}\r\n"
    return lines + (f"X-Cachefs-Proof: {proof}\r\n" if proof else "")


def block_start(index: int, tier: int, length: int, checksums: bytes) -> bytes:
    """Return the bytes that precede those of a block. `block_end` follows them."""
    head = _HEAD.pack(index, BLOCK_FOLLOWS, tier, length)
    return b"%x\r\n" % (HEAD_SIZE + len(checksums) + length + 1) + head + checksums


def block_end(*, stayed: bool) -> bytes:
    return (STAYED if stayed else MOVED) + _LINE_END


def status_chunk(index: int, status: int, text: str = "") -> bytes:
    """Return a chunk without a block."""
    data = " ".join(text.split()).encode("utf-8", "backslashreplace")[:MAX_TEXT]
    return b"%x\r\n" % (HEAD_SIZE + len(data)) + _HEAD.pack(index, status, NO_TIER, len(data)) + data + _LINE_END


def keepalive_chunk(*, is_alive: bool) -> bytes:
    """Return an empty chunk. is_alive: whether the daemon behind the server is alive."""
    return b"%x\r\n" % HEAD_SIZE + _HEAD.pack(NO_BLOCK, KEEPALIVE, _ALIVE if is_alive else NO_TIER, 0) + _LINE_END


def last_chunk(retransmitted: int) -> bytes:
    """Return the end of a response. retransmitted: packets sent again since the last response."""
    head = _HEAD.pack(NO_BLOCK, LAST, NO_TIER, min(retransmitted, 0xFFFFFFFF))
    return b"%x\r\n" % HEAD_SIZE + head + _LINE_END + _LAST_CHUNK


class ReceivedBlock(NamedTuple):
    """A block that has arrived. Its bytes are not verified."""

    # Number in the request.
    at: int
    tier: int
    checksums: bytes
    data: memoryview
    stayed: bool


class BlockStatus(NamedTuple):
    """The outcome of a block that will not arrive."""

    at: int
    status: int
    text: str


class PeerRefusal(NamedTuple):
    """A response without blocks: a refusal, or the response to a probe."""

    status: int
    # The value of a Verdict, if the refusal is about sender or addressee.
    verdict: str
    text: str


class RespondingNode(NamedTuple):
    """The responding node."""

    node: str
    incarnation: str
    epoch: int


ResponseItem = ReceivedBlock | BlockStatus | PeerRefusal


class SenderCheck(NamedTuple):
    """Checks that a response comes from the node that was asked: blocks are accepted from no other."""

    # Greeting of the request.
    greeting: Greeting
    # Data port of the addressee; and the cluster's secret, None without one.
    port: int
    secret: ClusterSecret | None

    def rejection_reason(self, sender: RespondingNode, proof: str, *, serves: bool) -> str:
        """Return why the response is rejected, or ""."""
        greeting = self.greeting
        if sender.node != greeting.addressee and (serves or self.secret is not None):
            return f"node {sender.node} answers at its address, not {greeting.addressee}"
        if self.secret is None:
            return ""
        if serves and sender.incarnation != greeting.incarnation:
            return "the response is from another start of the node's daemon"
        scope = greeting.scope(greeting.addressee, self.port)
        if proofs_match(proof, self.secret.response_proof(scope, sender.incarnation, serves=serves)):
            return ""
        return "it does not prove that it knows this cluster's secret; see cluster.secret_file"


def max_response_bytes(lengths: Sequence[int]) -> int:
    """Return the most bytes of a response with blocks of these lengths, without beats."""
    return MAX_HEAD_BYTES + sum(length + 8 * piece_count(length) + MAX_TEXT + 64 for length in lengths)


class ResponseParser:
    """Parses one response as it arrives in a buffer. Keeps positions, and no bytes."""

    def __init__(self, lengths: Sequence[int], check: SenderCheck | None = None) -> None:
        """lengths: of the requested blocks. check: of the responding node; None accepts any."""
        self._sender_check = check
        self.sender: RespondingNode | None = None  # None until the head is parsed
        self.is_done = False
        self.is_last = False  # the server closes the connection after the response
        self.retransmitted = 0
        self.heartbeats = 0  # chunks that prove a live daemon, or a block
        self.position = 0  # end of the parsed bytes
        self.needed_until = 0  # bytes needed before parsing can go on; 0 if unknown
        self._lengths = lengths
        self._missing = set(range(len(lengths)))
        self._last_block_end = 0  # end of the last block: bytes after it are not needed any more
        self._has_last_chunk = False  # chunk LAST was parsed
        self._body_end = 0  # end of the body of a response without blocks
        self._refused: tuple[int, str] | None = None

    def rewind(self, filled: int) -> int:
        """Return how many of the *filled* bytes are in use: fewer if only beats arrived since the last block."""
        if self.sender is not None and self._refused is None and self.position == filled > self._last_block_end:
            self.position = self._last_block_end
            return self._last_block_end
        return filled

    def parse(self, view: memoryview) -> Iterator[ResponseItem]:
        """Yield what has arrived whole since the last call. view: the filled part of the buffer. Raises
        InvalidResponse."""
        if self.sender is None and not self._parse_head(view):
            return
        if self._refused is not None:
            if len(view) >= self._body_end:
                status, verdict = self._refused
                text = _safe_text(view[self.position : self._body_end])
                self._finish(view, self._body_end)
                yield PeerRefusal(status, verdict, text)
            return
        while not self.is_done and len(view) >= self.needed_until:
            found = self._parse_chunk(view)
            if found is None:
                return
            if not isinstance(found, bool):
                yield found

    def _parse_head(self, view: memoryview) -> bool:
        text = bytes(view[:MAX_HEAD_BYTES])
        end = text.find(HEAD_END)
        if end < 0:
            if len(view) >= MAX_HEAD_BYTES:
                raise InvalidResponse(f"the head of a response has more than {MAX_HEAD_BYTES} bytes")
            return False
        try:
            head = parse_head(text[:end])
        except MalformedHead as error:
            raise InvalidResponse(f"the head of a response: {error}") from None
        self.position = self._last_block_end = end + len(HEAD_END)
        self.is_last = head.is_last
        node, _, incarnation = head.headers.get(b"x-cachefs-from", b"").decode("ascii", "replace").partition(" ")
        epoch = head.headers.get(b"x-cachefs-epoch", b"0")
        if not is_id(node) or not is_id(incarnation) or not epoch.isdigit() or len(epoch) > 20:
            raise InvalidResponse(f"a response with status {head.status} does not name its node")
        sender = RespondingNode(node, incarnation, int(epoch))
        if self._sender_check is not None:
            proof = head.headers.get(PROOF, b"").decode("ascii", "replace")
            if objection := self._sender_check.rejection_reason(sender, proof, serves=head.status == 200):
                raise InvalidResponse(objection)
        if head.status != 200 or head.length is not None:
            if head.length is None or head.length > _MAX_REFUSAL:
                raise InvalidResponse(f"a response with status {head.status} has no length, or a large one")
            self._body_end = self.position + head.length
            self._refused = head.status, head.headers.get(b"x-cachefs-verdict", b"")[:40].decode("ascii", "replace")
        elif head.headers.get(b"transfer-encoding", b"").lower() != b"chunked":
            raise InvalidResponse("a response is not sent in chunks")
        self.sender = sender
        return True

    def _parse_chunk(self, view: memoryview) -> ResponseItem | bool | None:
        """Return None if more bytes are needed; True for a chunk that concerns no block."""
        start = self.position
        line = bytes(view[start : start + _MAX_DIGITS + 2])
        end = line.find(_LINE_END)
        if end < 0:
            if len(line) > _MAX_DIGITS:
                raise InvalidResponse("a response has a chunk without a size")
            self.needed_until = 0
            return None
        try:
            size = int(line[:end], 16) if line[:end].isalnum() else -1
        except ValueError:
            size = -1
        if size == 0:
            return self._parse_end(view, start + end + 2)
        if size < HEAD_SIZE:
            raise InvalidResponse(f"a response has a chunk of {line[:end]!r} bytes")
        begin = start + end + 2
        if len(view) < begin + HEAD_SIZE:
            self.needed_until = 0
            return None
        index, status, tier, length = _HEAD.unpack_from(view, begin)
        self._check(index, status, length, size)
        stop = begin + size
        if len(view) < stop + 2:
            self.needed_until = stop + 2
            return None
        if bytes(view[stop : stop + 2]) != _LINE_END:
            raise InvalidResponse("a chunk of a response does not end where it should")
        self.position = stop + 2
        body = view[begin + HEAD_SIZE : stop]
        self.heartbeats += index != NO_BLOCK or tier == _ALIVE
        if index == NO_BLOCK:
            self._has_last_chunk = status == LAST
            self.retransmitted = length if status == LAST else self.retransmitted
            return True
        self._missing.discard(index)
        if status != BLOCK_FOLLOWS:
            return BlockStatus(index, status, _safe_text(body))
        self._last_block_end = self.position
        checksums = 8 * piece_count(length)
        return ReceivedBlock(
            index,
            tier,
            bytes(body[:checksums]),
            body[checksums : checksums + length],
            bytes(body[-1:]) == STAYED,
        )

    def _check(self, index: int, status: int, length: int, size: int) -> None:
        if self._has_last_chunk:
            raise InvalidResponse("bytes follow the last chunk of a response")
        if index == NO_BLOCK:
            if status not in (KEEPALIVE, LAST) or size != HEAD_SIZE:
                raise InvalidResponse(f"a response has a chunk of kind {status} for no block")
            return
        if index not in self._missing:
            raise InvalidResponse(f"a response has a block {index} that was not asked for, or has it twice")
        if status == BLOCK_FOLLOWS:
            if length != self._lengths[index] or size != HEAD_SIZE + 8 * piece_count(length) + length + 1:
                raise InvalidResponse(f"a block of {self._lengths[index]} bytes was sent with {length} bytes")
        elif not (BLOCK_NOT_FOUND <= status <= FETCH_FAILED and length <= MAX_TEXT and size == HEAD_SIZE + length):
            raise InvalidResponse(f"a response has a chunk of kind {status} with {size} bytes")

    def _parse_end(self, view: memoryview, begin: int) -> bool | None:
        if len(view) < begin + 2:
            self.needed_until = begin + 2
            return None
        if bytes(view[begin : begin + 2]) != _LINE_END or not self._has_last_chunk or self._missing:
            raise InvalidResponse(f"a response ends without {len(self._missing)} of the blocks")
        self._finish(view, begin + 2)
        return True

    def _finish(self, view: memoryview, end: int) -> None:
        if len(view) > end:
            raise InvalidResponse("bytes follow the end of a response")
        self.position, self.is_done = end, True


def tier_of(number: int) -> int | None:
    """Return MEMORY or SSD; None for a block that was in no tier."""
    return number if number <= SSD else None


def _safe_text(text: memoryview) -> str:
    """Return a peer's text in a form that is safe in a log line."""
    words = " ".join(bytes(text).decode("utf-8", "replace").split())[:MAX_TEXT]
    return "".join(letter if letter.isprintable() else "?" for letter in words)
