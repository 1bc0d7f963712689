"""Work that may hang, and who waits for it."""

import threading
from contextlib import closing

import pytest

from cachefs_daemon.runtime.offload import OffloadThread


def test_who_waits_goes_on_where_the_work_hangs_and_begins_no_more() -> None:
    released = threading.Event()
    done: list[int] = []
    with closing(OffloadThread("test")) as aside:
        try:
            assert aside.run(lambda: done.append(1), 60)
            assert not aside.run(released.wait, 0.01)
            assert not aside.run(lambda: done.append(2), 60)
        finally:
            released.set()
    assert done == [1]


def test_what_work_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with closing(OffloadThread("test")) as aside, pytest.raises(ValueError, match="wrong"):
        aside.run(fail, 60)
