"""Frames of the fetch channel: whatever pieces the bytes come in, and whatever the other side sends."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.fetch_frames import (
    FetchRequestFrame,
    FetchResponseFrame,
    FrameSplitter,
    Hello,
    InvalidFrame,
    body_decoder,
    encode_frame,
)
from cachefs.messages import BlockRef, FetchedBlock, FetchRequest, Message

MOST = 1000
BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=5)


def framed(bodies: list[bytes]) -> bytes:
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


@settings(deadline=None)
@given(BODIES, st.data())
def test_frames_are_the_same_however_the_bytes_are_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = framed(bodies)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    frames = FrameSplitter(MOST)
    found = [
        body for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) for body in frames.split_frames(stream[a:b])
    ]
    assert found == bodies


def test_a_frame_may_be_cut_at_every_byte() -> None:
    stream = framed([b"one", b"two", b"x" * MOST])
    for cut in range(len(stream)):
        frames = FrameSplitter(MOST)
        assert frames.split_frames(stream[:cut]) + frames.split_frames(memoryview(stream)[cut:]) == [
            b"one",
            b"two",
            b"x" * MOST,
        ]
    single = FrameSplitter(MOST)
    assert [body for byte in stream for body in single.split_frames(bytes([byte]))] == [b"one", b"two", b"x" * MOST]


@settings(deadline=None)
@given(BODIES, st.one_of(st.just(0), st.integers(MOST + 1, (1 << 32) - 1)), st.binary(max_size=20))
def test_a_length_that_is_not_allowed_is_not_waited_for(bodies: list[bytes], length: int, rest: bytes) -> None:
    with pytest.raises(InvalidFrame, match=f"a frame of {length} bytes"):
        FrameSplitter(MOST).split_frames(framed(bodies) + length.to_bytes(4, "big") + rest)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=20))
def test_garbage_is_refused_or_waited_for_and_takes_no_more_room_than_a_frame(pieces: list[bytes]) -> None:
    frames = FrameSplitter(MOST)
    try:
        for piece in pieces:
            frames.split_frames(piece)
            assert len(frames._incomplete) <= MOST + 4
    except InvalidFrame:
        pass


@pytest.mark.parametrize(
    "message",
    [
        Hello(version=3, kind="Busy", refusal="no"),
        FetchRequestFrame(
            number=7,
            request=FetchRequest(
                blocks=[BlockRef("s", 1, 2, b"bad", 3, 4, is_tier_slow=True)], ahead=True, deadline=0.5
            ),
        ),
        FetchResponseFrame(
            number=1 << 60,
            blocks=[FetchedBlock(b"", 5, "why", memoryview(b"data"), b"sums")],
            kind="NotFound",
            message="x",
        ),
    ],
)
def test_messages_come_through_as_they_are(message: Message) -> None:
    [body] = FrameSplitter(MOST).split_frames(encode_frame(message))
    assert body_decoder(type(message))(body) == message


def test_a_whole_frame_is_not_copied() -> None:
    data = bytes(encode_frame(FetchResponseFrame(number=1, blocks=[FetchedBlock(b"", data=memoryview(bytes(1000)))])))
    [body] = FrameSplitter(1 << 20).split_frames(data)
    assert isinstance(body, memoryview)
    assert body.obj is data
    [block] = body_decoder(FetchResponseFrame)(body).blocks
    assert block.data.obj is data


@settings(deadline=None)
@given(st.sampled_from([Hello, FetchRequestFrame, FetchResponseFrame]), st.binary(max_size=60))
def test_what_is_no_message_is_a_bad_frame(kind: type[Message], body: bytes) -> None:
    with contextlib.suppress(InvalidFrame):
        body_decoder(kind)(body)


@pytest.mark.parametrize("value", [b"\x91" * 200_000 + b"\1", b"\xa1\x80"])
def test_values_that_no_message_has_are_bad_frames(value: bytes) -> None:
    with pytest.raises(InvalidFrame, match="not a valid Hello"):
        body_decoder(Hello)(b"\x82\xa7version\1\xa4kind" + value)
    if value[0] == 0x91:
        with pytest.raises(InvalidFrame, match="not a valid Hello"):
            body_decoder(Hello)(b"\x82\xa7version\1\xa5later" + value)
