"""When to try a failed request again, and how long to wait before: jittered exponential backoff.

The wait is drawn evenly from zero to a bound that doubles ("full jitter", Marc Brooker, "Exponential Backoff And
Jitter", AWS Architecture Blog, 2015), so that many clients that failed together do not return together.
"""

import random
from collections.abc import Iterator
from typing import Final

_FIRST: Final = 0.1
_LONGEST: Final = 5.0


def waits(attempts: int) -> Iterator[float]:
    """Seconds to wait before the second, third, ... of *attempts* tries."""
    for retry in range(attempts - 1):
        # 2.0**1024 overflows; the bound is reached long before.
        yield random.uniform(0, min(_LONGEST, _FIRST * 2.0 ** min(retry, 16)))
