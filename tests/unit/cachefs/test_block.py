"""Block keys, lengths, locations and checksums."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.block import (
    KEY_SIZE,
    PIECE_SIZE,
    BlockLocation,
    block_count,
    block_key,
    block_length,
    block_number,
    content_id,
    is_sealed,
    piece_checksums,
    pieces_match,
    seal_location,
)

CONTENT = content_id(b"s3:aws:bucket/key", b"etag", 10, 4 << 20)


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 30))
def test_blocks_cover_a_file_exactly(size: int, block_size: int) -> None:
    count = block_count(size, block_size)
    if count == 0:
        assert size == 0
        return
    last = block_length(size, block_size, count - 1)
    assert 0 < last <= block_size
    assert (count - 1) * block_size + last == size


@given(st.integers(0, (1 << 32) - 2))
def test_keys_of_a_content_are_in_block_order(number: int) -> None:
    key, following = block_key(CONTENT, number), block_key(CONTENT, number + 1)
    assert key < following
    assert len(key) == KEY_SIZE
    assert block_number(key) == number


def test_content_id_tells_every_part_apart() -> None:
    ids = {
        content_id(b"ab", b"c", 1, 2),
        content_id(b"a", b"bc", 1, 2),
        content_id(b"ab", b"d", 1, 2),
        content_id(b"ab", b"c", 2, 2),
        content_id(b"ab", b"c", 1, 3),
    }
    assert len(ids) == 5


@given(st.integers(0, 1), st.integers(0, 2**32 - 1), st.integers(0, 2**63), st.binary(min_size=1, max_size=300))
def test_location_survives_packing(tier: int, segment: int, offset: int, data: bytes) -> None:
    checksums = piece_checksums(block_key(CONTENT, 0), data)
    location = BlockLocation(tier, segment, offset, len(data), checksums)
    assert BlockLocation.unpack(location.pack()) == location


@given(st.binary(max_size=60))
def test_garbage_is_no_location(record: bytes) -> None:
    try:
        location = BlockLocation.unpack(record)
    except ValueError:
        return
    assert location.pack()[:1] == record[:1]
    assert len(location.checksums) == 8 * -(-location.length // PIECE_SIZE)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_flipped_bit_of_an_index_entry_breaks_its_seal(content: bytes, data: st.DataObject) -> None:
    key = block_key(CONTENT, 3)
    record = seal_location(key, BlockLocation(1, 2, 4096, len(content), piece_checksums(key, content)))
    assert is_sealed(key, record)
    assert BlockLocation.unpack(record) == BlockLocation(1, 2, 4096, len(content), piece_checksums(key, content))
    entry = bytearray(key + record)
    entry[data.draw(st.integers(0, len(entry) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not is_sealed(bytes(entry[: len(key)]), bytes(entry[len(key) :]))


@given(st.binary(max_size=4))
def test_a_record_cut_short_is_not_sealed(record: bytes) -> None:
    assert not is_sealed(block_key(CONTENT, 0), record)


@given(st.integers(1, 3 * PIECE_SIZE), st.data())
def test_one_flipped_bit_is_found_in_its_piece_only(length: int, data: st.DataObject) -> None:
    key = block_key(CONTENT, 7)
    content = bytearray(length)
    checksums = piece_checksums(key, content)
    position = data.draw(st.integers(0, length - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    for piece in range(-(-length // PIECE_SIZE)):
        part = memoryview(content)[piece * PIECE_SIZE : (piece + 1) * PIECE_SIZE]
        assert pieces_match(key, checksums, piece, part) == (position // PIECE_SIZE != piece)


def test_bytes_of_another_block_do_not_match() -> None:
    data = memoryview(b"x" * 1000)
    checksums = piece_checksums(block_key(CONTENT, 1), data)
    assert pieces_match(block_key(CONTENT, 1), checksums, 0, data)
    assert not pieces_match(block_key(CONTENT, 2), checksums, 0, data)


@pytest.mark.parametrize("swapped", [(0, 1), (1, 0)])
def test_pieces_in_the_wrong_place_do_not_match(swapped: tuple[int, int]) -> None:
    key = block_key(CONTENT, 0)
    same = bytes(2 * PIECE_SIZE)
    checksums = piece_checksums(key, same)
    wrong = checksums[8:] + checksums[:8]
    assert not pieces_match(key, wrong, swapped[0], memoryview(same)[:PIECE_SIZE])
