"""The few messages of etcd's API that membership needs, in protobuf's wire format.

Field numbers are those of etcd's rpc.proto and kv.proto (API 3.x). A message is a sequence of fields: a number in
groups of seven bits (varint) gives the field and its type, and a varint, or a length and bytes, follows. Unknown fields
are skipped, so that a newer etcd may send more.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5
_WRAP: Final = 1 << 64
# Sort order and sort target of a range; target of a comparison.
_DESCENDING: Final = 2
_BY_MODIFICATION: Final = 3
_MODIFICATION: Final = 2
_DELETE: Final = 1


class MalformedMessage(ValueError):
    """Bytes that are not a valid message."""


# --- the wire format --------------------------------------------------------------------------------------------------


def encode_varint(value: int) -> bytes:
    """Encode a number from -2**63 to 2**64 - 1."""
    value %= _WRAP
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_number(index: int, value: int) -> bytes:
    """Encode a numeric field. A 0 is left out, which means the same."""
    return encode_varint(index << 3 | _VARINT) + encode_varint(value) if value else b""


def encode_bytes(index: int, value: bytes) -> bytes:
    """Encode a field of bytes, or a nested message."""
    return encode_varint(index << 3 | _BYTES) + encode_varint(len(value)) + value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise MalformedMessage("a number that ends in the middle")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value % _WRAP, at
    raise MalformedMessage("a number of more than 64 bits")


def decode_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field that is a varint or bytes. Raises MalformedMessage."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, at = _read_varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise MalformedMessage(f"a field of unknown type {kind}")
        if length > len(data) - at:
            raise MalformedMessage("a field that is longer than its message")
        if kind == _BYTES:
            yield key >> 3, data[at : at + length]
        at += length


class _Fields:
    """The fields of a message by number; of repeated ones, the last."""

    def __init__(self, data: bytes) -> None:
        self._values = dict(decode_fields(data))

    def number(self, index: int) -> int:
        """Return a signed number (int64); 0 for a missing field."""
        value = self._values.get(index, 0)
        if not isinstance(value, int):
            raise MalformedMessage(f"field {index} is not a number")
        return value - _WRAP if value >= _WRAP >> 1 else value

    def bytes(self, index: int) -> bytes:
        value = self._values.get(index, b"")
        if not isinstance(value, bytes):
            raise MalformedMessage(f"field {index} is not a text")
        return value

    def text(self, index: int) -> str:
        return self.bytes(index).decode("utf-8", "replace")


def _nested_messages(data: bytes, index: int) -> Iterator[bytes]:
    """Yield each nested message of a repeated field."""
    for found, value in decode_fields(data):
        if found == index:
            if not isinstance(value, bytes):
                raise MalformedMessage(f"field {index} is not a message")
            yield value


# --- requests ---------------------------------------------------------------------------------------------------------


def end_of_prefix(prefix: bytes) -> bytes:
    """Return the first key after all that begin with *prefix*, which does not end in 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def range_request(key: bytes, *, prefix: bool = False, newest: bool = False) -> bytes:
    """Read a key or a prefix. newest: only the last changed key, without its value; the count is of all keys."""
    request = encode_bytes(1, key) + (encode_bytes(2, end_of_prefix(key)) if prefix else b"")
    if newest:
        request += (
            encode_number(3, 1)
            + encode_number(5, _DESCENDING)
            + encode_number(6, _BY_MODIFICATION)
            + encode_number(8, 1)
        )
    return request


def put_if_request(key: bytes, value: bytes, lease: int, revision: int) -> bytes:
    """Put *value* if the key was last changed at *revision* (0: does not exist). Else return what is there."""
    compare = (
        encode_number(2, _MODIFICATION)
        + encode_bytes(3, key)
        + encode_varint(6 << 3 | _VARINT)
        + encode_varint(revision)
    )
    put = encode_bytes(1, key) + encode_bytes(2, value) + encode_number(3, lease)
    return (
        encode_bytes(1, compare)
        + encode_bytes(2, encode_bytes(2, put))
        + encode_bytes(3, encode_bytes(1, range_request(key)))
    )


def grant_request(seconds: int) -> bytes:
    """Request a new lease."""
    return encode_number(1, seconds)


def lease_request(lease: int) -> bytes:
    """Keep a lease alive, or revoke it."""
    return encode_number(1, lease)


def watch_request(prefix: bytes, revision: int) -> bytes:
    """Watch all changes below a prefix from a revision on."""
    return encode_bytes(
        1, encode_bytes(1, prefix) + encode_bytes(2, end_of_prefix(prefix)) + encode_number(3, revision)
    )


def authenticate_request(user: str, password: str) -> bytes:
    """Request a token for a user."""
    return encode_bytes(1, user.encode()) + encode_bytes(2, password.encode())


# --- responses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key, its value, and the revision of its last change."""

    key: bytes
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class RangeResponse:
    """The content of a range."""

    # Revision of the whole store.
    revision: int
    found: tuple[KeyValue, ...]
    count: int


@dataclass(frozen=True, slots=True)
class TxnResponse:
    """The outcome of `put_if_request`."""

    revision: int
    is_done: bool
    # The existing key, if *value* was not put.
    found: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, slots=True)
class WatchResponse:
    """Some changes, or the end of a watch."""

    revision: int
    # The watch has ended, as its revision is compacted (*compacted* is the oldest available one), or for another
    # reason.
    has_ended: bool
    compacted: int
    reason: str
    # More changes of the same revision follow.
    fragment: bool
    puts_and_deletes: tuple[tuple[bool, KeyValue], ...] = field(default=())  # with True for a deletion


def _header_revision(response: _Fields) -> int:
    return _Fields(response.bytes(1)).number(3)


def _key_value(data: bytes) -> KeyValue:
    parts = _Fields(data)
    return KeyValue(parts.bytes(1), parts.bytes(5), parts.number(3))


def decode_range_response(data: bytes) -> RangeResponse:
    """Decode a message. Raises MalformedMessage, as all decoders do."""
    parts = _Fields(data)
    return RangeResponse(_header_revision(parts), tuple(map(_key_value, _nested_messages(data, 2))), parts.number(4))


def decode_txn_response(data: bytes) -> TxnResponse:
    parts = _Fields(data)
    found: list[KeyValue] = []
    for response in _nested_messages(data, 3):
        for each in _nested_messages(response, 1):
            found.extend(decode_range_response(each).found)
    return TxnResponse(_header_revision(parts), bool(parts.number(2)), tuple(found))


def decode_lease_response(data: bytes) -> tuple[int, int]:
    """Return id and remaining seconds of a lease that was granted or kept alive. 0 seconds: there is no such lease."""
    parts = _Fields(data)
    return parts.number(2), parts.number(3)


def decode_watch_response(data: bytes) -> WatchResponse:
    parts = _Fields(data)
    changes = []
    for event in _nested_messages(data, 11):
        change = _Fields(event)
        changes.append((change.number(1) == _DELETE, _key_value(change.bytes(2))))
    return WatchResponse(
        _header_revision(parts),
        bool(parts.number(4)) or parts.number(5) > 0,
        parts.number(5),
        parts.text(6),
        bool(parts.number(7)),
        tuple(changes),
    )


def decode_token_response(data: bytes) -> str:
    return _Fields(data).text(2)
