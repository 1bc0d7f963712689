"""An event loop with processes that can be killed and stopped, and threads that are greenlets.

Each callback, task and thread belongs to the `Process` in whose context it was made. From the moment in which a process
is killed nothing of it runs any more; while it is stopped, everything of it waits.
"""

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import math
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import greenlet

from tests.virtual_time import VirtualTimeLoop

Result = TypeVar("Result")
# Turns of the loop between two looks at what must hold.
LOOK_TURNS: Final = 32

# Called once with True, or with False at the end of the time.
Wake = Callable[[bool], None]

PROCESS: "Final[contextvars.ContextVar[Process | None]]" = contextvars.ContextVar("PROCESS", default=None)
# What concerns no process, such as a message on its way, runs in this context.
OUTSIDE: Final = contextvars.Context()


class Process:
    """A simulated process of an operating system."""

    def __init__(self, loop: "SimulatedLoop", host: str, *, clock_offset: float = 0.0) -> None:
        """host: address of its machine. clock_offset: seconds by which its wall clock is ahead."""
        self.host = host
        self.clock_offset = clock_offset
        self.is_alive = True
        self.is_stopped = False
        self.is_ending = False  # was it told to end?
        self.stopped_last = 0.0  # loop time at which it stood still last
        self.on_end: list[Callable[[], None]] = []
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._dead: list[asyncio.Task[Any]] = []  # keeps what was under way from being unwound by Python's collector
        self.threads: set[greenlet.greenlet] = set()
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        self._loop = loop
        self._parked: list[asyncio.Handle] = []
        loop.processes.append(self)

    @property
    def runs(self) -> bool:
        return self.is_alive and not self.is_stopped

    def run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Call *work* as this process does."""
        return self.context.copy().run(work, *arguments)

    def start(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Begin a task of this process."""
        return self.run(self._loop.create_task, work)

    def park(self, handle: asyncio.Handle) -> None:
        """Keep a callback until the process goes on."""
        if self.is_alive:
            self._parked.append(handle)

    def kill(self) -> None:
        """End it as SIGKILL does."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._dead = list(self.tasks)
        self._parked = []
        for handle in self._loop.handles_of(self):
            handle.cancel()
        for task in self._dead:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            asyncio._unregister_task(task)  # type: ignore[attr-defined]
        for tell in self.on_end:
            OUTSIDE.copy().run(tell)

    def stop(self) -> None:
        """Have it stand still, as SIGSTOP does."""
        if self.runs:
            self.is_stopped, self.stopped_last = True, math.inf
            self._loop.take_out(self)

    def go_on(self) -> None:
        """Have it run again, as SIGCONT does."""
        self.is_stopped, self.stopped_last = False, self._loop.time()
        parked, self._parked = self._parked, []
        if self.is_alive:
            self._loop.put_back(parked)


class SimulatedLoop(VirtualTimeLoop):
    """See the module."""

    def __init__(self, seed: int, limit: float) -> None:
        self.processes: list[Process] = []
        self.turns = 0
        self.look: Callable[[], None] = _nothing  # is called every few turns; what it raises ends the run
        self._timers: list[tuple[float, int, Any]] = []  # a heap: when, a number of its own, and the timer
        self._timer_numbers = itertools.count()
        super().__init__(seed, limit)
        self._hub = greenlet.getcurrent()
        self.set_task_factory(_task)

    # --- callbacks ------------------------------------------------------------------------------------------------

    # asyncio's own check their arguments, and compare timers in Python.

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None or (process.is_alive and not process.is_stopped):
            self._ready.append(handle)  # type: ignore[attr-defined]
        else:
            process.park(handle)
        return handle

    call_soon_threadsafe = call_soon  # all threads are this one

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._add_timer(timer)
        return timer

    def _add_timer(self, timer: Any) -> None:
        heapq.heappush(self._timers, (timer._when, next(self._timer_numbers), timer))

    def _timer_handle_cancelled(self, handle: Any) -> None:
        """Leave a cancelled timer where it is: it is passed over when its time comes."""

    def handles_of(self, process: Process) -> list[asyncio.Handle]:
        """Return what waits to be called for that process."""
        waiting = [*self._ready, *(timer for *_, timer in self._timers)]  # type: ignore[attr-defined]
        return [handle for handle in waiting if handle._context is not None and _process(handle) is process]

    def take_out(self, process: Process) -> None:
        """Park what waits to be called for that process."""
        ready: Any = self._ready  # type: ignore[attr-defined]
        for at, handle in enumerate(ready):
            if not handle._cancelled and _process(handle) is process:
                process.park(handle)
                ready[at] = _Nothing(self)
        kept = []
        for entry in self._timers:
            timer = entry[2]
            if not timer._cancelled and _process(timer) is process:
                process.park(timer)
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._timers = kept

    def put_back(self, parked: list[asyncio.Handle]) -> None:
        """Call them after all."""
        for handle in parked:
            if handle.cancelled():
                continue
            if isinstance(handle, asyncio.TimerHandle):
                self._add_timer(handle)
            else:
                self._ready.append(handle)  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        """Run one turn. asyncio's own takes three times as long, for descriptors that do not exist here."""
        ready: Any = self._ready  # type: ignore[attr-defined]
        timers = self._timers
        self.turns += 1
        if self.turns % LOOK_TURNS == 0:
            self.look()
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise self.stuck()
            if timers[0][0] > self.now:
                self.jump(timers[0][0] - self.now)
        now = self.now
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        self.shuffle()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    # --- threads --------------------------------------------------------------------------------------------------

    def spawn(self, work: Callable[..., object], *arguments: Any) -> greenlet.greenlet:
        """Run *work* in a thread of the process that is running."""
        process = PROCESS.get()
        thread = greenlet.greenlet(work, parent=self._hub)
        thread.gr_context = contextvars.copy_context()
        if process is not None:
            process.threads.add(thread)
        self.call_soon(thread.switch, *arguments)
        return thread

    @property
    def is_in_thread(self) -> bool:
        """Does a thread run, and not the loop?"""
        return greenlet.getcurrent() is not self._hub

    def pause(self, register: Callable[[Wake], None], seconds: float | None = None) -> bool:
        """Suspend the thread that calls until what *register* was given is called, or for so many seconds. Returns
        whether it was called."""
        thread = greenlet.getcurrent()
        assert thread is not self._hub, "the event loop itself would block"
        context = contextvars.copy_context()
        is_over = False
        timer: asyncio.TimerHandle | None = None

        def wake(came: bool) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                if timer is not None:
                    timer.cancel()
                self.call_soon(thread.switch, came, context=context)

        if seconds is not None:
            timer = self.call_later(max(0.0, seconds), wake, False)
        register(wake)
        return bool(self._hub.switch())

    def sleep(self, seconds: float) -> None:
        if self.is_in_thread:
            self.pause(lambda wake: None, seconds)
        else:
            super().sleep(seconds)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, work: Callable[..., Result], *arguments: Any
    ) -> "asyncio.Future[Result]":
        """Run *work* in a thread."""
        done: asyncio.Future[Result] = self.create_future()

        def run() -> None:
            try:
                result = work(*arguments)
            except greenlet.GreenletExit:
                raise
            except BaseException as error:
                if not done.done():
                    done.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
            else:
                if not done.done():
                    done.set_result(result)

        self.spawn(run)
        return done

    def end_all(self) -> None:
        """Unwind what is left of all processes, for whoever runs next in this thread of Python."""
        for process in self.processes:
            process.is_alive, process.is_stopped = True, False
            for thread in process.threads:
                if thread:  # it has begun and not ended
                    with contextlib.suppress(Exception):
                        thread.throw(greenlet.GreenletExit)
            for task in [one for one in process.tasks if not one.done()]:
                asyncio._register_task(task)  # type: ignore[attr-defined]
                task.cancel()


