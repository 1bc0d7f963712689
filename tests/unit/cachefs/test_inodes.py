"""Inode numbers: there and back, and never two meanings of one."""

import numpy
from hypothesis import given
from hypothesis import strategies as st

from cachefs.inodes import ROOT, SLOTS, inode_of, next_slot, slot_and_entry, slot_of, slots_and_entries

SLOT = st.integers(1, SLOTS)
ENTRY = st.integers(0, (1 << 40) - 1)


@given(st.lists(st.tuples(SLOT, ENTRY), max_size=5))
def test_slot_and_entry_come_back(pairs: list[tuple[int, int]]) -> None:
    inodes = [inode_of(slot, entry) for slot, entry in pairs]
    assert [slot_and_entry(inode) for inode in inodes] == pairs
    assert all(ROOT < inode < 1 << 63 for inode in inodes)
    slots, entries = slots_and_entries(numpy.array(inodes, numpy.int64))
    assert list(zip(slots.tolist(), entries.tolist(), strict=True)) == pairs


@given(st.text("0123456789abcdef", min_size=32, max_size=32))
def test_a_snapshot_has_a_slot(snapshot: str) -> None:
    assert 1 <= slot_of(snapshot) <= SLOTS


def test_after_the_last_slot_comes_the_first() -> None:
    assert [next_slot(slot) for slot in (1, SLOTS - 1, SLOTS)] == [2, SLOTS, 1]
