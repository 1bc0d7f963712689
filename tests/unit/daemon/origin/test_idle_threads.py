import asyncio
import threading

import pytest

from cachefs_daemon.origin.file.idle_threads import IdleThreads
from tests.waiting import until_async


def running(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_threads_come_when_needed_and_go_when_idle() -> None:
    async def scene() -> None:
        threads = IdleThreads(4, "come-and-go", idle_seconds=0.05)
        together = threading.Barrier(4, timeout=20)
        await asyncio.gather(*(threads.run(together.wait) for _ in range(4)))
        assert await threads.run(lambda: 7) == 7
        await until_async(lambda: running("come-and-go") == 0)
        assert await threads.run(lambda: 8) == 8

    asyncio.run(scene())


def test_there_are_at_most_so_many_and_a_free_one_is_used_again() -> None:
    async def scene() -> None:
        threads = IdleThreads(3, "at-most")
        assert set(await asyncio.gather(*(threads.run(lambda: 1) for _ in range(100)))) == {1}
        assert running("at-most") <= 3
        one = IdleThreads(3, "one-by-one")
        for _ in range(20):
            await one.run(lambda: None)
            await until_async(lambda: one._free)
        assert running("one-by-one") <= 2

    asyncio.run(scene())


def test_what_hangs_is_not_waited_for_and_what_is_cancelled_is_not_begun() -> None:
    release, begun = threading.Event(), []

    async def scene() -> None:
        threads = IdleThreads(1, "hanging")
        hung = threads.run(release.wait)
        cancelled = threads.run(lambda: begun.append("cancelled"))
        last = threads.run(lambda: begun.append("last"))
        hung.cancel()
        cancelled.cancel()
        release.set()
        await last

    asyncio.run(scene())
    assert begun == ["last"]


def test_errors_reach_who_waits() -> None:
    async def scene() -> None:
        def fail() -> None:
            raise OSError("broken")

        with pytest.raises(OSError, match="broken"):
            await IdleThreads(1, "failing").run(fail)

    asyncio.run(scene())


def test_where_no_thread_can_be_started_the_work_fails_or_waits_for_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scene() -> None:
        threads, release = IdleThreads(4, "scarce"), threading.Event()
        first = threads.run(release.wait)
        monkeypatch.setattr(threading.Thread, "start", refused)
        second = threads.run(lambda: 2)
        release.set()
        assert (await first, await second) == (True, 2)
        with pytest.raises(OSError, match="start new thread"):
            await IdleThreads(4, "none").run(lambda: 3)

    asyncio.run(scene())
