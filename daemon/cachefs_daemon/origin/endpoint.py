"""Learns from the responses of one server how many requests to send at once and how often, which requests are late,
and how large requests should be.

All origins of one server share one endpoint. The decisions are made in cachefs.planning.requests.
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
from cachefs.planning.requests.request_limits import AimdConcurrency, ReadaheadLimit, RequestRates
from cachefs.planning.requests.request_times import (
    HedgeBudget,
    RecentTimes,
    ThroughputCurve,
    TimesBySize,
    fit_throughput,
)
from cachefs_daemon.origin.outage import Outage
from cachefs_daemon.origin.retry import Failure

log = logging.getLogger(__name__)

# Seconds without a refusal after which requests may be hedged again.
_NO_HEDGE_SECONDS: Final = 5.0
# Seconds between two log lines.
_LOG_SECONDS: Final = 60.0
# Concurrent requests suffice for a rate if they are this many times what the rate takes on average.
_RATE_HEADROOM: Final = 1.5
# Seconds after which the throughput curve is fitted again, which takes 0.2 ms.
_FIT_SECONDS: Final = 10.0
# Options that give one server several endpoints.
_DISTINGUISHING_OPTIONS: Final = (
    "account",
    "region",
    "addressing_style",
    "profile",
    "anonymous",
    "requester_pays",
    "user_project",
)


@dataclass(slots=True)
class EndpointTotals:
    """Sums over all endpoints of this process since it started, closed ones included."""

    throttled: int = 0
    hedged: int = 0
    hedges_won: int = 0


ENDPOINT_TOTALS: Final = EndpointTotals()


class Endpoint:
    """One server. Used on the event loop."""

    def __init__(
        self, name: str, most: int, *, hedge_share: float = 0.0, largest: int = 0, is_remote: bool = True
    ) -> None:
        """name: of the server, for people. most: most concurrent requests. hedge_share: most hedged requests, as a
        share of all. largest: most bytes of a request for several blocks; 0: one block per request. is_remote:
        responses are reported by `note_response`, and requests share a network link."""
        self.name = name
        self.throttled = 0  # requests refused as too many
        self.hedged = 0  # hedged requests sent
        self.hedges_won = 0  # hedged requests that were answered first
        self._concurrency = AimdConcurrency(most)
        self._readahead = ReadaheadLimit() if is_remote else None
        self._rates = RequestRates()
        self._times = TimesBySize()
        self._budget = HedgeBudget(hedge_share)
        self._largest = largest
        self._throughput: ThroughputCurve | None = None
        self._fitted_at = self._logged_at = -math.inf  # monotonic seconds
        self._refused_at = -math.inf  # monotonic time of the last refusal
        self._last_times: RecentTimes | None = None  # of requests similar to the last answered one
        self._unlogged = 0  # refusals that are not logged yet
        self._outage: Outage | None = None  # of the origin that failed last

    @property
    def width(self) -> int:
        """Number of requests that may be in flight now."""
        return self._concurrency.width

    @property
    def readahead_bytes(self) -> float:
        """Bytes that readahead may have in flight; a single read may exceed them if it is alone."""
        return self._readahead.max_bytes if self._readahead is not None else math.inf

    def request_size(self, block: int) -> int:
        """Return how many bytes a request for neighbouring blocks of *block* bytes should have."""
        if not self._largest:
            return block
        now = time.monotonic()
        if now - self._fitted_at >= _FIT_SECONDS:
            self._fitted_at, self._throughput = now, fit_throughput(self._times.typical_times())
        if self._throughput is None:
            return 2 * block  # a second size lets the curve be fitted
        return self._throughput.good_size(block, self._largest)

    @property
    def is_limited(self) -> bool:
        """Whether requests must wait for their `wait_for_turn`."""
        return self._rates.is_limited

    async def wait_for_turn(self, prefix: str) -> float:
        """Wait until a request for a key with *prefix* may be sent. Return that time in monotonic seconds."""
        now = time.monotonic()
        if self.is_limited and (seconds := self._rates.schedule_request(prefix, now) - now) > 0:
            await asyncio.sleep(seconds)
            return time.monotonic()
        return now

    def count_request(self, size: int) -> RecentTimes:
        """Count a first request for *size* bytes. Return the times of similar requests."""
        self._budget.note_sent()
        return self._times.times_of(size)

    def late_after(self, size: int) -> float:
        """Return the seconds after which a request for *size* bytes is late; inf while unknown."""
        return self._times.times_of(size).late_after

    def note_response(self, prefix: str, size: int, began: float) -> None:
        """Record a good response to a request that was sent at *began*, in monotonic seconds."""
        now = time.monotonic()
        self._last_times = times = self._times.times_of(size)
        if times.add_request(size, now - began, now):
            self._concurrency.note_slowdown(now)
        if self._readahead is not None:
            self._readahead.note_response(size, now - began, now)
        if self._concurrency.is_lowered:
            self._concurrency.note_response()
        if self._rates.is_limited:
            self._rates.note_accepted(prefix, now)

    def note_refusal(self, prefix: str, reason: str) -> None:
        """Record a request that the server refused as one too many."""
        now = time.monotonic()
        self._refused_at = now
        self.throttled += 1
        ENDPOINT_TOTALS.throttled += 1
        self._unlogged += 1
        seconds = self._last_times.typical if self._last_times is not None else 0.0
        self._rates.note_refused(prefix, self.width / seconds if seconds else 0.0, now)
        self._concurrency.note_refusal(_RATE_HEADROOM * self._rates.lowest * seconds if seconds else 0.0, now)
        if now - self._logged_at >= _LOG_SECONDS:
            log.warning(
                "%s throttles: %d requests refused since the last warning; now at most %d at once, so readers wait: %s",
                self.name, self._unlogged, self.width, reason,
            )  # fmt: skip
            self._logged_at, self._unlogged = now, 0

    def note_failure(self, prefix: str, failure: Failure, outage: Outage) -> None:
        """Record a failed attempt. A transient failure that is no refusal counts for the *outage* of its origin."""
        if failure.throttled:
            self.note_refusal(prefix, str(failure.error))
        elif failure.transient:
            self._outage = outage
            outage.note_failure(str(failure.error))

    def may_hedge(self) -> bool:
        """Return whether a request may be hedged now. If so, count it."""
        if time.monotonic() - self._refused_at < _NO_HEDGE_SECONDS or not self._budget.take_hedge():
            return False
        self.count_hedges(1, 0)
        return True

    def count_hedge_won(self) -> None:
        """Record that a hedged request was answered first."""
        self.count_hedges(0, 1)

    def count_hedges(self, sent: int, won: int) -> None:
        """Count hedged requests of this process or a fetch process: *sent* were sent, *won* of them answered first."""
        self.hedged += sent
        self.hedges_won += won
        ENDPOINT_TOTALS.hedged += sent
        ENDPOINT_TOTALS.hedges_won += won

    def status(self) -> EndpointStatus:
        """Return the endpoint's state for `cachectl status`."""
        rate, curve, outage = self._rates.lowest, self._throughput, self._outage
        return EndpointStatus(
            name=self.name,
            width=self.width,
            most=self._concurrency.max_width,
            throttled=self.throttled,
            rate=rate if rate < math.inf else 0.0,
            hedged=self.hedged,
            hedges_won=self.hedges_won,
            request_size=curve.good_size(0, self._largest) if curve is not None else 0,
            silent=outage.seconds if outage is not None else 0.0,
            last_asked=outage.seconds_since_failure if outage is not None else 0.0,
            reason=outage.reason if outage is not None and outage.seconds else "",
        )


def with_distinct_names(found: Sequence[tuple[EndpointStatus, OriginOptions]]) -> list[EndpointStatus]:
    """Return the statuses, each paired with options of its origins: equal names get the differing options added."""
    alike: dict[str, list[OriginOptions]] = defaultdict(list)
    for status, options in found:
        alike[status.name].append(options)
    named = []
    for status, options in found:
        differing = [
            one for one in _DISTINGUISHING_OPTIONS if len({getattr(other, one) for other in alike[status.name]}) > 1
        ]
        details = ", ".join(f"{one} {_option(getattr(options, one))}" for one in differing)
        named.append(msgspec.structs.replace(status, name=f"{status.name} ({details})") if details else status)
    return named


def _option(value: str | bool | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value or "default"
