"""An asyncio event loop on virtual time: its clock jumps to the next timer as soon as nothing is ready.

    virtual_time.run(main())             # inside, the loop's clock and those of the module `time` are virtual
    virtual_time.run(main(), seed=7)     # the clocks begin at fixed times too

A test of minutes takes milliseconds. With a seed, ready tasks run in an order that the seed picks, and the same seed
gives the same order of events. Without one asyncio's own order is kept, or where the environment variable CACHEFS_ORDER
is set, that variable and the name of the test are the seed: `CACHEFS_ORDER=3 pytest`. A run that would wait for ever
raises `Stuck` with a line for each task that waits, and so does one that passes `limit` seconds or that never lets its
clock move. Work given to an executor (`Threads`, `asyncio.to_thread`) runs inline in a later turn of the loop, with a
seed after a virtual delay. Work that blocks on the loop itself (`run_coroutine_threadsafe(...).result()`) and real
processes therefore do not fit; descriptors do, if their other end is in the same process (`socket.socketpair`).

`looptime` from PyPI has no seeded order, waits for executors in real time and leaves `time.monotonic` alone; `simloop`
from PyPI has all that is wanted, but needs Python 3.12, where cachefs supports 3.11.
"""

import asyncio
import contextlib
import contextvars
import math
import os
import random
import selectors
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar
from unittest import mock

Result = TypeVar("Result")

# The clocks at the beginning of each run with a seed.
MONOTONIC: Final = 1000.0
WALL: Final = 1_800_000_000.0
# Virtual seconds by which timers are late. So sums of times that were rounded down do not set a timer for now for ever.
MOMENT: Final = 1e-6
# Virtual seconds after which a run counts as one that never ends.
LIMIT: Final = 24 * 3600.0
# Turns of the loop at one moment after which it counts as busy without an end.
TURNS: Final = 100_000
# Virtual seconds that work in an executor takes at most, where there is a seed.
WORK_SECONDS: Final = 0.005
# Real seconds for which a run waits for a descriptor, without timers and before each jump of the clock. A busy kernel
# may deliver on loopback a moment after the call that sends.
DESCRIPTOR_SECONDS: Final = 10.0
DELIVERY_SECONDS: Final = 0.001


class Stuck(AssertionError):
    """A run that would never end."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module. Use `run`, which sets the clocks of the module `time` too."""

    def __init__(self, seed: int | None = None, limit: float = LIMIT, began: float = MONOTONIC) -> None:
        """limit: virtual seconds after which the run raises `Stuck`. began: time of the clock."""
        self.now = self.began = began
        # None: callbacks run in asyncio's own order.
        self.random = random.Random(seed) if seed is not None else None
        self._limit = began + limit
        self._turns = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, work: Callable[..., Result], *arguments: Any
    ) -> "asyncio.Future[Result]":
        """Run *work* inline, in a later turn of the loop."""
        done: asyncio.Future[Result] = self.create_future()
        delay = self.random.uniform(0, WORK_SECONDS) if self.random is not None else 0.0
        self.call_later(delay, _work, done, work, arguments, context=contextvars.copy_context())
        return done

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """There is none."""

    def before_select(self, timeout: float | None) -> bool:
        """Shuffle the tasks that are ready. Returns whether any callback is. timeout: seconds until the next timer."""
        self.shuffle()
        return timeout is not None and timeout <= 0

    def shuffle(self) -> None:
        """Put the tasks that are ready into an order of the seed. Raises Stuck where the clock does not move."""
        ready: Any = self._ready  # type: ignore[attr-defined]
        self._turns += 1
        if self._turns > TURNS:
            raise Stuck(f"at {self._elapsed()} {TURNS} turns of the loop have not let the clock move\n{waiting(self)}")
        if self.random is not None and len(ready) > 1:
            places: list[int] = []
            for place, handle in enumerate(ready):
                if _is_step(handle):
                    places.append(place)
                elif _is_of(handle, self):  # such as the end of a connect, before which its task must not run
                    self._shuffle(places)
                    places = []
            self._shuffle(places)

    def _shuffle(self, places: list[int]) -> None:
        """Shuffle the callbacks that are ready at these places."""
        ready: Any = self._ready  # type: ignore[attr-defined]
        if self.random is not None and len(places) > 1:
            steps = [ready[place] for place in places]
            self.random.shuffle(steps)
            for place, handle in zip(places, steps, strict=True):
                ready[place] = handle

    def jump(self, seconds: float) -> None:
        """Move the clock, and a moment more."""
        self.now += seconds + MOMENT
        self._turns = 0
        if self.now > self._limit:
            raise Stuck(f"still running at {self._elapsed()}\n{waiting(self)}")

    def sleep(self, seconds: float) -> None:
        """Stand in for `time.sleep` of work that runs inline."""
        self.jump(max(0.0, seconds))

    def stuck(self) -> Stuck:
        """Make the error of a run in which nothing will ever happen again."""
        return Stuck(f"at {self._elapsed()} nothing is left that could wake\n{waiting(self)}")

    def _elapsed(self) -> str:
        return f"{self.now - self.began:.3f} virtual seconds"


