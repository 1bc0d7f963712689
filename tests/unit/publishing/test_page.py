"""The memory that a training process shares with its helper."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.publishing.page import MAX_NUMBER, PAGE_SIZE, SLOTS, SharedPage, WantedSamples


@pytest.fixture
def fd() -> Iterator[int]:
    made = SharedPage.create()
    yield made
    os.close(made)


def test_both_see_what_one_sets(fd: int) -> None:
    ours, theirs, looking = SharedPage(fd), SharedPage(fd), SharedPage(Path(f"/proc/self/fd/{fd}"))
    assert ours.position(SLOTS - 1) is None
    ours.set_position(SLOTS - 1, MAX_NUMBER - 1, MAX_NUMBER)
    assert theirs.position(SLOTS - 1) == (MAX_NUMBER - 1, MAX_NUMBER)
    theirs.set_wanted(0, WantedSamples.NONE)
    assert ours.wanted_samples(0) == WantedSamples.NONE
    assert looking.wanted_samples(0) == WantedSamples.NONE
    assert looking.wanted_samples(1) == WantedSamples.UNKNOWN
    ours.set_wanted(SLOTS - 1, WantedSamples.SOME)
    ours.clear_slot(SLOTS - 1)
    assert (theirs.position(SLOTS - 1), theirs.wanted_samples(SLOTS - 1)) == (None, WantedSamples.UNKNOWN)
    with pytest.raises(TypeError, match="read-only"):
        looking.set_wanted(0, WantedSamples.UNKNOWN)


@pytest.mark.parametrize(("epoch", "position"), [(-1, 0), (0, -1), (MAX_NUMBER, 0), (0, MAX_NUMBER + 1)])
def test_a_position_that_no_word_can_hold_is_refused(fd: int, epoch: int, position: int) -> None:
    page = SharedPage(fd)
    with pytest.raises(ValueError, match="not between 0 and"):
        page.set_position(0, epoch, position)
    assert page.position(0) is None


def test_nobody_can_make_an_access_fail(fd: int) -> None:
    """Memory that was not allocated, or a file that is cut off, would mean SIGBUS."""
    assert os.fstat(fd).st_blocks * 512 >= PAGE_SIZE
    for size in (0, 2 * PAGE_SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_what_is_no_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(b"short")
    with pytest.raises(OSError, match="length"):
        SharedPage(tmp_path / "page")


def test_what_is_said_is_read_in_parts_and_has_an_end(fd: int) -> None:
    ours, theirs = SharedPage(fd), SharedPage(fd)
    theirs.append_log("one\nline, \ud800")
    heard = ours.log_length
    assert ours.log_text(0, heard) == "one line, ?\n"
    theirs.append_log("two")
    assert ours.log_text(heard, ours.log_length) == "two\n"
    for _ in range(mmap.PAGESIZE):
        theirs.append_log("and so on")
    assert ours.log_text(0, ours.log_length).endswith("and so on\n")
    assert ours.log_length <= PAGE_SIZE
    assert ours.position(SLOTS - 1) is None
