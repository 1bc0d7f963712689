"""A value that threads share, which nobody can use without its lock by accident."""

import threading
from types import TracebackType
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Locked(Generic[Value]):
    """`with locked as value:` holds the lock for as long as the block runs. Keep that short, and do no I/O in it."""

    def __init__(self, value: Value) -> None:
        self.unlocked = value  # for what its documentation allows at any time
        self._lock = threading.Lock()

    def take_now(self) -> bool:
        """Take the lock if nobody has it. Then the caller gives it back with `give_back`."""
        return self._lock.acquire(blocking=False)

    def give_back(self) -> None:
        self._lock.release()

    def __enter__(self) -> Value:
        self._lock.acquire()
        return self.unlocked

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()