def run(main: Coroutine[Any, Any, Result], *, seed: int | None = None, limit: float = LIMIT) -> Result:
    """Run *main* as `asyncio.run` does, on virtual time. seed: of the order of tasks; limit: virtual seconds."""
    if seed is not None:
        loop, wall = VirtualTimeLoop(seed, limit), WALL
    else:  # what the test has made before goes by the real clocks
        loop, wall = VirtualTimeLoop(_seed_of_test(), limit, math.ceil(time.monotonic())), math.ceil(time.time())
    with clocks_of(loop, wall), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


async def settle() -> None:
    """Wait until all has happened that follows from what was done, work in threads included, but for longer timers."""
    await asyncio.sleep(2 * WORK_SECONDS)


def _seed_of_test() -> int | None:
    if (order := os.environ.get("CACHEFS_ORDER")) is None:
        return None
    return zlib.crc32(f"{os.environ.get('PYTEST_CURRENT_TEST')} {order}".encode())


@contextlib.contextmanager
def clocks_of(loop: VirtualTimeLoop, wall: float = WALL) -> Iterator[None]:
    """Let the clocks of the module `time` show the loop's time. wall: `time.time()` at the beginning."""

    def wall_clock() -> float:
        return wall + loop.now - loop.began

    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "time", wall_clock),
        mock.patch.object(time, "sleep", loop.sleep),
    ):
        yield


def waiting(loop: asyncio.AbstractEventLoop) -> str:
    """Describe what each task of the loop waits for, a line each."""
    lines = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=1)
        place = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "its beginning"
        lines.append(f"  {task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')}) waits at {place}")
    return "\n".join(sorted(lines))


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, moves the loop's clock."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        is_ready = self._loop.before_select(timeout)
        # The loop's own descriptor is always there: it wakes the loop out of a wait that does not exist here.
        has_descriptors = len(self._fd_to_key) > 1  # type: ignore[attr-defined]
        found = super().select(0) if has_descriptors else []
        if found or is_ready:
            return found
        if has_descriptors:
            found = super().select(DELIVERY_SECONDS if timeout is not None else DESCRIPTOR_SECONDS)
        if not found:
            if timeout is None:
                raise self._loop.stuck()
            self._loop.jump(timeout)
        return found


def _is_step(handle: Any) -> bool:
    """Is that callback a step of a task? Others keep asyncio's order, which transports rely on."""
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)


def _is_of(handle: Any, loop: VirtualTimeLoop) -> bool:
    """Is that callback one that the loop itself has set?"""
    return getattr(getattr(handle._callback, "func", handle._callback), "__self__", None) is loop


def _work(done: "asyncio.Future[Result]", work: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
    try:
        result = work(*arguments)
    except Exception as error:
        if isinstance(error, StopIteration):  # a future does not take it
            error = RuntimeError(repr(error))
        if not done.cancelled():
            done.set_exception(error)
    else:
        if not done.cancelled():
            done.set_result(result)
