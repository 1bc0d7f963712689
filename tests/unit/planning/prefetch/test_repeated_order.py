"""The order of an earlier pass."""

from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.prefetch.repeated_order import FileBlock, RepeatedOrder

blocks = st.tuples(st.integers(0, 2**38), st.integers(0, 2**20))


@given(st.lists(blocks, max_size=3000))
def test_what_was_read_last_is_followed_by_nothing_and_all_else_by_what_came_next(reads: list[FileBlock]) -> None:
    log = RepeatedOrder(1024)
    for entry, number in reads:
        log.append_read(entry, number)
    kept = reads[-1024:]
    assert log.reads_after(len(reads) - len(kept) - 1, 5000) == kept
    for entry, number in reads:
        place = log.last_position(entry, number)
        if place is not None:  # else another block with its hash was read later, or it is forgotten
            assert reads[place] == (entry, number)
            assert log.reads_after(place, 3) == reads[place + 1 : place + 4]


def test_nearly_all_are_found_again_and_the_oldest_are_forgotten() -> None:
    log = RepeatedOrder(1 << 14)
    for entry in range(1 << 14):
        log.append_read(entry * 7, 0)
    found = sum(log.last_position(entry * 7, 0) == entry for entry in range(1 << 14))
    assert found > 0.5 * (1 << 14)
    assert log.last_position(1, 0) is None
    for entry in range(100):
        log.append_read(10**9 + entry, 3)
    assert log.last_position(0, 0) is None
    assert log.reads_after(0, 2) == [(700, 0), (707, 0)], "what is forgotten is passed over"
