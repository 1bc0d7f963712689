"""Calls to the daemon through the control file of a mount, for containers that see only the mount.

A call is the same message as on the daemon's socket, in base64. It takes one line or several: each line has at most
4096 bytes, which the kernel never mixes with lines of other writers (pipe(7), PIPE_BUF). The response is a line in a
second FIFO, `.cachefs/answers-TOKEN`. The caller chooses the token, and looking up the FIFO's name creates the FIFO.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from cachefs.rpc import JOB_EPOCH, JOB_PROGRESS, JOB_PUBLISH, JOB_SHOW, Method

# Version of the format of `call_lines`. A mount rejects a higher one.
VERSION: Final = 1
# Bytes of a request in one line: 3960 in base64, with less than 120 around them.
PART_BYTES: Final = 2970
MAX_LINE_BYTES: Final = 4096
# Maximum size in bytes of one request. An order or a sample map has 4 per sample.
MAX_REQUEST_BYTES: Final = 64 << 20
TOKEN_BITS: Final = 36
_TOKEN_DIGITS: Final = TOKEN_BITS // 4
_FIFO_PREFIX: Final = b"answers-"
_FIFO_NAME: Final = re.compile(rb"%s([0-9a-f]{%d})" % (_FIFO_PREFIX, _TOKEN_DIGITS))
# Methods that may be called through a mount, by name.
METHODS: Final[dict[str, Method[Any, Any]]] = {
    method.name: method for method in (JOB_PUBLISH, JOB_EPOCH, JOB_PROGRESS, JOB_SHOW)
}

Token = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{_TOKEN_DIGITS}}}\Z")]
# Numbers that msgspec can write again: it also reads longer ones.
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUEST_BYTES)]


class RequestPart(msgspec.Struct, tag_field="op", tag="part", forbid_unknown_fields=True):
    """A part of a request that is too long for one line."""

    # Token of the FIFO for the response, and number of the call; together they identify the request.
    answers: Token
    id: _Number
    # Bytes of the request in earlier parts.
    at: _Size
    data: bytes


class RequestEnd(msgspec.Struct, tag_field="op", tag="call", forbid_unknown_fields=True):
    """The last bytes of a request, which is then complete."""

    answers: Token
    id: _Number
    # Name of the method.
    method: str
    # Size of the whole request in bytes, and its CRC-32.
    size: _Size
    crc: _Number
    data: bytes
    version: _Number = VERSION


class CallResponse(msgspec.Struct):
    """The result of a call: a reply, or an error."""

    id: int
    reply: bytes = b""
    # Class name (of cachefs.errors) and text of the error.
    error: str = ""
    text: str = ""


def call_lines(token: str, number: int, method: str, request: bytes) -> Iterator[bytes]:
    """Yield the lines of a call, each of at most MAX_LINE_BYTES."""
    last = max(0, len(request) - 1) // PART_BYTES * PART_BYTES
    for at in range(0, last, PART_BYTES):
        yield _line(RequestPart(token, number, at, request[at : at + PART_BYTES]))
    yield _line(RequestEnd(token, number, method, len(request), zlib.crc32(request), request[last:]))


def format_token(number: int) -> str:
    """Return the token for a number of TOKEN_BITS bits."""
    return f"{number:0{_TOKEN_DIGITS}x}"


def response_fifo_name(token: str) -> str:
    """Return the name of the FIFO for the responses, beside the control file."""
    return (_FIFO_PREFIX + token.encode()).decode()


def parse_fifo_token(name: bytes) -> int | None:
    """Return the number of the token in the name of a FIFO for responses; None for other names."""
    found = _FIFO_NAME.fullmatch(name)
    return int(found[1], 16) if found else None


def _line(message: RequestPart | RequestEnd) -> bytes:
    return msgspec.json.encode(message) + b"\n"
