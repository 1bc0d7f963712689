"""The wire protocol between nodes: HTTP/1.1, with one request for many blocks and one response with all of them.

    POST /blocks                     headers with the sender and the addressee, and a Question in msgpack
    200, Transfer-Encoding: chunked  one chunk per block, in the order in which they are ready, and one for the end

A chunk is a header of 8 bytes and its content: for a block, the checksums of its pieces, its bytes, and a byte that
tells whether the block was still at its location after it was sent; for a failure, the text. While a block is fetched,
an empty chunk (BEAT) every BEAT_SECONDS tells a server that waits from one that has stopped. On one connection of each
node the beat comes every SIGN_SECONDS and also tells that the daemon behind the server is alive.

No input is trusted: everything has a bound, and a response that does not match its request is rejected.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from cachefs.block import KEY_SIZE, SSD, piece_count
from cachefs_daemon.cluster.handshake import Greeting
from cachefs_daemon.cluster.secret import ClusterSecret, is_nonce, is_proof
from cachefs_daemon.cluster.view import PROTOCOL, is_id
from cachefs_daemon.origin.http_head import END, MOST_BYTES, Malformed, parse_head, parse_lines

# Limits of one request: blocks and their bytes; bytes of its body and of its head; seconds of its deadline.
MOST_BLOCKS: Final = 256
MOST_DATA: Final = 64 << 20
MOST_BODY: Final = 64 << 10
MOST_HEAD: Final = 4 << 10
MOST_SECONDS: Final = 3600.0
# Bytes of a text with a reason, and of the body of a response without blocks.
MOST_TEXT: Final = 500
_MOST_REFUSAL: Final = 2 << 10
# Most seconds between two chunks of a response; and on one connection of each node, while the daemon is alive.
BEAT_SECONDS: Final = 1.0
SIGN_SECONDS: Final = 0.1
_MOST_EPOCH: Final = 1 << 63

# The verdict in a probe's response if the server is alive but its daemon does not answer.
NO_DAEMON: Final = "no-daemon"
# Status of a chunk.
HERE: Final = 0
NOT_HERE: Final = 1
TAKE_IT: Final = 2
BUSY: Final = 3
FAILED: Final = 4
BEAT: Final = 5
LAST: Final = 6
# Text of NOT_HERE if the node lacks the snapshot too. Nodes of earlier releases read NOT_HERE alone.
LACKS_SNAPSHOT: Final = "no snapshot"
# Number in chunks that belong to no block.
NO_BLOCK: Final = 0xFFFF
# Tier of a block that is in no tier. In a beat, the tier field tells whether the daemon is alive.
NO_TIER: Final = 255
_LIVES: Final = 1
# The byte after a block: whether the block was still at its location when its last byte was sent. If it had moved,
# other bytes may have been sent without any fault.
STAYED: Final = b"\1"
MOVED: Final = b"\0"

_HEAD: Final = struct.Struct("<HBBI")  # number in the request, status, tier, bytes of content
HEAD_SIZE: Final = _HEAD.size
_LAST_CHUNK: Final = b"0\r\n\r\n"
_LINE_END: Final = b"\r\n"
# Most hexadecimal digits of a chunk's size: 64 MiB and a little.
_MOST_DIGITS: Final = 8

# Header with the proof that a node knows the cluster's secret.
PROOF: Final = b"x-cachefs-proof"

_PHRASES: Final = {200: "OK", 403: "Forbidden", 404: "Not Found", 409: "Conflict", 503: "Service Unavailable"}


class BadQuestion(Exception):
    """An invalid request. The text is one line."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class BadAnswer(Exception):
    """An invalid response. The text is one line."""


class AskedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block in a request."""

    # Its place at the origin: id of the snapshot, number of the file, and number of the block in the file.
    snapshot: Annotated[str, Meta(max_length=64)]
    entry: Annotated[int, Meta(ge=0, lt=1 << 48)]
    number: Annotated[int, Meta(ge=0, lt=1 << 32)]
    key: Annotated[bytes, Meta(min_length=KEY_SIZE, max_length=KEY_SIZE)]
    length: Annotated[int, Meta(ge=1, le=MOST_DATA)]
    # The block arrived with wrong bytes before: verify the copy before it is sent.
    check: bool = False
    # Wait a while for a snapshot that is on its way. Nodes of earlier releases always wait.
    await_snapshot: bool = True


class Question(msgspec.Struct, frozen=True, array_like=True):
    """The body of a request."""

    blocks: Annotated[list[AskedBlock], Meta(min_length=1, max_length=MOST_BLOCKS)]
    # Fetch blocks that are not here from the origin.
    fetch: bool = False
    # The blocks are read ahead: no reader waits for them yet.
    ahead: bool = False
    # The requester is ready to fetch the blocks from the origin itself.
    may_take: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Question).decode


@dataclass(frozen=True, slots=True)
class RequestHead:
    method: str
    target: str
    # Sender and addressee; None without the headers, as from a person with curl.
    greeting: Greeting | None
    seconds: float  # until the response's deadline
    length: int  # of the body
    is_last: bool  # the client closes the connection after the response


def encode_question(question: Question, greeting: Greeting, seconds: float) -> bytes:
    """Return a whole request for blocks, with its head."""
    body = _encode(question)
    head = (
        f"POST /blocks HTTP/1.1\r\nHost: {greeting.addressee}\r\n{_headers(greeting)}"
        f"X-Cachefs-Deadline: {max(1, int(min(seconds, MOST_SECONDS) * 1000))}\r\n"
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
    """Parse a request's head. text: without the empty line at its end. Raises BadQuestion."""
    if len(text) > MOST_HEAD:
        raise BadQuestion(f"the head of a request has more than {MOST_HEAD} bytes", 431)
    lines = text.split(_LINE_END)
    if text.count(b"\r") != len(lines) - 1 or text.count(b"\n") != len(lines) - 1:
        raise BadQuestion("the head of a request has a CR or LF within a line")
    start = lines[0].split(b" ")
    if len(start) != 3 or start[2] != b"HTTP/1.1" or not lines[0].isascii():
        raise BadQuestion(f"a request begins with {lines[0][:40]!r}, which is no HTTP/1.1")
    try:
        headers = parse_lines(lines[1:])
    except Malformed as error:
        raise BadQuestion(f"the head of a request: {error}") from None
    if b"transfer-encoding" in headers:
        raise BadQuestion("a request without Content-Length", 411)
    length = _number(headers, b"content-length", 0, MOST_BODY, 413)
    millis = _number(headers, b"x-cachefs-deadline", 60_000, int(MOST_SECONDS * 1000))
    is_last = b"close" in headers.get(b"connection", b"").lower()
    method, target = start[0].decode(), start[1].decode()
    return RequestHead(method, target, _greeting(headers), millis / 1000, length, is_last)


def _greeting(headers: dict[bytes, bytes]) -> Greeting | None:
    if b"x-cachefs-from" not in headers:
        return None
    cluster, sender, said = (
        headers.get(name, b"").decode("ascii", "replace")
        for name in (b"x-cachefs-cluster", b"x-cachefs-from", b"x-cachefs-to")
    )
    addressee, _, incarnation = said.partition(" ")
    if not (is_id(sender) and is_id(addressee) and (not incarnation or is_id(incarnation)) and len(cluster) <= 253):
        raise BadQuestion("the ids of the nodes that ask and are asked are no 16 hex digits")
    epoch = _number(headers, b"x-cachefs-epoch", 0, _MOST_EPOCH)
    protocol = _number(headers, b"x-cachefs-protocol", PROTOCOL, 1 << 16)
    nonce, proof = (headers.get(name, b"").decode("ascii", "replace") for name in (b"x-cachefs-nonce", PROOF))
    if nonce and not is_nonce(nonce):
        raise BadQuestion("the nonce of a request is no 32 hex digits")
    return Greeting(cluster, sender, addressee, incarnation, epoch, protocol, nonce, proof)


def _number(headers: dict[bytes, bytes], name: bytes, missing: int, most: int, status: int = 400) -> int:
    said = headers.get(name)
    if said is None:
        return missing
    if not said.isdigit() or len(said) > 20 or int(said) > most:
        raise BadQuestion(f"{name.decode()}: {said[:20].decode('latin-1')!r} is no number up to {most}", status)
    return int(said)


