"""etcd's messages: what is written is read again, and no bytes do more than raise Malformed."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from cachefs_daemon.cluster import etcd_codec as codec
from cachefs_daemon.cluster.etcd_codec import KeyValue, Malformed, number, text
from hypothesis import given
from hypothesis import strategies as st

ANSWERS: list[Callable[[bytes], Any]] = [
    codec.range_answer, codec.txn_answer, codec.lease_answer, codec.watch_answer, codec.token_answer,
]  # fmt: skip
revisions = st.integers(1, 2**63 - 1)
key_values = st.builds(KeyValue, st.binary(max_size=40), st.binary(max_size=300), revisions)


def header(revision: int) -> bytes:
    """As etcd sends it, with ids that have all 64 bits."""
    return text(1, number(1, 2**64 - 5) + number(2, 2**63 + 1) + number(3, revision) + number(4, 7))


def key_value(each: KeyValue) -> bytes:
    return (
        text(1, each.key) + number(2, 1) + number(3, each.revision) + number(4, 1) + text(5, each.value) + number(6, 9)
    )


@given(st.integers(-(2**63), 2**64 - 1))
def test_numbers(value: int) -> None:
    ((index, read),) = codec.fields(number(15, value)) if value else ((15, 0),)
    assert (index, read) == (15, value % 2**64)


def test_numbers_as_protobuf_writes_them() -> None:
    assert number(1, 150) == bytes.fromhex("089601")  # the example of protobuf's page about encoding
    assert text(2, b"testing") == bytes.fromhex("120774657374696e67")
    assert number(1, -2) == bytes.fromhex("08feffffffffffffffff01")


@given(revisions, st.lists(key_values, max_size=5), st.integers(0, 10**6))
def test_a_range_is_read_as_it_was_sent(revision: int, found: list[KeyValue], count: int) -> None:
    unknown = bytes.fromhex("fd0601020304") + bytes.fromhex("f9060102030405060708") + text(99, b"new") + number(98, 1)
    sent = header(revision) + b"".join(text(2, key_value(each)) for each in found) + unknown + number(4, count)
    assert codec.range_answer(sent) == codec.RangeAnswer(revision, tuple(found), count)


@given(revisions, st.lists(st.tuples(st.booleans(), key_values), max_size=5), st.integers(0, 2**62), st.booleans())
def test_a_watch_is_read_as_it_was_sent(
    revision: int, changes: list[tuple[bool, KeyValue]], compacted: int, fragment: bool
) -> None:
    events = b"".join(text(11, number(1, gone) + text(2, key_value(each))) for gone, each in changes)
    sent = header(revision) + number(5, compacted) + text(6, b"because") + number(7, fragment) + events
    answer = codec.watch_answer(sent)
    assert answer == codec.WatchAnswer(revision, compacted > 0, compacted, "because", fragment, tuple(changes))


@given(revisions, st.booleans(), st.lists(key_values, max_size=2))
def test_a_transaction_is_read_as_it_was_sent(revision: int, done: bool, found: list[KeyValue]) -> None:
    there = text(3, text(1, header(revision) + b"".join(text(2, key_value(each)) for each in found)))
    sent = header(revision) + number(2, done) + there
    assert codec.txn_answer(sent) == codec.TxnAnswer(revision, done, tuple(found))


@given(st.integers(1, 2**63 - 1), st.integers(0, 100))
def test_a_lease_is_read_as_it_was_sent(lease: int, seconds: int) -> None:
    assert codec.lease_answer(header(3) + number(2, lease) + number(3, seconds)) == (lease, seconds)


@given(st.binary(max_size=200), st.sampled_from(ANSWERS))
def test_any_bytes_are_read_or_malformed(data: bytes, read: Callable[[bytes], Any]) -> None:
    with contextlib.suppress(Malformed):
        read(data)


@given(st.lists(key_values, max_size=3), st.integers(0, 400), st.integers(0, 255), st.sampled_from(ANSWERS))
def test_damaged_answers_are_read_or_malformed(
    found: list[KeyValue], at: int, byte: int, read: Callable[[bytes], Any]
) -> None:
    data = bytearray(header(5) + b"".join(text(2, key_value(each)) for each in found))
    data[at % len(data)] = byte
    with contextlib.suppress(Malformed):
        read(bytes(data))


@pytest.mark.parametrize("data", ["0a", "0aff", "08", "0b", "08" + "ff" * 10 + "01", "0d0102"])
def test_what_is_cut_off_is_malformed(data: str) -> None:
    with pytest.raises(Malformed):
        list(codec.fields(bytes.fromhex(data)))


def test_the_end_of_a_prefix() -> None:
    assert codec.end_of_prefix(b"/cachefs/") == b"/cachefs0"
