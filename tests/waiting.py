"""Waits for real processes, threads, sockets and kernels, with a deadline. A failed wait says what it waited for.

Use them only where no event can be awaited. Most unit tests run in virtual time, and await events.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import TypeVar

import sniffio
import trio

T = TypeVar("T")
What = str | Callable[[], object]

# Seconds until a wait fails: many times what the slowest of them takes on a busy machine.
SECONDS = 100.0
# Seconds between two looks. Pauses grow, so that neither a quick nor a slow wait costs much.
_SHORTEST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.002, 0.1, 1.3


def until(
    look: Callable[[], T], what: What = "", *, is_right: Callable[[T], object] = bool, seconds: float = SECONDS
) -> T:
    """Call *look* until its value is right, and return that value.

    Args:
        look: returns what is waited for. Without *is_right*, it is a condition.
        what: what is waited for, in words, or a function that returns more of it after a failure. Default: the code of
            *look*.
        is_right: whether a value ends the wait.
        seconds: the deadline.

    Raises:
        AssertionError: the deadline has passed. The message has *what* and the last value.
    """
    end, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
    while not is_right(value := look()):
        if time.monotonic() > end:
            raise AssertionError(_failure(look, what, value, seconds))
        time.sleep(pause)
        pause = min(pause * _GROWTH, _LONGEST_PAUSE)
    return value


async def until_async(
    look: Callable[[], T], what: What = "", *, is_right: Callable[[T], object] = bool, seconds: float = SECONDS
) -> T:
    """Wait as `until` does, while the loop of asyncio or trio runs. Seconds are those of the loop's clock."""
    is_trio = sniffio.current_async_library() == "trio"
    now, sleep = (trio.current_time, trio.sleep) if is_trio else (asyncio.get_running_loop().time, asyncio.sleep)
    end, pause = now() + seconds, _SHORTEST_PAUSE
    while not is_right(value := look()):
        if now() > end:
            raise AssertionError(_failure(look, what, value, seconds))
        await sleep(pause)
        pause = min(pause * _GROWTH, _LONGEST_PAUSE)
    return value


def _failure(look: Callable[[], object], what: What, value: object, seconds: float) -> str:
    words = what() if callable(what) else what or _code(look)
    return f"not within {seconds:.0f} s: {words} (the last value: {value!r})"


def _code(function: Callable[[], object]) -> str:
    """The lines of a function, or of the call with the lambda, as one line."""
    try:
        return " ".join(inspect.getsource(function).split())
    except (OSError, TypeError):
        return repr(function)
