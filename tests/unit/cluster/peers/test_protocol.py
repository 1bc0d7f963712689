"""Questions and answers between nodes: what is said is understood, in whatever pieces it comes, and nothing else is."""

import contextlib
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.block import PIECE_SIZE, piece_checksums
from cachefs_cluster.membership.handshake import Greeting
from cachefs_cluster.peers import protocol
from cachefs_cluster.peers.protocol import (
    BlocksRequest,
    BlockStatus,
    InvalidRequest,
    InvalidResponse,
    PeerRefusal,
    ReceivedBlock,
    RequestedBlock,
    ResponseItem,
    ResponseParser,
    encode_blocks_request,
    parse_blocks_request,
    parse_request_head,
)

ME, OTHER, RUN = "a" * 16, "b" * 16, "c" * 16
KEY = bytes(range(20))
GREETING = Greeting("cluster-1", ME, OTHER, RUN, 12)


def asked(length: int = 1000, **fields: object) -> RequestedBlock:
    return msgspec.structs.replace(RequestedBlock("0" * 32, 5, 0, KEY, length), **fields)


def answer_of(items: Sequence[tuple[int, int | bytes]]) -> bytes:
    """An answer with blocks (by number, their bytes), and numbers for which there is none (and what is said)."""
    parts = [protocol.response_head(OTHER, RUN, 12)]
    for at, content in items:
        if isinstance(content, bytes):
            parts += [protocol.block_start(at, 0, len(content), piece_checksums(KEY, content)), content]
            parts += [
                protocol.block_end(stayed=at % 2 == 0),
                protocol.status_chunk(protocol.NO_BLOCK, protocol.KEEPALIVE),
            ]
        else:
            parts.append(protocol.status_chunk(at, content, "why not" if content == protocol.FETCH_FAILED else ""))
    return b"".join([*parts, protocol.last_chunk(3)])


def feed(parser: ResponseParser, data: bytes, steps: Sequence[int]) -> list[ResponseItem]:
    """As a connection does it, with so many bytes at a time. The room is no larger than an answer may be."""
    room = memoryview(bytearray(len(data) + 64))
    filled, at, found = 0, 0, list[ResponseItem]()
    for step in [*steps, len(data)]:
        part = data[at : at + step]
        at += len(part)
        room[filled : filled + len(part)] = part
        filled += len(part)
        for item in parser.parse(room[:filled]):
            found.append(item._replace(data=memoryview(bytes(item.data))) if isinstance(item, ReceivedBlock) else item)
        if not parser.is_done:
            filled = parser.rewind(filled)
    return found


def _check_line(error: Exception) -> None:
    """It is one line, fit for a log."""
    assert "\n" not in str(error)


def test_question_is_understood() -> None:
    question = BlocksRequest(
        [asked(), asked(2000, check=True), asked(await_snapshot=False)], may_fetch=True, may_delegate=True
    )
    text = encode_blocks_request(question, GREETING, 2.5)
    head, _, body = text.partition(b"\r\n\r\n")
    parsed = parse_request_head(head)
    assert (parsed.method, parsed.target, parsed.seconds) == ("POST", "/blocks", 2.5)
    assert parsed.length == len(body)
    assert parsed.greeting == GREETING
    assert parse_blocks_request(body) == question


class _AskedOfEarlierReleases(msgspec.Struct, frozen=True, array_like=True):
    """A block that is asked for, as nodes of earlier releases have it."""

    snapshot: str
    entry: int
    number: int
    key: bytes
    length: int
    check: bool = False


def test_question_of_an_earlier_release_is_understood_and_so_is_this_one_there() -> None:
    earlier = _AskedOfEarlierReleases("0" * 32, 5, 0, KEY, 1000, check=True)
    assert parse_blocks_request(msgspec.msgpack.encode([[earlier], True])) == BlocksRequest(
        [asked(check=True)], may_fetch=True
    )
    encoded = msgspec.msgpack.encode(asked(check=True, await_snapshot=False))
    assert msgspec.msgpack.decode(encoded, type=_AskedOfEarlierReleases) == earlier


@pytest.mark.parametrize(
    "block",
    [
        asked(0), asked(-1), asked(protocol.MAX_DATA + 1), asked(key=b"short"), asked(key=bytes(21)),
        asked(snapshot="x" * 65), asked(entry=-1), asked(number=1 << 32),
    ],
)  # fmt: skip
def test_block_that_cannot_be_is_refused(block: RequestedBlock) -> None:
    body = msgspec.msgpack.encode(BlocksRequest([block]))
    with pytest.raises(InvalidRequest):
        parse_blocks_request(body)


