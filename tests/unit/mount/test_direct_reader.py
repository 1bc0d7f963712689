"""Reads past the page cache: the same bytes as SegmentReader's, or none, and nothing left behind."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.block import PIECE_SIZE, SSD, BlockLocation, block_key, content_id, piece_checksums
from cachefs.mount.push.blocks import DirectReader, aligned_buffer
from cachefs.segment import segment_path
from cachefs_bench.push_paced import resident_bytes

KEY = block_key(content_id(b"file:/x", b"v", 1, 1), 0)
DATA = bytes(range(256)) * 1200


@pytest.fixture
def disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)


def written(directory: Path, offset: int) -> BlockLocation:
    with segment_path(directory, 1).open("wb") as file:
        file.write(bytes(offset) + DATA)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return BlockLocation(SSD, 1, offset, len(DATA), piece_checksums(KEY, DATA))


@given(st.integers(0, 9000), st.integers(0, len(DATA) - 1), st.integers(1, len(DATA)))
def test_any_part_of_a_block_wherever_it_lies(offset: int, start: int, size: int) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        reader = DirectReader({SSD: Path(directory)})
        found = reader.read(KEY, written(Path(directory), offset), start, size, aligned_buffer(size))
        reader.close()
        assert found is not None
        assert bytes(found) == DATA[start : start + size]


def test_no_second_copy_stays_behind(disk: Path) -> None:
    location = written(disk, 123)
    assert DirectReader({SSD: disk}).read(KEY, location, 0, len(DATA), aligned_buffer(len(DATA))) is not None
    assert resident_bytes([segment_path(disk, 1)]) == 0


def test_a_file_system_without_direct_reads(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads here")
        return really(path, flags)

    location = written(disk, 123)
    monkeypatch.setattr(os, "open", refuse)
    found = DirectReader({SSD: disk}).read(KEY, location, 0, len(DATA), aligned_buffer(len(DATA)))
    monkeypatch.undo()
    assert found is not None
    assert bytes(found) == DATA
    assert resident_bytes([segment_path(disk, 1)]) == 0


def test_what_is_not_right_is_none(disk: Path) -> None:
    location = written(disk, 4096)
    reader = DirectReader({SSD: disk})
    buffer = aligned_buffer(len(DATA))
    other = block_key(content_id(b"file:/y", b"v", 1, 1), 0)
    assert reader.read(other, location, 0, 10, buffer) is None
    assert reader.read(KEY, BlockLocation(SSD, 2, 4096, len(DATA), location.checksums), 0, 10, buffer) is None
    assert DirectReader({}).read(KEY, location, 0, 10, buffer) is None
    os.truncate(segment_path(disk, 1), 4096 + PIECE_SIZE + 7)
    assert reader.read(KEY, location, 0, PIECE_SIZE, buffer) is not None
    assert reader.read(KEY, location, PIECE_SIZE, 10, buffer) is None
