"""Parts of blocks that are kept until the rest has come."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cachefs_daemon.fetch.partial_blocks import MAX_PARTS_PER_BLOCK, PartialBlocks, gaps

KEY, OTHER = b"k" * 16, b"o" * 16


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), max_size=6), st.integers(100, 120))
def test_parts_and_gaps_are_the_whole_block(wanted: Sequence[tuple[int, int]], length: int) -> None:
    dropped: list[int] = []
    held = PartialBlocks(1000, dropped.append)
    block = bytes(number % 251 for number in range(length))
    for begin, size in wanted:
        held.add_part(KEY, begin, block[begin : begin + size])
    parts = held.pop_parts(KEY)
    assert len(parts) <= MAX_PARTS_PER_BLOCK
    pieces = [(part.begin, part.data) for part in parts]
    pieces += [(begin, block[begin:end]) for begin, end in gaps(parts, length)]
    assert b"".join(data for _, data in sorted(pieces)) == block
    given_in = sum(len(block[begin : begin + size]) for begin, size in wanted)
    assert sum(dropped) + sum(len(part.data) for part in parts) == given_in
    assert not held.parts_of(KEY)


def test_the_oldest_go_where_there_are_too_many_bytes() -> None:
    dropped: list[int] = []
    held = PartialBlocks(25, dropped.append)
    held.add_part(KEY, 0, bytes(10))
    held.add_part(OTHER, 0, bytes(10))
    held.add_part(OTHER, 20, bytes(10))
    assert not held.parts_of(KEY)
    assert [part.begin for part in held.parts_of(OTHER)] == [0, 20]
    held.drop_parts(OTHER)
    assert dropped == [10, 20]
    assert not held.parts_of(OTHER)


def test_a_part_is_a_copy() -> None:
    """Its memory may be a part of a larger one, which a connection uses again."""
    held, data = PartialBlocks(100, lambda _: None), bytearray(b"abc")
    held.add_part(KEY, 0, memoryview(data))
    data[0] = 0
    [part] = held.pop_parts(KEY)
    assert part.data == b"abc"
