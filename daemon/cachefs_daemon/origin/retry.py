"""Retries with jittered exponential backoff, for as long as a reader waits.

The pause is drawn evenly from zero to a bound that doubles ("full jitter", Marc Brooker, "Exponential Backoff And
Jitter", AWS Architecture Blog, 2015), so that clients that failed together do not return together. The time is bounded,
not the number of attempts: eight refused connections are used up in six seconds, and a server that restarts takes
longer.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from cachefs.backoff import Backoff
from cachefs.errors import CachefsError, OriginUnavailable
from cachefs_daemon.origin.deadline import Deadline

# Bounds of the pause in seconds: of the first one, and of any; and the drawn part of it. A reader notices the end of an
# outage by up to that much later.
_FIRST: Final = 0.1
_LONGEST: Final = 3.0
_SPREAD: Final = (0.0, 1.0)
# A number with this many digits is no plausible number of seconds.
_MAX_DIGITS: Final = 6

Result = TypeVar("Result")


class Failure(NamedTuple):
    """The meaning of a failed attempt."""

    error: CachefsError
    # Whether a retry may succeed.
    transient: bool
    # Whether the origin refuses for too many requests, at once or per second.
    throttled: bool = False
    # Least seconds after which the origin wants the next request.
    retry_after: float = 0.0


def parse_retry_after(header: str | None) -> float | None:
    """Return the seconds in the header Retry-After; 0 for a date, None without the header."""
    if header is None:
        return None
    return float(header) if header.isascii() and header.isdigit() and len(header) < _MAX_DIGITS else 0.0


async def run_with_retries(
    attempt: Callable[[], Awaitable[Result]],
    judge: Callable[[Exception], Failure],
    subject: object,
    deadline: Deadline,
    give_up_at: float = math.inf,
) -> Result:
    """Return the result of *attempt*, retried until *deadline* ends.

    judge: returns the meaning of an exception of *attempt*; raises exceptions that it does not know. subject: name of
    the request, for messages. give_up_at: loop time after which failures are not retried, though a slow attempt may go
    on. Raises the error of the last attempt, or OriginUnavailable if the first attempt takes too long.
    """
    backoff = Backoff(_FIRST, _LONGEST, _SPREAD)
    failure: Failure | None = None
    try:
        with deadline.enforced():
            while True:
                try:
                    return await attempt()
                except Exception as error:  # judge raises unknown exceptions again
                    failure = judge(error)
                now = asyncio.get_running_loop().time()
                # Pauses become shorter towards the end, to reach an origin that returns at the last moment.
                pause = min(failure.retry_after + backoff.note_failure(now), max(_FIRST, deadline.seconds_left / 2))
                if not failure.transient or now + pause > give_up_at:
                    raise failure.error
                deadline.last_error = failure.error
                await deadline.pause(pause)
    except TimeoutError:
        raise (failure or Failure(OriginUnavailable(f"no answer in time for {subject}"), True)).error from None
