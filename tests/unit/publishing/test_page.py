"""The memory that a training process shares with its helper."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.publishing.page import MOST, PAGE_SIZE, SLOTS, Need, Page


@pytest.fixture
def fd() -> Iterator[int]:
    made = Page.create()
    yield made
    os.close(made)


def test_both_see_what_one_sets(fd: int) -> None:
    ours, theirs, looking = Page(fd), Page(fd), Page(Path(f"/proc/self/fd/{fd}"))
    assert ours.position(SLOTS - 1) is None
    ours.set_position(SLOTS - 1, MOST - 1, MOST)
    assert theirs.position(SLOTS - 1) == (MOST - 1, MOST)
    theirs.set_need(0, Need.NONE)
    assert ours.need(0) == Need.NONE
    assert looking.need(0) == Need.NONE
    assert looking.need(1) == Need.UNKNOWN
    ours.set_need(SLOTS - 1, Need.SOME)
    ours.clear(SLOTS - 1)
    assert (theirs.position(SLOTS - 1), theirs.need(SLOTS - 1)) == (None, Need.UNKNOWN)
    with pytest.raises(TypeError, match="read-only"):
        looking.set_need(0, Need.UNKNOWN)


@pytest.mark.parametrize(("epoch", "position"), [(-1, 0), (0, -1), (MOST, 0), (0, MOST + 1)])
def test_a_position_that_no_word_can_hold_is_refused(fd: int, epoch: int, position: int) -> None:
    page = Page(fd)
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
        Page(tmp_path / "page")


def test_what_is_said_is_read_in_parts_and_has_an_end(fd: int) -> None:
    ours, theirs = Page(fd), Page(fd)
    theirs.say("one\nline, \ud800")
    heard = ours.said
    assert ours.text(0, heard) == "one line, ?\n"
    theirs.say("two")
    assert ours.text(heard, ours.said) == "two\n"
    for _ in range(mmap.PAGESIZE):
        theirs.say("and so on")
    assert ours.text(0, ours.said).endswith("and so on\n")
    assert ours.said <= PAGE_SIZE
    assert ours.position(SLOTS - 1) is None
