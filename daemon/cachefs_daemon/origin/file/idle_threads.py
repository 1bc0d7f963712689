"""Threads that end when they are idle.

A ThreadPoolExecutor keeps every thread that it ever started, and waits for them when the process ends. Many datasets
that were read once would keep 64 threads each, and a thread that hangs in a dead file server would hold up the end of
the daemon.
"""

import asyncio
import contextlib
import errno
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

# Seconds after which an idle thread ends.
IDLE_SECONDS: Final = 10.0

Result = TypeVar("Result")
_Work = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class IdleThreads:
    """At most *most* threads, started on demand. Used on an event loop."""

    def __init__(self, most: int, name: str, idle_seconds: float = IDLE_SECONDS) -> None:
        self._most = most
        self._name = name
        self._idle_seconds = idle_seconds
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0  # running threads
        self._free = 0  # idle threads, less the queued work

    def run(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        """Run *work* in a thread. Work that is cancelled before its turn does not begin."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._lock:
            starts = self._free <= 0 and self._threads < self._most
            if starts:
                self._threads += 1
            else:
                self._free -= 1
            self._work.put((loop, future, work))
        if starts:
            self._start(future)
        return future

    def _start(self, future: "asyncio.Future[Any]") -> None:
        try:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        except RuntimeError as error:  # the machine or a control group allows no more threads
            with self._lock:
                self._threads -= 1
                self._free -= 1
                if not self._threads:
                    future.set_exception(OSError(errno.EAGAIN, str(error)))

    def _serve(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=self._idle_seconds)
            except queue.Empty:
                with self._lock:
                    if not self._work.empty():
                        continue
                    self._threads -= 1
                    self._free -= 1
                    return
            _run_work(*work)
            del work  # not kept alive while the thread is idle
            with self._lock:
                self._free += 1


def _run_work(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]", work: Callable[[], Any]) -> None:
    if future.done():
        return
    try:
        _set_outcome(loop, future, work(), None)
    except BaseException as error:  # raised to the waiter
        _set_outcome(loop, future, None, error)


def _set_outcome(
    loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]", result: Any, error: BaseException | None
) -> None:
    def set_outcome() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    # A closed loop raises RuntimeError; then there are no waiters.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(set_outcome)
