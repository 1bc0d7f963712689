"""Verified reads out of segments: right bytes or none."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.block import MEMORY, PIECE_SIZE, SSD, BlockLocation, block_key, content_id, piece_checksums
from cachefs.segment import SegmentReader, segment_path

KEY = block_key(content_id(b"file:/x", b"v", 1, 1), 0)
DATA = bytes(range(256)) * 1200


def written(directory: Path, tier: int = MEMORY) -> BlockLocation:
    segment_path(directory, 1).write_bytes(b"head" + DATA)
    return BlockLocation(tier, 1, 4, len(DATA), piece_checksums(KEY, DATA))


def buffer() -> memoryview:
    return memoryview(bytearray(len(DATA) + 2 * PIECE_SIZE))


@given(st.integers(0, len(DATA) - 1), st.integers(1, len(DATA)))
def test_any_part_of_a_block(tmp_path_factory: pytest.TempPathFactory, start: int, size: int) -> None:
    directory = tmp_path_factory.mktemp("tier")
    reader = SegmentReader({MEMORY: directory})
    found = reader.read(KEY, written(directory), start, size, buffer())
    reader.close()
    assert found is not None
    assert bytes(found) == DATA[start : start + size]


def test_what_is_not_right_is_none(tmp_path: Path) -> None:
    location = written(tmp_path)
    reader = SegmentReader({MEMORY: tmp_path})
    other = block_key(content_id(b"file:/y", b"v", 1, 1), 0)
    assert reader.read(other, location, 0, 10, buffer()) is None
    assert reader.read(KEY, BlockLocation(MEMORY, 2, 4, len(DATA), location.checksums), 0, 10, buffer()) is None
    assert reader.read(KEY, BlockLocation(SSD, 1, 4, len(DATA), location.checksums), 0, 10, buffer()) is None
    segment_path(tmp_path, 1).write_bytes(b"head" + DATA[: PIECE_SIZE + 7])
    fresh = SegmentReader({MEMORY: tmp_path})
    assert fresh.read(KEY, location, 0, PIECE_SIZE, buffer()) is not None
    assert fresh.read(KEY, location, PIECE_SIZE, 10, buffer()) is None


def test_unlinked_segments_are_let_go(tmp_path: Path) -> None:
    location = written(tmp_path)
    reader = SegmentReader({MEMORY: tmp_path})
    assert reader.read(KEY, location, 0, 10, buffer()) is not None
    segment_path(tmp_path, 1).unlink()
    assert reader.read(KEY, location, 0, 10, buffer()) is not None
    reader.close_unlinked()
    assert reader.read(KEY, location, 0, 10, buffer()) is None


def test_where_the_file_system_cannot_tell_a_read_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = written(tmp_path)
    preadv = os.preadv

    def without_nowait(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", without_nowait)
    reader = SegmentReader({MEMORY: tmp_path})
    with pytest.raises(BlockingIOError):
        reader.read(KEY, location, 0, 10, buffer(), wait=False)
    assert reader.read(KEY, location, 0, 10, buffer()) is not None
    reader.close()


def test_nothing_that_somebody_has_planted_is_read(tmp_path: Path) -> None:
    """The directory of a tier may be in one where everybody can write, and be away while its daemon is."""
    location = written(tmp_path)
    mine, theirs = SegmentReader({MEMORY: tmp_path}, os.getuid()), SegmentReader({MEMORY: tmp_path}, os.getuid() + 1)
    assert mine.read(KEY, location, 0, 10, buffer()) is not None
    assert theirs.read(KEY, location, 0, 10, buffer()) is None
    segment = segment_path(tmp_path, 1)
    segment.rename(tmp_path / "elsewhere")
    segment.symlink_to(tmp_path / "elsewhere")
    assert SegmentReader({MEMORY: tmp_path}).read(KEY, location, 0, 10, buffer()) is None
    segment.unlink()
    os.mkfifo(segment)
    assert SegmentReader({MEMORY: tmp_path}).read(KEY, location, 0, 10, buffer()) is None, "it does not wait either"
