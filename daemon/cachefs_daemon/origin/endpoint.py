"""What is learned of one server from its answers: how many requests it takes at once and how often, which requests are
late, and how large they should be.

All origins that one server has share one. The decisions are made in cachefs.planning.requests.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from cachefs.messages import EndpointStatus, OriginOptions
from cachefs.planning.requests.ahead_bytes import AheadBytes
from cachefs.planning.requests.concurrency import Concurrency
from cachefs.planning.requests.hedging import HedgeBudget
from cachefs.planning.requests.recent_times import RecentTimes, TimesBySize
from cachefs.planning.requests.request_rate import RequestRates
from cachefs.planning.requests.throughput_fit import Throughput, fit
from cachefs_daemon.origin.outage import Outage
from cachefs_daemon.origin.retry import Failure

log = logging.getLogger(__name__)

# Seconds without a refusal after which requests may be sent twice again.
_CALM: Final = 5.0
# Seconds between two lines in the log.
_TOLD_EVERY: Final = 60.0
# Requests at once are enough for a rate where they are so many times what the rate takes on average.
_ENOUGH: Final = 1.5
# Seconds after which the curve of throughput is fitted again. That takes 0.2 ms.
_FITTED_EVERY: Final = 10.0
# Options for which one server has several endpoints.
_TELLING: Final = ("account", "region", "addressing_style", "profile", "anonymous", "requester_pays", "user_project")


@dataclass(slots=True)
class Totals:
    """What all endpoints of this process have counted since it started, those that are gone included."""

    throttled: int = 0
    hedged: int = 0
    hedges_won: int = 0


TOTALS: Final = Totals()


class Endpoint:
    """One server. Used on the event loop.

    It has more than 12 attributes: what is learned, and what is counted for `cachectl status`.
    """

    def __init__(
        self, name: str, most: int, *, hedge_share: float = 0.0, largest: int = 0, is_remote: bool = True
    ) -> None:
        """name: how a person calls it. most: requests at once. hedge_share: second requests, as a share of all.
        largest: bytes of a request for several blocks, at most; 0: there are none. is_remote: it tells what it has
        answered (see `answered`), and has a link that its requests share."""
        self.name = name
        self.throttled = 0  # requests refused as there were too many
        self.hedged = 0  # second requests sent
        self.hedges_won = 0  # of them, those that answered first
        self._concurrency = Concurrency(most)
        self._ahead = AheadBytes() if is_remote else None
        self._rates = RequestRates()
        self._times = TimesBySize()
        self._budget = HedgeBudget(hedge_share)
        self._largest = largest
        self._throughput: Throughput | None = None
        self._fitted = self._told = -math.inf  # monotonic seconds
        self._refused = -math.inf  # monotonic seconds of the last refusal
        self._last: RecentTimes | None = None  # of requests such as the last one that was answered
        self._untold = 0  # refusals that the log does not tell yet
        self._outage: Outage | None = None  # of the origin that has failed last

    @property
    def width(self) -> int:
        """Requests that may be under way at once now."""
        return self._concurrency.width

    @property
    def ahead_bytes(self) -> float:
        """Bytes that reads ahead may have under way; one read may be larger where there is no other."""
        return self._ahead.most if self._ahead is not None else math.inf

    def request_size(self, block: int) -> int:
        """Bytes that a request for neighbouring blocks of *block* bytes should have."""
        if not self._largest:
            return block
        now = time.monotonic()
        if now - self._fitted >= _FITTED_EVERY:
            self._fitted, self._throughput = now, fit(self._times.known())
        if self._throughput is None:
            return 2 * block  # with two sizes the curve becomes known
        return self._throughput.good_size(block, self._largest)

    @property
    def is_limited(self) -> bool:
        """Must requests wait for their `turn`?"""
        return self._rates.is_limited

    async def turn(self, prefix: str) -> float:
        """Wait until a request for a key with the *prefix* may be sent. Returns when that is, in monotonic seconds."""
        now = time.monotonic()
        if self.is_limited and (seconds := self._rates.when(prefix, now) - now) > 0:
            await asyncio.sleep(seconds)
            return time.monotonic()
        return now

    def sent(self, size: int) -> RecentTimes:
        """A first request for *size* bytes is sent. Returns the times of comparable ones."""
        self._budget.sent()
        return self._times.of(size)

    def late_after(self, size: int) -> float:
        """Seconds after which a request for *size* bytes is late; inf while that is not known."""
        return self._times.of(size).late_after

    def answered(self, prefix: str, size: int, began: float) -> None:
        """A request was answered as it should be, that was sent when it was *began*, in monotonic seconds."""
        now = time.monotonic()
        self._last = times = self._times.of(size)
        if times.add(size, now - began, now):
            self._concurrency.slower(now)
        if self._ahead is not None:
            self._ahead.answered(size, now - began, now)
        if self._concurrency.is_lowered:
            self._concurrency.answered()
        if self._rates.is_limited:
            self._rates.accepted(prefix, now)

    def refused(self, prefix: str, reason: str) -> None:
        """A request was refused, as there are too many."""
        now = time.monotonic()
        self._refused = now
        self.throttled += 1
        TOTALS.throttled += 1
        self._untold += 1
        seconds = self._last.typical if self._last is not None else 0.0
        self._rates.refused(prefix, self.width / seconds if seconds else 0.0, now)
        self._concurrency.refused(_ENOUGH * self._rates.lowest * seconds if seconds else 0.0, now)
        if now - self._told >= _TOLD_EVERY:
            log.warning(
                "%s throttles: %d requests refused since this was last said, now at most %d at once; readers wait: %s",
                self.name, self._untold, self.width, reason,
            )  # fmt: skip
            self._told, self._untold = now, 0

    def failed(self, prefix: str, failure: Failure, outage: Outage) -> None:
        """An attempt has failed. It is told to the *outage* of its origin where that is no refusal."""
        if failure.throttled:
            self.refused(prefix, str(failure.error))
        elif failure.transient:
            self._outage = outage
            outage.failed(str(failure.error))

    def may_hedge(self) -> bool:
        """Whether a request may be sent a second time now; if so, it is counted."""
        if time.monotonic() - self._refused < _CALM or not self._budget.take():
            return False
        self.hedges(1, 0)
        return True

    def won(self) -> None:
        """A second request was the first to be answered."""
        self.hedges(0, 1)

    def hedges(self, sent: int, won: int) -> None:
        """So many second requests were sent, here or by a fetch process, and were the first to be answered."""
        self.hedged += sent
        self.hedges_won += won
        TOTALS.hedged += sent
        TOTALS.hedges_won += won

    def status(self) -> EndpointStatus:
        """As `cachectl status` shows it."""
        rate, curve, outage = self._rates.lowest, self._throughput, self._outage
        return EndpointStatus(
            name=self.name,
            width=self.width,
            most=self._concurrency.most,
            throttled=self.throttled,
            rate=rate if rate < math.inf else 0.0,
            hedged=self.hedged,
            hedges_won=self.hedges_won,
            request_size=curve.good_size(0, self._largest) if curve is not None else 0,
            silent=outage.seconds if outage is not None else 0.0,
            last_asked=outage.last_asked if outage is not None else 0.0,
            reason=outage.reason if outage is not None and outage.seconds else "",
        )


def told_apart(found: Sequence[tuple[EndpointStatus, OriginOptions]]) -> list[EndpointStatus]:
    """What is known of endpoints, each with the options of its origins: in names that several have, the options that
    differ are added."""
    alike: dict[str, list[OriginOptions]] = defaultdict(list)
    for status, options in found:
        alike[status.name].append(options)
    named = []
    for status, options in found:
        differing = [one for one in _TELLING if len({getattr(other, one) for other in alike[status.name]}) > 1]
        said = ", ".join(f"{one} {_option(getattr(options, one))}" for one in differing)
        named.append(msgspec.structs.replace(status, name=f"{status.name} ({said})") if said else status)
    return named


def _option(value: str | bool | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value or "default"
