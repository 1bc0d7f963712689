"""The loop on virtual time that tests run on."""

import asyncio
import socket
import time

import pytest

from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time


def test_hours_pass_on_all_clocks_at_once() -> None:
    async def main() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        began = loop.time(), time.monotonic(), time.time()
        await asyncio.sleep(3600)
        return loop.time() - began[0], time.monotonic() - began[1], time.time() - began[2]

    assert virtual_time.run(main()) == pytest.approx((3600, 3600, 3600))


def test_timers_fire_in_order_of_their_time() -> None:
    async def main() -> list[str]:
        fired: list[str] = []

        async def later(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            fired.append(name)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(25):
                await asyncio.gather(later(20, "second"), later(10, "first"), later(30, "never"))
        return fired

    assert virtual_time.run(main()) == ["first", "second"]


def test_what_would_wait_for_ever_is_named() -> None:
    async def never_answered() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(never_answered(), name="reader of block 7")

    with pytest.raises(virtual_time.Stuck, match=r"(?s)reader of block 7 .*never_answered.*test_virtual_time.py"):
        virtual_time.run(main())


def test_polling_without_an_end_is_stuck_too() -> None:
    async def main(seconds: float) -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(seconds)

    with pytest.raises(virtual_time.Stuck, match="still running at"):
        virtual_time.run(main(1.0), limit=60)
    with pytest.raises(virtual_time.Stuck, match="have not let the clock move"):
        virtual_time.run(main(0))


def test_threads_run_inline_and_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(seeded: bool) -> None:
        threads = Threads()
        before = time.monotonic()
        assert await threads.run(lambda: 7) == 7
        assert (time.monotonic() > before) == seeded
        before = time.monotonic()
        await threads.background(time.sleep, 60)
        assert time.monotonic() - before >= 60
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        threads.close()

    virtual_time.run(main(seeded=True), seed=1)
    monkeypatch.delenv("CACHEFS_ORDER", raising=False)
    virtual_time.run(main(seeded=False))


def order(seed: int | None) -> list[int]:
    async def main() -> list[int]:
        ran: list[int] = []

        async def step(number: int) -> None:
            await asyncio.sleep(0)
            ran.append(number)

        await asyncio.gather(*(step(number) for number in range(8)))
        return ran

    return virtual_time.run(main(), seed=seed)


def test_a_seed_picks_the_order_of_tasks_and_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1
    monkeypatch.setenv("CACHEFS_ORDER", "1")
    assert order(None) == order(None)
    monkeypatch.delenv("CACHEFS_ORDER", raising=False)
    assert order(None) == list(range(8))


def test_a_timer_that_is_set_by_a_sum_of_times_ends() -> None:
    """The sum may be rounded down, to a time that is not yet what the timer is for."""

    async def main() -> None:
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        while loop.time() - began < 0.05:  # noqa: ASYNC110
            await asyncio.sleep(began + 0.05 - loop.time())

    for seed in range(20):
        virtual_time.run(main(), seed=seed)


def test_the_clocks_go_on_where_the_real_ones_are() -> None:
    async def main() -> tuple[float, float]:
        return time.monotonic(), time.time()

    before = time.monotonic(), time.time()
    now = virtual_time.run(main())
    assert all(0 <= virtual - real < 60 for virtual, real in zip(now, before, strict=True))


def test_descriptors_of_this_process_are_served_before_the_clock_jumps() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        theirs.setblocking(False)
        asyncio.get_running_loop().call_later(5, theirs.send, b"hello")
        async with asyncio.timeout(6):
            assert await reader.readexactly(5) == b"hello"
        writer.close()
        theirs.close()

    virtual_time.run(main())
