"""A value that threads share, which nobody can use without its lock by accident."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Locked(Generic[Value]):
    """`with locked as value:` holds the lock for as long as the block runs. Keep that short, and do no I/O in it."""

    def __init__(self, value: Value) -> None:
        self.unlocked = value  # for what its documentation allows at any time
        self._lock = threading.Lock()

    def __enter__(self) -> Value:
        self._lock.acquire()
        return self.unlocked

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()

    @contextmanager
    def if_free(self) -> Iterator[Value | None]:
        """For who must not wait: None, without the lock, where somebody else has it."""
        ours = self._lock.acquire(blocking=False)
        try:
            yield self.unlocked if ours else None
        finally:
            if ours:
                self._lock.release()
