"""etcd's messages: what is written is read again, and no bytes do more than raise MalformedMessage."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs_cluster.membership import etcd_codec as codec
from cachefs_cluster.membership.etcd_codec import KeyValue, MalformedMessage, encode_bytes, encode_number

ANSWERS: list[Callable[[bytes], Any]] = [
    codec.decode_range_response, codec.decode_txn_response, codec.decode_lease_response,
    codec.decode_watch_response, codec.decode_token_response,
]  # fmt: skip
revisions = st.integers(1, 2**63 - 1)
key_values = st.builds(KeyValue, st.binary(max_size=40), st.binary(max_size=300), revisions)


def header(revision: int) -> bytes:
    """As etcd sends it, with ids that have all 64 bits."""
    return encode_bytes(
        1, encode_number(1, 2**64 - 5) + encode_number(2, 2**63 + 1) + encode_number(3, revision) + encode_number(4, 7)
    )


def key_value(each: KeyValue) -> bytes:
    return (
        encode_bytes(1, each.key)
        + encode_number(2, 1)
        + encode_number(3, each.revision)
        + encode_number(4, 1)
        + encode_bytes(5, each.value)
        + encode_number(6, 9)
    )


@given(st.integers(-(2**63), 2**64 - 1))
def test_numbers(value: int) -> None:
    ((index, read),) = codec.decode_fields(encode_number(15, value)) if value else ((15, 0),)
    assert (index, read) == (15, value % 2**64)


def test_numbers_as_protobuf_writes_them() -> None:
    assert encode_number(1, 150) == bytes.fromhex("089601")  # the example of protobuf's page about encoding
    assert encode_bytes(2, b"testing") == bytes.fromhex("120774657374696e67")
    assert encode_number(1, -2) == bytes.fromhex("08feffffffffffffffff01")


@given(revisions, st.lists(key_values, max_size=5), st.integers(0, 10**6))
def test_a_range_is_read_as_it_was_sent(revision: int, found: list[KeyValue], count: int) -> None:
    unknown = (
        bytes.fromhex("fd0601020304")
        + bytes.fromhex("f9060102030405060708")
        + encode_bytes(99, b"new")
        + encode_number(98, 1)
    )
    sent = (
        header(revision)
        + b"".join(encode_bytes(2, key_value(each)) for each in found)
        + unknown
        + encode_number(4, count)
    )
    assert codec.decode_range_response(sent) == codec.RangeResponse(revision, tuple(found), count)


@given(revisions, st.lists(st.tuples(st.booleans(), key_values), max_size=5), st.integers(0, 2**62), st.booleans())
def test_a_watch_is_read_as_it_was_sent(
    revision: int, changes: list[tuple[bool, KeyValue]], compacted: int, fragment: bool
) -> None:
    events = b"".join(
        encode_bytes(11, encode_number(1, gone) + encode_bytes(2, key_value(each))) for gone, each in changes
    )
    sent = (
        header(revision)
        + encode_number(5, compacted)
        + encode_bytes(6, b"because")
        + encode_number(7, fragment)
        + events
    )
    answer = codec.decode_watch_response(sent)
    assert answer == codec.WatchResponse(revision, compacted > 0, compacted, "because", fragment, tuple(changes))


@given(revisions, st.booleans(), st.lists(key_values, max_size=2))
def test_a_transaction_is_read_as_it_was_sent(revision: int, done: bool, found: list[KeyValue]) -> None:
    there = encode_bytes(
        3, encode_bytes(1, header(revision) + b"".join(encode_bytes(2, key_value(each)) for each in found))
    )
    sent = header(revision) + encode_number(2, done) + there
    assert codec.decode_txn_response(sent) == codec.TxnResponse(revision, done, tuple(found))


@given(st.integers(1, 2**63 - 1), st.integers(0, 100))
def test_a_lease_is_read_as_it_was_sent(lease: int, seconds: int) -> None:
    assert codec.decode_lease_response(header(3) + encode_number(2, lease) + encode_number(3, seconds)) == (
        lease,
        seconds,
    )


@given(st.binary(max_size=200), st.sampled_from(ANSWERS))
def test_any_bytes_are_read_or_malformed(data: bytes, read: Callable[[bytes], Any]) -> None:
    with contextlib.suppress(MalformedMessage):
        read(data)


@given(st.lists(key_values, max_size=3), st.integers(0, 400), st.integers(0, 255), st.sampled_from(ANSWERS))
def test_damaged_answers_are_read_or_malformed(
    found: list[KeyValue], at: int, byte: int, read: Callable[[bytes], Any]
) -> None:
    data = bytearray(header(5) + b"".join(encode_bytes(2, key_value(each)) for each in found))
    data[at % len(data)] = byte
    with contextlib.suppress(MalformedMessage):
        read(bytes(data))


@pytest.mark.parametrize("data", ["0a", "0aff", "08", "0b", "08" + "ff" * 10 + "01", "0d0102"])
def test_what_is_cut_off_is_malformed(data: str) -> None:
    with pytest.raises(MalformedMessage):
        list(codec.decode_fields(bytes.fromhex(data)))


def test_the_end_of_a_prefix() -> None:
    assert codec.end_of_prefix(b"/cachefs/") == b"/cachefs0"
