"""What goes over the daemon's fetch channel, a unix socket beside its own: mounts ask there for blocks.

A frame is a length of four bytes (big-endian) and so many bytes of msgpack. Both sides begin with a Hello. Then the
mount sends `Asked`, as many as it likes at once, and the daemon answers each with one `Answered`, in any order. The
kernel tells the daemon who has connected (SO_PEERCRED), so a mount need not say who it is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from cachefs.errors import CachefsError
from cachefs.messages import Fetch, FetchedBlock, Message

# Of the socket's path: that of the daemon's own, and this.
FETCH_SUFFIX: Final = ".ch"
# Of what follows the Hello. Another number where one side could not understand the other.
VERSION: Final = 1
# Bytes of a frame, at most: of what a mount sends (3,000 blocks), and of what the daemon answers.
MOST_ASKED: Final = 256 << 10
MOST_ANSWERED: Final = 128 << 20
# Seconds within which a Hello must come.
HELLO_SECONDS: Final = 5.0

_LENGTH: Final = 4

Body = TypeVar("Body", bound=Message)
_encode_into = msgspec.msgpack.Encoder().encode_into


class BadFrame(CachefsError):
    """The other side does not keep to the frames."""


class Hello(Message, frozen=True):
    """The first frame in both directions. Its fields are never changed, only added to."""

    version: int
    # Why the daemon hangs up: name of the error's class, and one line of text. Empty where it does not.
    kind: str = ""
    refusal: str = ""


class Asked(Message, frozen=True, array_like=True):
    """What a mount asks for."""

    # The answer has the same number.
    number: int
    fetch: Fetch


class Answered(Message, frozen=True, array_like=True):
    """What the daemon answers."""

    number: int
    # One for each block that was asked for, in the same order; none for blocks that nobody waits for.
    blocks: list[FetchedBlock]
    # Why the daemon does not take the request: name of the error's class, and one line of text.
    kind: str = ""
    message: str = ""


def fetch_socket(daemon_socket: Path) -> Path:
    return daemon_socket.with_name(daemon_socket.name + FETCH_SUFFIX)


def frame(message: Message) -> bytearray:
    """Raises UnicodeEncodeError for a text that is not UTF-8."""
    data = bytearray(_LENGTH)
    _encode_into(message, data, _LENGTH)
    data[:_LENGTH] = (len(data) - _LENGTH).to_bytes(_LENGTH, "big")
    return data


def decoder(kind: type[Body]) -> Callable[[bytes | memoryview], Body]:
    """What makes a message out of a body. It raises BadFrame."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(body: bytes | memoryview) -> Body:
        try:
            return decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"no {kind.__name__} ({error})") from None

    return read


class Frames:
    """Cuts bytes as they come into the bodies of frames."""

    def __init__(self, most: int) -> None:
        """most: bytes that a body may have."""
        self._most = most
        self._kept = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """The bodies that end in *data*, some of them as views into it. Raises BadFrame."""
        kept, begin = self._kept, 0
        if not kept and 0 < len(data) - _LENGTH == int.from_bytes(data[:_LENGTH], "big") <= self._most:
            return [memoryview(data)[_LENGTH:]]
        found: list[bytes | memoryview] = []
        kept += data
        while len(kept) - begin >= _LENGTH:
            body = begin + _LENGTH
            length = int.from_bytes(kept[begin:body], "big")
            if not 0 < length <= self._most:
                raise BadFrame(f"a frame of {length} bytes; from 1 to {self._most} are allowed")
            if len(kept) - body < length:
                break
            begin = body + length
            with memoryview(kept) as view:
                found.append(bytes(view[body:begin]))
        del kept[:begin]
        return found
