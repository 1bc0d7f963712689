"""Trying a failed request again, with jittered exponential backoff, for as long as somebody waits for its answer.

The wait is drawn evenly from zero to a bound that doubles ("full jitter", Marc Brooker, "Exponential Backoff And
Jitter", AWS Architecture Blog, 2015), so that many clients that failed together do not return together. Not the number
of attempts is bounded but the time: eight refused connections are used up in six seconds, and a server that restarts
takes longer.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from cachefs.errors import CachefsError, OriginUnavailable
from cachefs_daemon.origin.patience import Patience
from cachefs_daemon.runtime.backoff import Backoff

# The longest a wait may be, in seconds: the first one, and any; and the part of it that is drawn. An outage is over for
# a reader so much later.
_FIRST: Final = 0.1
_LONGEST: Final = 3.0
_SPREAD: Final = (0.0, 1.0)
# A number with so many digits is no number of seconds that anybody waits.
_LONG: Final = 6

Result = TypeVar("Result")


class Failure(NamedTuple):
    """What a failed attempt means."""

    error: CachefsError
    # True where another try may succeed.
    transient: bool
    # True where the origin refuses more requests than it takes at once, or in a second.
    throttled: bool = False
    # Seconds after which it wants to be asked again, at the earliest.
    retry_after: float = 0.0


def retry_after(said: str | None) -> float | None:
    """What the header Retry-After says, in seconds; 0 for a date, and None where there is none."""
    if said is None:
        return None
    return float(said) if said.isascii() and said.isdigit() and len(said) < _LONG else 0.0


async def retrying(
    attempt: Callable[[], Awaitable[Result]],
    judge: Callable[[Exception], Failure],
    subject: object,
    patience: Patience,
    give_up: float = math.inf,
) -> Result:
    """The result of *attempt*, which is tried again until the *patience* ends.

    judge: what an exception of *attempt* means; it raises exceptions that it does not know. subject: what is asked for,
    in messages. give_up: loop time after which what fails is not tried again, though a slow attempt may go on.
    Raises the error of the last attempt, or OriginUnavailable where the first attempt takes too long.
    """
    backoff = Backoff(_FIRST, _LONGEST, _SPREAD)
    failure: Failure | None = None
    try:
        with patience.enforced():
            while True:
                try:
                    return await attempt()
                except Exception as error:  # judge raises again what it does not know
                    failure = judge(error)
                now = asyncio.get_running_loop().time()
                # Towards the end the waits become shorter, so that an origin that comes back at the last moment is in
                # time.
                pause = min(failure.retry_after + backoff.fail(now), max(_FIRST, patience.left / 2))
                if not failure.transient or now + pause > give_up:
                    raise failure.error
                patience.trouble = failure.error
                await patience.rest(pause)
    except TimeoutError:
        raise (failure or Failure(OriginUnavailable(f"no answer in time for {subject}"), True)).error from None
