"""Frames of the daemon's fetch channel, a unix socket beside its own, where mounts request blocks.

A frame is a length of four bytes (big-endian) and this number of bytes of msgpack. Both sides begin with a Hello. Then
the mount sends any number of `FetchRequestFrame`, without waiting, and the daemon answers each with one
`FetchResponseFrame`, in any order. The kernel tells the daemon who has connected (SO_PEERCRED), so a mount need not
identify itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from cachefs.errors import CachefsError
from cachefs.messages import FetchedBlock, FetchRequest, Message

# Suffix of the daemon's socket path for that of the fetch channel.
FETCH_SUFFIX: Final = ".ch"
# Version of the frames after the Hello. It changes where one side could not understand the other.
VERSION: Final = 1
# Maximum size in bytes of a frame from a mount (3,000 blocks), and from the daemon.
MAX_REQUEST_BYTES: Final = 256 << 10
MAX_RESPONSE_BYTES: Final = 128 << 20
# Timeout for the Hello.
HELLO_SECONDS: Final = 5.0

_LENGTH: Final = 4

Body = TypeVar("Body", bound=Message)
_encode_into = msgspec.msgpack.Encoder().encode_into


class InvalidFrame(CachefsError):
    """The other side violates the protocol."""


class Hello(Message, frozen=True):
    """The first frame in both directions. Its fields never change; new ones may be added."""

    version: int
    # Why the daemon hangs up: name of the error's class, and one line of text; "" where it does not.
    kind: str = ""
    refusal: str = ""


class FetchRequestFrame(Message, frozen=True, array_like=True):
    """A mount's request."""

    # The response has the same number.
    number: int
    request: FetchRequest


class FetchResponseFrame(Message, frozen=True, array_like=True):
    """The daemon's response."""

    number: int
    # One for each requested block, in the same order; empty where the mount does not wait for the blocks.
    blocks: list[FetchedBlock]
    # Why the daemon rejects the request: name of the error's class, and one line of text.
    kind: str = ""
    message: str = ""


def fetch_socket_path(daemon_socket: Path) -> Path:
    return daemon_socket.with_name(daemon_socket.name + FETCH_SUFFIX)


def encode_frame(message: Message) -> bytearray:
    """Return the frame of a message. Raises UnicodeEncodeError for a text that is not UTF-8."""
    data = bytearray(_LENGTH)
    _encode_into(message, data, _LENGTH)
    data[:_LENGTH] = (len(data) - _LENGTH).to_bytes(_LENGTH, "big")
    return data


def body_decoder(kind: type[Body]) -> Callable[[bytes | memoryview], Body]:
    """Return a function that decodes the body of a frame. It raises InvalidFrame."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(body: bytes | memoryview) -> Body:
        try:
            return decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidFrame(f"the body is not a valid {kind.__name__} ({error})") from None

    return read


class FrameSplitter:
    """Splits a stream of bytes into the bodies of frames."""

    def __init__(self, max_size: int) -> None:
        """max_size: maximum size of a body in bytes."""
        self._max_size = max_size
        self._incomplete = bytearray()

    def split_frames(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Return the bodies that end in *data*, some of them as views into it. Raises InvalidFrame."""
        kept, begin = self._incomplete, 0
        if not kept and 0 < len(data) - _LENGTH == int.from_bytes(data[:_LENGTH], "big") <= self._max_size:
            return [memoryview(data)[_LENGTH:]]
        found: list[bytes | memoryview] = []
        kept += data
        while len(kept) - begin >= _LENGTH:
            body = begin + _LENGTH
            length = int.from_bytes(kept[begin:body], "big")
            if not 0 < length <= self._max_size:
                raise InvalidFrame(f"a frame of {length} bytes; from 1 to {self._max_size} are allowed")
            if len(kept) - body < length:
                break
            begin = body + length
            with memoryview(kept) as view:
                found.append(bytes(view[body:begin]))
        del kept[:begin]
        return found
