"""Runs work that may hang as long as a disk does, for a caller that must not."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class OffloadThread:
    """Runs one piece of work at a time, in a thread of its own. For one caller."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._last: Future[object] | None = None

    def run(self, work: Callable[[], object], timeout: float) -> bool:
        """Run *work*. Return False where it takes longer than *timeout* seconds, and goes on; also where earlier work
        still runs: then it is not begun. Raises the errors of the work."""
        if self._last is not None and not self._last.done():
            return False
        self._last = self._thread.submit(work)
        wait([self._last], timeout)
        if not self._last.done():
            return False
        self._last.result()
        return True

    def close(self) -> None:
        """Wait for running work."""
        self._thread.shutdown()