def test_question_has_bounds() -> None:
    for blocks in ([], [asked(1)] * (protocol.MAX_BLOCKS + 1), [asked(protocol.MAX_DATA // 2 + 1)] * 2):
        with pytest.raises(InvalidRequest):
            parse_blocks_request(msgspec.msgpack.encode(BlocksRequest(blocks)))


def test_largest_question_fits() -> None:
    block = asked(
        protocol.MAX_DATA // protocol.MAX_BLOCKS, snapshot="f" * 64, entry=(1 << 48) - 1, number=(1 << 32) - 1
    )
    head, _, body = encode_blocks_request(BlocksRequest([block] * protocol.MAX_BLOCKS), GREETING, 1).partition(
        b"\r\n\r\n"
    )
    assert parse_request_head(head).length <= protocol.MAX_BODY
    assert len(parse_blocks_request(body).blocks) == protocol.MAX_BLOCKS


@given(st.binary(max_size=300))
def test_any_bytes_are_a_question_or_are_refused(data: bytes) -> None:
    for parse in (parse_blocks_request, parse_request_head):
        try:
            parse(data)
        except InvalidRequest as error:
            _check_line(error)


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=4))
def test_changed_request_is_understood_or_refused(at: int, change: bytes) -> None:
    text = bytearray(encode_blocks_request(BlocksRequest([asked()] * 3), GREETING, 1))
    at %= len(text)
    text[at : at + len(change)] = change
    head, _, body = bytes(text).partition(b"\r\n\r\n")
    try:
        assert parse_request_head(head).length <= protocol.MAX_BODY
        assert len(parse_blocks_request(body).blocks) <= protocol.MAX_BLOCKS
    except InvalidRequest:
        pass


CONTENTS = st.lists(
    st.one_of(
        st.sampled_from(
            [protocol.BLOCK_NOT_FOUND, protocol.FETCH_YOURSELF, protocol.OVERLOADED, protocol.FETCH_FAILED]
        ),
        st.integers(1, 3 * PIECE_SIZE).map(lambda size: random.Random(size).randbytes(size)),
    ),
    min_size=1,
    max_size=5,
)


@given(CONTENTS, st.lists(st.integers(1, 100_000), max_size=30), st.randoms())
def test_answer_is_understood_in_any_pieces(
    contents: list[int | bytes], steps: list[int], chance: random.Random
) -> None:
    lengths = [len(one) if isinstance(one, bytes) else 77 for one in contents]
    items = list(enumerate(contents))
    chance.shuffle(items)
    parser = ResponseParser(lengths)
    found = feed(parser, answer_of(items), steps)
    assert parser.is_done
    assert parser.retransmitted == 3
    assert parser.sender == protocol.RespondingNode(OTHER, RUN, 12)
    assert [item.at for item in found if not isinstance(item, PeerRefusal)] == [at for at, _ in items]
    for item in found:
        content = contents[item.at] if not isinstance(item, PeerRefusal) else None
        if isinstance(item, ReceivedBlock):
            assert bytes(item.data) == content
            assert item.checksums == piece_checksums(KEY, item.data)
            assert item.stayed is (item.at % 2 == 0)
        else:
            assert isinstance(item, BlockStatus)
            assert item.status == content
            assert item.text == ("why not" if content == protocol.FETCH_FAILED else "")


@given(st.integers(0, 10_000), st.binary(max_size=3), st.integers(0, 3), st.lists(st.integers(1, 400), max_size=9))
def test_changed_answer_is_understood_or_refused(at: int, change: bytes, cut: int, steps: list[int]) -> None:
    """A hostile peer can do nothing but be refused, or give wrong bytes, which checksums show."""
    lengths = [1000, 77, 500]
    data = bytearray(answer_of([(1, protocol.FETCH_FAILED), (0, bytes(1000)), (2, bytes(500))]))
    at %= len(data)
    data[at : at + cut] = change
    parser = ResponseParser(lengths)
    try:
        found = feed(parser, bytes(data), steps)
    except InvalidResponse as error:
        _check_line(error)
        return
    blocks = [item for item in found if isinstance(item, ReceivedBlock)]
    assert all(len(block.data) == lengths[block.at] for block in blocks)
    assert len({item.at for item in found if not isinstance(item, PeerRefusal)}) == len(found) or not parser.is_done


@given(st.binary(max_size=2000))
def test_any_bytes_are_no_answer(data: bytes) -> None:
    parser = ResponseParser([10, 20])
    with contextlib.suppress(InvalidResponse):
        assert feed(parser, data, [7, 100]) == []
    assert not parser.is_done


def test_thousand_beats_take_no_room() -> None:
    data = answer_of([(0, b"x" * 1000)])
    beats = protocol.status_chunk(protocol.NO_BLOCK, protocol.KEEPALIVE) * 1000
    head = len(protocol.response_head(OTHER, RUN, 12))
    parser = ResponseParser([1000])
    room, filled = memoryview(bytearray(protocol.max_response_bytes([1000]))), 0
    stream = data[:head] + beats + data[head:]
    for at in range(0, len(stream), 333):
        part = stream[at : at + 333]
        room[filled : filled + len(part)] = part
        filled += len(part)
        list(parser.parse(room[:filled]))
        filled = parser.rewind(filled) if not parser.is_done else filled
    assert parser.is_done


def test_refusal_says_why() -> None:
    parser = ResponseParser([10])
    [item] = feed(
        parser, protocol.refusal_response(409, (OTHER, RUN, 13, ""), "ring \x1b epoch 12 is\nold", "old-epoch"), [20, 9]
    )
    assert item == PeerRefusal(409, "old-epoch", "ring ? epoch 12 is old")
    assert parser.sender == protocol.RespondingNode(OTHER, RUN, 13)
    assert parser.is_last
