"""Learns from refusals how many requests per second a server takes for one prefix.

A server with a rate limit reveals it only by refusals; the requests it accepts meanwhile are its limit. A refusal
therefore lowers the rate to slightly less than was recently accepted, so that the server's own bucket fills again. Then
the rate grows, slowly at first and twice as fast every second, until the next refusal. After a minute without one, the
prefix has no limit any more.
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
