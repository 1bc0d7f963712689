"""Limits the requests to one server: how many at once, how many per second, and how many bytes of readahead.

**Concurrency** (`AimdConcurrency`): additive increase, multiplicative decrease. The limit begins at its bound, since
most servers take that many. A refusal for too many requests halves it. A server that becomes much slower lowers it a
little, and never below a quarter of the bound: other clients may be the reason, and then fewer requests would not help.
The answers of one round together raise it by one.

**Bytes of readahead** (`ReadaheadLimit`): what keeps the server's link busy, and little more. Concurrent requests share
the link. With 64 requests of 4 MiB on a link of 40 MB/s all of them come after 6 s, and so do blocks that are needed
first, and blocks that a reader waits for. Readahead therefore gets what the server delivers in the time that its
answers take at their best, which grows as long as it delivers more (Little's law; the model of a path is that of BBR:
Cardwell et al., "Congestion-Based Congestion Control", ACM Queue 2016).

**Requests per second** of one prefix (`RequestRates`): a server with a rate limit reveals it only by refusals; the
requests it accepts meanwhile are its limit. A refusal therefore lowers the rate to slightly less than was recently
accepted, so that the server's own bucket fills again. Then the rate grows, slowly at first and twice as fast every
second, until the next refusal. After a minute without one, the prefix has no limit any more.
"""

import math
from collections import OrderedDict
from typing import Final

# Most prefixes with known rates. The one that was refused longest ago is forgotten.
MAX_PREFIXES: Final = 64
# Seconds without a refusal after which a prefix has no limit any more.
FORGET_SECONDS: Final = 60.0
# Seconds over which accepted requests are counted, and between two decreases.
_WINDOW: Final = 0.25
_HOLD: Final = 0.5
# Factor on the accepted rate.
_BELOW_FACTOR: Final = 0.98
# Initial growth: a part of the rate per second, or requests per second per second, whichever is more.
_GROWTH: Final = 0.01
_MIN_GROWTH: Final = 1.0
# Seconds in which growth doubles.
_DOUBLING_SECONDS: Final = 1.0
# Least requests per second. Lower rates result from the backoff between attempts.
_MIN_RATE: Final = 10.0
# Most requests per second: more than any server gets. Growth that doubles each second would exceed any number.
_MAX_RATE: Final = 1e5
# Seconds whose requests may be caught up at once after a late wake-up.
_CATCH_UP_SECONDS: Final = 0.05
# Initial and least value: two blocks of the default size, or requests enough where files are small.
MIN_BYTES: Final = 8 << 20
# Factor on the bytes that would be under way if each answer took its best time. The limit therefore grows with each
# round in which all do, and three quarters and more of a link without other traffic are used (simulated; with 2.5, two
# thirds).
_HEADROOM: Final = 4.0
# A round ends when as many bytes have come as were under way, and at least after this time.
_ROUND_SECONDS: Final = 0.02
# Part of the recent maximum that is forgotten per second.
_FORGET: Final = 0.02
# Least seconds after which an earlier best time is forgotten; at most twice as many.
_REMEMBERED: Final = 60.0
# Seconds after a decrease in which there is no other: requests that were sent before it are still answered.
HOLD_SECONDS: Final = 0.25
# Factors on the limit after a refusal, and after slow answers.
_REFUSED_FACTOR: Final = 0.5
_SLOWER_FACTOR: Final = 0.8
# Part of the bound below which slowness does not lower the number.
_MIN_SHARE: Final = 0.25


class EventRate:
    """Measures the recent events per second."""

    __slots__ = ("_began", "_count", "_earlier", "_earlier_began")

    def __init__(self, now: float) -> None:
        self._began = self._earlier_began = now  # of this window and the one before
        self._count = self._earlier = 0  # events in them

    def count_event(self, now: float) -> None:
        """Count one event."""
        if now - self._began >= _WINDOW:
            idle = now - self._began >= 2 * _WINDOW
            self._earlier_began = now - _WINDOW if idle else self._began
            self._earlier = 0 if idle else self._count
            self._began, self._count = now, 0
        self._count += 1

    def rate(self, now: float) -> float:
        """Return the larger of the rates over the last two windows and over the earlier one, in events per second: a
        rate that was possible then still is."""
        both = (self._earlier + self._count) / max(now - self._earlier_began, _WINDOW / 2)
        return max(both, self._earlier / max(self._began - self._earlier_began, _WINDOW))


class _PrefixRate:
    """The learned rate of one prefix."""

    __slots__ = ("accepted", "cut", "free", "known", "rate", "refused", "since")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate  # requests per second, as of `since`
        self.known = 0.0  # the rate after the last decrease
        self.since = self.cut = self.refused = now  # `cut`: last decrease; `refused`: last refusal
        self.free = now  # when the next request may be sent
        self.accepted = EventRate(now)

    def grow(self, now: float) -> None:
        seconds, self.since = now - self.since, now
        growth = max(_MIN_GROWTH, _GROWTH * self.rate) * 2.0 ** ((now - self.refused) / _DOUBLING_SECONDS)
        self.rate = min(_MAX_RATE, self.rate + seconds * growth)

    def lower(self, now: float) -> None:
        self.refused = now
        if now - self.cut < _HOLD:
            return
        self.cut = self.since = now
        measured = min(self.rate, _BELOW_FACTOR * self.accepted.rate(now))
        # Few accepted requests may just mean few requests.
        self.rate = self.known = max(_MIN_RATE, measured, min(self.rate, self.known) / 2)


