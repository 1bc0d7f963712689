"""Waits for what a test needs."""

import time
from collections.abc import Callable


def until(is_so: Callable[[], object], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