class _Nothing(asyncio.Handle):
    """Stands in the queue for a callback that was taken out."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(_nothing, (), loop, OUTSIDE)


def _nothing() -> None: ...


def _process(handle: Any) -> Process | None:
    found: Process | None = handle._context.get(PROCESS)
    return found


def _task(loop: Any, work: Any, context: contextvars.Context | None = None) -> "asyncio.Task[Any]":
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    process = context.get(PROCESS) if context is not None else PROCESS.get()
    if process is not None:
        process.tasks.add(task)
    return task


# --- what modules of the product have in place of their threads -----------------------------------------------------


def running_loop() -> SimulatedLoop:
    """Return the loop of the simulation."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop


class Thread:
    """Stands in for `threading.Thread`."""

    def __init__(
        self, target: Callable[..., object], name: str = "", args: tuple[Any, ...] = (), daemon: bool = True
    ) -> None:
        self._target, self._arguments = target, args

    def start(self) -> None:
        running_loop().spawn(self._target, *self._arguments)

    def join(self, timeout: float | None = None) -> None:
        """The event loop cannot wait: what it tells the thread before is done in the next turn."""


class Lock:
    """Stands in for `threading.Lock`."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[Wake] = []

    def __enter__(self) -> None:
        while self._is_held:
            running_loop().pause(self._waiting.append)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        if self._waiting:
            self._waiting.pop(0)(True)


class Event:
    """Stands in for `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Wake] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake(True)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            running_loop().pause(self._waiting.append, timeout)
        return self._is_set


class SimpleQueue:
    """Stands in for `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._waiting: list[Wake] = []

    def __class_getitem__(cls, _: Any) -> type["SimpleQueue"]:
        return cls

    def put(self, item: Any) -> None:
        self._items.append(item)
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake(True)

    def get_nowait(self) -> Any:
        return self.get(timeout=0)

    def get(self, timeout: float | None = None) -> Any:
        import queue

        until = time.monotonic() + timeout if timeout is not None else None
        while not self._items:
            left = until - time.monotonic() if until is not None else None
            if left is not None and left <= 0:
                raise queue.Empty
            running_loop().pause(self._waiting.append, left)
        return self._items.pop(0)
