"""Calls to the daemon through the control file of a mount, as a container makes them that sees only the mount.

A call is the same message as on the daemon's socket, in base64. It takes one line, or several: each line has at most
4096 bytes, which the kernel never mixes with lines of others (pipe(7), PIPE_BUF). The answer comes back as a line in a
second FIFO, `.cachefs/answers-TOKEN`. The caller has made the token up, and it exists as soon as its name is looked up.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from cachefs.rpc import JOB_EPOCH, JOB_PROGRESS, JOB_PUBLISH, JOB_SHOW, Method

# Of the form that `lines_of` writes. A mount refuses a higher one.
VERSION: Final = 1
# Bytes of a request that go into one line: 3960 in base64, and less than 120 around them.
PART_BYTES: Final = 2970
MAX_LINE_BYTES: Final = 4096
# Bytes of one request. An order or a sample map has 4 per sample.
MAX_REQUEST: Final = 64 << 20
TOKEN_BITS: Final = 36
_TOKEN_DIGITS: Final = TOKEN_BITS // 4
_PREFIX: Final = b"answers-"
_NAME: Final = re.compile(rb"%s([0-9a-f]{%d})" % (_PREFIX, _TOKEN_DIGITS))
# What may be called so, by name.
METHODS: Final[dict[str, Method[Any, Any]]] = {
    method.name: method for method in (JOB_PUBLISH, JOB_EPOCH, JOB_PROGRESS, JOB_SHOW)
}

Token = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{_TOKEN_DIGITS}}}\Z")]
# Numbers that msgspec can write again: longer ones can be read.
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUEST)]


class Part(msgspec.Struct, tag_field="op", tag="part", forbid_unknown_fields=True):
    """Some bytes of a request that is too long for one line."""

    # Where the answer goes, and the number of the call: both name the request.
    answers: Token
    id: _Number
    # How many bytes of the request came before.
    at: _Size
    data: bytes


class Call(msgspec.Struct, tag_field="op", tag="call", forbid_unknown_fields=True):
    """The last bytes of a request, which is complete now."""

    answers: Token
    id: _Number
    # Name of the method.
    method: str
    # Bytes of the whole request, and their CRC-32.
    size: _Size
    crc: _Number
    data: bytes
    version: _Number = VERSION


class Answer(msgspec.Struct):
    """What became of a call: a reply, or an error."""

    id: int
    reply: bytes = b""
    # Class name (of cachefs.errors) and text of the error.
    error: str = ""
    text: str = ""


def lines_of(answers: str, number: int, method: str, request: bytes) -> Iterator[bytes]:
    """The lines of a call, each of MAX_LINE_BYTES at most."""
    last = max(0, len(request) - 1) // PART_BYTES * PART_BYTES
    for at in range(0, last, PART_BYTES):
        yield _line(Part(answers, number, at, request[at : at + PART_BYTES]))
    yield _line(Call(answers, number, method, len(request), zlib.crc32(request), request[last:]))


def token_of(number: int) -> str:
    """The token that is this number of TOKEN_BITS bits."""
    return f"{number:0{_TOKEN_DIGITS}x}"


def answers_name(token: str) -> str:
    """Name of the FIFO for the answers, beside the control file."""
    return (_PREFIX + token.encode()).decode()


def token_in(name: bytes) -> int | None:
    """The number of the token in the name of such a FIFO; None where it is none."""
    found = _NAME.fullmatch(name)
    return int(found[1], 16) if found else None


def _line(said: Part | Call) -> bytes:
    return msgspec.json.encode(said) + b"\n"
