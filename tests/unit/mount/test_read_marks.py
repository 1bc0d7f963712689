"""Marks of what a mount has read, as its pusher sees them."""

import math
import os

import pytest

from cachefs.block import block_key
from cachefs.mount.reads import read_records
from cachefs.mount.reads.read_records import ReadMarks

KEY = block_key(bytes(range(16)), 3)


def test_a_mark_is_seen_through_another_mapping_until_it_is_cleared() -> None:
    fd = read_records.create_read_marks()
    worker, pusher = ReadMarks(fd), ReadMarks(fd)
    os.close(fd)
    assert pusher.age(KEY) == math.inf
    worker.set(KEY)
    assert pusher.age(KEY) < 1
    assert pusher.age(block_key(bytes(range(16)), 4)) == math.inf
    pusher.clear(KEY)
    assert pusher.age(KEY) == math.inf


def test_a_mark_of_the_same_slot_replaces_another(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = ReadMarks(read_records.create_read_marks())
    same_slot = block_key(bytes(8) + bytes(range(8, 16)), 3)
    marks.set(KEY)
    marks.set(same_slot)
    assert marks.age(KEY) == math.inf
    assert marks.age(same_slot) < 1


def test_an_old_mark_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = ReadMarks(read_records.create_read_marks())
    now = [100.0]
    monkeypatch.setattr(read_records.time, "monotonic", lambda: now[0])
    marks.set(KEY)
    now[0] += 1.5
    assert marks.age(KEY) == 1.5
    now[0] += 1
    assert marks.age(KEY) == math.inf
