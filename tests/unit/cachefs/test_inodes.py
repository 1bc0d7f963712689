"""Inode numbers: there and back, and never two meanings of one."""

import logging
import os
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs import inodes as inode_numbers
from cachefs.inodes import (
    LEGACY_ATTRIBUTE,
    ROOT,
    SLOTS,
    inode_of,
    next_slot,
    read_mounted_snapshot,
    slot_and_entry,
    slot_of,
    slots_and_entries,
)

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


def test_a_mount_of_an_older_version_tells_its_snapshot_by_an_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(OSError, match="No data available"):
        read_mounted_snapshot(tmp_path)
    os.setxattr(tmp_path, LEGACY_ATTRIBUTE, b"ab" * 16)
    with pytest.raises(FileNotFoundError, match="empty"):
        read_mounted_snapshot(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(inode_numbers, "slot_and_entry", lambda inode: (inode, 0))
    assert [read_mounted_snapshot(tmp_path) for _ in range(2)] == [((tmp_path / "file").stat().st_ino, "ab" * 16)] * 2
    assert [str(tmp_path) in line for line in caplog.messages] == [True], "once"