class RequestRates:
    """The known rates of the prefixes of one server. *now* is seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[str, _PrefixRate] = OrderedDict()  # the last refused one is last

    @property
    def is_limited(self) -> bool:
        """True where any rate is known."""
        return bool(self._prefixes)

    @property
    def lowest(self) -> float:
        """The lowest rate of a prefix, in requests per second; inf where none has a limit."""
        return min((prefix.rate for prefix in self._prefixes.values()), default=math.inf)

    def rate(self, prefix: str) -> float:
        """Return the requests per second; inf where there is no limit."""
        found = self._prefixes.get(prefix)
        return found.rate if found is not None else math.inf

    def schedule_request(self, prefix: str, now: float) -> float:
        """Return when a request that is ready *now* may be sent, and count it as sent then."""
        found = self._prefixes.get(prefix)
        if found is None:
            return now
        if now - found.refused >= FORGET_SECONDS:
            del self._prefixes[prefix]
            return now
        found.grow(now)
        found.free = max(found.free, now - _CATCH_UP_SECONDS) + 1 / found.rate
        return max(now, found.free)

    def note_accepted(self, prefix: str, now: float) -> None:
        """Count a good answer."""
        if (found := self._prefixes.get(prefix)) is not None:
            found.accepted.count_event(now)

    def note_refused(self, prefix: str, sent: float, now: float) -> None:
        """Record that a request was refused, as there are too many.

        sent: about how many requests per second are sent to the server, at most; 0 where unknown.
        """
        found = self._prefixes.get(prefix)
        if found is not None:
            found.lower(now)
            self._prefixes.move_to_end(prefix)
            return
        if sent < _MIN_RATE:
            return
        # Accepted requests are counted from now on, for the next refusal.
        self._prefixes[prefix] = _PrefixRate(sent, now)
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)


class ReadaheadLimit:
    """The limit for one server. *now* is seconds of one monotonic clock."""

    __slots__ = ("_best", "_busy", "_earlier", "_needed", "_received", "_round", "_since")

    def __init__(self) -> None:
        # By number of binary digits of a request's bytes: the shortest seconds since `_since`, and before.
        self._best: dict[int, float] = {}
        self._earlier: dict[int, float] = {}
        self._since = -math.inf
        # Recent maximum of the bytes that would be under way if each answer took its best time.
        self._needed = 0.0
        # The current round: its begin; bytes that have come; sum of bytes times seconds of their best answers.
        self._round = math.inf
        self._received = 0
        self._busy = 0.0

    @property
    def max_bytes(self) -> float:
        """Most bytes that readahead may have under way; a single read may exceed them."""
        return max(float(MIN_BYTES), _HEADROOM * self._needed)

    def note_response(self, size: int, seconds: float, now: float) -> None:
        """Record a good answer to a request for *size* bytes after *seconds*."""
        if now - self._since >= _REMEMBERED:
            self._earlier, self._best, self._since = self._best, {}, now
        kind = size.bit_length()
        self._best[kind] = min(seconds, self._best.get(kind, math.inf))
        self._round = min(self._round, now - seconds)
        self._received += size
        self._busy += size * min(self._best[kind], self._earlier.get(kind, math.inf))
        if self._received >= self.max_bytes and now - self._round >= _ROUND_SECONDS:
            took = now - self._round
            self._needed = max(self._busy / took, self._needed * max(0.0, 1 - _FORGET * took))
            self._round, self._received, self._busy = now, 0, 0.0


class AimdConcurrency:
    """The limit for one server. *now* is seconds of one monotonic clock."""

    def __init__(self, max_width: int) -> None:
        """max_width: requests at once, never exceeded."""
        self.max_width = max_width
        self._width = float(max_width)
        self._cut = -math.inf  # time of the last decrease

    @property
    def width(self) -> int:
        """Most requests that may be under way; at least 1."""
        return int(self._width)

    @property
    def is_lowered(self) -> bool:
        """True where the limit is below its bound."""
        return self._width < self.max_width

    def note_response(self) -> None:
        """Record a good answer."""
        self._width = min(float(self.max_width), self._width + 1 / self._width)

    def note_refusal(self, needed: float, now: float) -> None:
        """Record that the server has refused a request, as there are too many.

        needed: concurrent requests that the server's allowed rate takes, 0 where unknown. Fewer would waste a part of
        that rate.
        """
        if now - self._cut >= HOLD_SECONDS:
            self._cut = now
            self._width = max(1.0, min(self._width, max(self._width * _REFUSED_FACTOR, needed)))

    def note_slowdown(self, now: float) -> None:
        """Record that answers take much longer than before."""
        floor = max(1.0, self.max_width * _MIN_SHARE)
        if now - self._cut >= HOLD_SECONDS and self._width > floor:
            self._cut = now
            self._width = max(floor, self._width * _SLOWER_FACTOR)