def parse_question(body: bytes | bytearray | memoryview) -> Question:
    """Raises BadQuestion."""
    try:
        question = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadQuestion(f"the body of a request is no question ({error})") from None
    if sum(block.length for block in question.blocks) > MOST_DATA:
        raise BadQuestion(f"a question for more than {MOST_DATA >> 20} MiB", 413)
    return question


# --- responses --------------------------------------------------------------------------------------------------------


def answer_head(node: str, incarnation: str, epoch: int, proof: str = "") -> bytes:
    """Return the head of a response with blocks. proof: of the cluster's secret, for the nonce of the request."""
    return (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n{_who(node, incarnation, epoch, proof)}"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()


def refusal(status: int, who: tuple[str, str, int, str], text: str, verdict: str = "") -> bytes:
    """Return a response without blocks. who: this node's id, incarnation, ring epoch, and proof."""
    body = (" ".join(text.split())[:MOST_TEXT] + "\n").encode("ascii", "replace")
    extra = f"X-Cachefs-Verdict: {verdict}\r\n" if verdict else ""
    extra += f"Connection: close\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"HTTP/1.1 {status} {_PHRASES.get(status, 'No')}\r\n{_who(*who)}{extra}".encode() + body


def _who(node: str, incarnation: str, epoch: int, proof: str = "") -> str:
    lines = f"X-Cachefs-Protocol: {PROTOCOL}\r\nX-Cachefs-From: {node} {incarnation}\r\nX-Cachefs-Epoch: {epoch}\r\n"
    return lines + (f"X-Cachefs-Proof: {proof}\r\n" if proof else "")


def block_start(index: int, tier: int, length: int, checksums: bytes) -> bytes:
    """Return the bytes that precede those of a block. `block_end` follows them."""
    head = _HEAD.pack(index, HERE, tier, length)
    return b"%x\r\n" % (HEAD_SIZE + len(checksums) + length + 1) + head + checksums


def block_end(*, stayed: bool) -> bytes:
    return (STAYED if stayed else MOVED) + _LINE_END


def short_chunk(index: int, status: int, text: str = "") -> bytes:
    """Return a chunk without a block."""
    data = " ".join(text.split()).encode("utf-8", "backslashreplace")[:MOST_TEXT]
    return b"%x\r\n" % (HEAD_SIZE + len(data)) + _HEAD.pack(index, status, NO_TIER, len(data)) + data + _LINE_END


def beat(*, lives: bool) -> bytes:
    """Return an empty chunk. lives: whether the daemon behind the server is alive."""
    return b"%x\r\n" % HEAD_SIZE + _HEAD.pack(NO_BLOCK, BEAT, _LIVES if lives else NO_TIER, 0) + _LINE_END


def last_chunk(retransmitted: int) -> bytes:
    """Return the end of a response. retransmitted: packets sent again since the last response."""
    head = _HEAD.pack(NO_BLOCK, LAST, NO_TIER, min(retransmitted, 0xFFFFFFFF))
    return b"%x\r\n" % HEAD_SIZE + head + _LINE_END + _LAST_CHUNK


class Block(NamedTuple):
    """A block that has arrived. Its bytes are not verified."""

    # Number in the request.
    at: int
    tier: int
    checksums: bytes
    data: memoryview
    stayed: bool


class NoBlock(NamedTuple):
    """The outcome of a block that will not arrive."""

    at: int
    status: int
    text: str


class Refused(NamedTuple):
    """A response without blocks: a refusal, or the response to a probe."""

    status: int
    # The value of a Verdict, if the refusal is about sender or addressee.
    verdict: str
    text: str


class Sender(NamedTuple):
    """The responding node."""

    node: str
    incarnation: str
    epoch: int


Item = Block | NoBlock | Refused


class SenderCheck(NamedTuple):
    """Checks that a response comes from the node that was asked: blocks are accepted from no other."""

    # Greeting of the request.
    greeting: Greeting
    # Data port of the addressee; and the cluster's secret, None without one.
    port: int
    secret: ClusterSecret | None

    def objection(self, sender: Sender, proof: str, *, serves: bool) -> str:
        """Return why the response is rejected, or ""."""
        asked = self.greeting
        if sender.node != asked.addressee and (serves or self.secret is not None):
            return f"node {sender.node} answers at its address, not {asked.addressee}"
        if self.secret is None:
            return ""
        if serves and sender.incarnation != asked.incarnation:
            return "another start of its daemon gives blocks than the one that was asked"
        scope = asked.scope(asked.addressee, self.port)
        if is_proof(proof, self.secret.response_proof(scope, sender.incarnation, serves=serves)):
            return ""
        return "it does not prove that it knows this cluster's secret; see cluster.secret_file"


def answer_room(lengths: Sequence[int]) -> int:
    """Return the most bytes of a response with blocks of these lengths, without beats."""
    return MOST_BYTES + sum(length + 8 * piece_count(length) + MOST_TEXT + 64 for length in lengths)


class AnswerParser:
    """Parses one response as it arrives in a buffer. Keeps positions, and no bytes."""

    def __init__(self, lengths: Sequence[int], check: SenderCheck | None = None) -> None:
        """lengths: of the requested blocks. check: of the responding node; None accepts any."""
        self._sender_check = check
        self.sender: Sender | None = None  # None until the head is parsed
        self.is_done = False
        self.is_last = False  # the server closes the connection after the response
        self.retransmitted = 0
        self.signs = 0  # chunks that prove a live daemon, or a block
        self.position = 0  # end of the parsed bytes
        self.wanted_to = 0  # bytes needed before parsing can go on; 0 if unknown
        self._lengths = lengths
        self._left = set(range(len(lengths)))
        self._kept = 0  # end of the last block: bytes after it are not needed any more
        self._ended = False  # chunk LAST was parsed
        self._body = 0  # end of the body of a response without blocks
        self._refused: tuple[int, str] | None = None

    def rewind(self, filled: int) -> int:
        """Return how many of the *filled* bytes are in use: fewer if only beats arrived since the last block."""
        if self.sender is not None and self._refused is None and self.position == filled > self._kept:
            self.position = self._kept
            return self._kept
        return filled

    def parse(self, view: memoryview) -> Iterator[Item]:
        """Yield what has arrived whole since the last call. view: the filled part of the buffer. Raises BadAnswer."""
        if self.sender is None and not self._parse_head(view):
            return
        if self._refused is not None:
            if len(view) >= self._body:
                status, verdict = self._refused
                text = _readable(view[self.position : self._body])
                self._finish(view, self._body)
                yield Refused(status, verdict, text)
            return
        while not self.is_done and len(view) >= self.wanted_to:
            found = self._parse_chunk(view)
            if found is None:
                return
            if not isinstance(found, bool):
                yield found

    def _parse_head(self, view: memoryview) -> bool:
        text = bytes(view[:MOST_BYTES])
        end = text.find(END)
        if end < 0:
            if len(view) >= MOST_BYTES:
                raise BadAnswer(f"the head of an answer has more than {MOST_BYTES} bytes")
            return False
        try:
            head = parse_head(text[:end])
        except Malformed as error:
            raise BadAnswer(f"the head of an answer: {error}") from None
        self.position = self._kept = end + len(END)
        self.is_last = head.is_last
        node, _, incarnation = head.headers.get(b"x-cachefs-from", b"").decode("ascii", "replace").partition(" ")
        epoch = head.headers.get(b"x-cachefs-epoch", b"0")
        if not is_id(node) or not is_id(incarnation) or not epoch.isdigit() or len(epoch) > 20:
            raise BadAnswer(f"an answer with status {head.status} does not say which node it is from")
        sender = Sender(node, incarnation, int(epoch))
        if self._sender_check is not None:
            proof = head.headers.get(PROOF, b"").decode("ascii", "replace")
            if objection := self._sender_check.objection(sender, proof, serves=head.status == 200):
                raise BadAnswer(objection)
        if head.status != 200 or head.length is not None:
            if head.length is None or head.length > _MOST_REFUSAL:
                raise BadAnswer(f"an answer with status {head.status} has no length, or a large one")
            self._body = self.position + head.length
            self._refused = head.status, head.headers.get(b"x-cachefs-verdict", b"")[:40].decode("ascii", "replace")
        elif head.headers.get(b"transfer-encoding", b"").lower() != b"chunked":
            raise BadAnswer("an answer does not come in chunks")
        self.sender = sender
        return True

    def _parse_chunk(self, view: memoryview) -> Item | bool | None:
        """Return None if more bytes are needed; True for a chunk that concerns no block."""
        start = self.position
        line = bytes(view[start : start + _MOST_DIGITS + 2])
        end = line.find(_LINE_END)
        if end < 0:
            if len(line) > _MOST_DIGITS:
                raise BadAnswer("an answer has a chunk without a size")
            self.wanted_to = 0
            return None
        try:
            size = int(line[:end], 16) if line[:end].isalnum() else -1
        except ValueError:
            size = -1
        if size == 0:
            return self._parse_end(view, start + end + 2)
        if size < HEAD_SIZE:
            raise BadAnswer(f"an answer has a chunk of {line[:end]!r} bytes")
        begin = start + end + 2
        if len(view) < begin + HEAD_SIZE:
            self.wanted_to = 0
            return None
        index, status, tier, length = _HEAD.unpack_from(view, begin)
        self._check(index, status, length, size)
        stop = begin + size
        if len(view) < stop + 2:
            self.wanted_to = stop + 2
            return None
        if bytes(view[stop : stop + 2]) != _LINE_END:
            raise BadAnswer("a chunk of an answer does not end where it should")
        self.position = stop + 2
        body = view[begin + HEAD_SIZE : stop]
        self.signs += index != NO_BLOCK or tier == _LIVES
        if index == NO_BLOCK:
            self._ended = status == LAST
            self.retransmitted = length if status == LAST else self.retransmitted
            return True
        self._left.discard(index)
        if status != HERE:
            return NoBlock(index, status, _readable(body))
        self._kept = self.position
        checksums = 8 * piece_count(length)
        return Block(
            index,
            tier,
            bytes(body[:checksums]),
            body[checksums : checksums + length],
            bytes(body[-1:]) == STAYED,
        )

    def _check(self, index: int, status: int, length: int, size: int) -> None:
        if self._ended:
            raise BadAnswer("an answer goes on behind its end")
        if index == NO_BLOCK:
            if status not in (BEAT, LAST) or size != HEAD_SIZE:
                raise BadAnswer(f"an answer has a chunk of kind {status} for no block")
            return
        if index not in self._left:
            raise BadAnswer(f"an answer has a block {index} that was not asked for, or has it twice")
        if status == HERE:
            if length != self._lengths[index] or size != HEAD_SIZE + 8 * piece_count(length) + length + 1:
                raise BadAnswer(f"a block of {self._lengths[index]} bytes comes with {length} bytes")
        elif not (NOT_HERE <= status <= FAILED and length <= MOST_TEXT and size == HEAD_SIZE + length):
            raise BadAnswer(f"an answer has a chunk of kind {status} with {size} bytes")

    def _parse_end(self, view: memoryview, begin: int) -> bool | None:
        if len(view) < begin + 2:
            self.wanted_to = begin + 2
            return None
        if bytes(view[begin : begin + 2]) != _LINE_END or not self._ended or self._left:
            raise BadAnswer(f"an answer ends without {len(self._left)} of the blocks")
        self._finish(view, begin + 2)
        return True

    def _finish(self, view: memoryview, end: int) -> None:
        if len(view) > end:
            raise BadAnswer("there is more behind the end of an answer")
        self.position, self.is_done = end, True


def tier_of(number: int) -> int | None:
    """Return MEMORY or SSD; None for a block that was in no tier."""
    return number if number <= SSD else None


def _readable(text: memoryview) -> str:
    """Return a peer's text in a form that is safe in a log line."""
    words = " ".join(bytes(text).decode("utf-8", "replace").split())[:MOST_TEXT]
    return "".join(letter if letter.isprintable() else "?" for letter in words)
