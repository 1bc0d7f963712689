"""A value that threads share, and that is accessible only with its lock held."""

import threading
from types import TracebackType
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Locked(Generic[Value]):
    """Protects a value: `with locked as value:` holds the lock. Keep the block short, and do no I/O in it."""

    def __init__(self, value: Value) -> None:
        self.unlocked = value  # for uses that the value's documentation allows without the lock
        self._lock = threading.Lock()

    def try_acquire(self) -> bool:
        """Take the lock if it is free, and return whether it was. The caller releases it with `release`."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> Value:
        self._lock.acquire()
        return self.unlocked

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()
