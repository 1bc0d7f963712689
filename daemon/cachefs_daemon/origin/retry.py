"""Trying a failed request again, with jittered exponential backoff, up to a number of attempts and to a deadline.

The wait is drawn evenly from zero to a bound that doubles ("full jitter", Marc Brooker, "Exponential Backoff And
Jitter", AWS Architecture Blog, 2015), so that many clients that failed together do not return together.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from cachefs.errors import CachefsError, OriginUnavailable

# The longest a wait may be, in seconds: the first one, and any.
_FIRST: Final = 0.1
_LONGEST: Final = 5.0

Result = TypeVar("Result")


class Failure(NamedTuple):
    """What a failed attempt means."""

    error: CachefsError
    # True where another try may succeed.
    transient: bool


def longest_wait(failed: int) -> float:
    """The longest wait after *failed* attempts, in seconds."""
    # 2.0 ** 1024 overflows; the bound is reached long before.
    return min(_LONGEST, _FIRST * 2.0 ** min(failed - 1, 16))


async def retrying(
    work: Callable[[], Awaitable[Result]],
    judge: Callable[[Exception], Failure],
    subject: str,
    attempts: int,
    deadline: float,
) -> Result:
    """The result of *work*, tried at most *attempts* times within *deadline* seconds.

    judge: what an exception of *work* means; it raises exceptions that it does not know. subject: what is asked for, in
    messages. Raises the error of the last attempt, or OriginUnavailable where the first attempt takes too long.
    """
    failure: Failure | None = None
    try:
        async with asyncio.timeout(deadline):
            for attempt in range(1, attempts + 1):
                try:
                    return await work()
                except Exception as error:
                    failure = judge(error)
                if not failure.transient:
                    break
                if attempt < attempts:
                    await asyncio.sleep(random.uniform(0, longest_wait(attempt)))
    except TimeoutError:
        failure = failure or Failure(OriginUnavailable(f"no answer within {deadline:.0f} s for {subject}"), True)
    assert failure is not None
    raise failure.error
