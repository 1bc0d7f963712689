"""How many requests per second a server takes for one prefix, learned from those that it refuses.

A server that limits the rate says so only by refusals. What it accepts meanwhile is its limit. So at a refusal the rate
falls to what was accepted of late, less a little, so that the server's own bucket fills again. Then it grows, slowly at
first, twice as fast every second, and until the next refusal. When none has come for a minute, the prefix has no
limit any more.
"""

import math
from collections import OrderedDict
from typing import Final

# Prefixes whose rates are known, at most. The one that was refused longest ago is forgotten.
MOST: Final = 64
# Seconds without a refusal after which a prefix has no limit any more.
FORGOTTEN: Final = 60.0
# Seconds over which accepted requests are counted, and between two decreases.
_WINDOW: Final = 0.25
_HOLD: Final = 0.5
# What the rate is of what was accepted.
_BELOW: Final = 0.98
# By how much it grows at first: a part of it per second, and requests per second per second, whichever is more.
_GROWTH: Final = 0.01
_LEAST_GROWTH: Final = 1.0
# Seconds in which growth doubles.
_DOUBLES: Final = 1.0
# Requests per second, at least. Fewer are a matter of the pauses between attempts.
_LEAST: Final = 10.0
# The same, at most: more than any server is asked. Growth that doubles each second would go beyond any number.
_MOST_RATE: Final = 1e5
# Seconds whose requests may be made up for at once, by one who wakes up late.
_CATCH_UP: Final = 0.05


class Meter:
    """Events per second, of late."""

    __slots__ = ("_began", "_count", "_earlier", "_earlier_began")

    def __init__(self, now: float) -> None:
        self._began = self._earlier_began = now  # of this window and the one before
        self._count = self._earlier = 0  # events in them

    def count(self, now: float) -> None:
        """One event."""
        if now - self._began >= _WINDOW:
            idle = now - self._began >= 2 * _WINDOW
            self._earlier_began = now - _WINDOW if idle else self._began
            self._earlier = 0 if idle else self._count
            self._began, self._count = now, 0
        self._count += 1

    def rate(self, now: float) -> float:
        """Events per second, over the last two windows or over the earlier one: what was possible then is possible."""
        both = (self._earlier + self._count) / max(now - self._earlier_began, _WINDOW / 2)
        return max(both, self._earlier / max(self._began - self._earlier_began, _WINDOW))


class _Prefix:
    """What is known of one prefix."""

    __slots__ = ("accepted", "cut", "free", "known", "rate", "refused", "since")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate  # requests per second, as of `since`
        self.known = 0.0  # after the last time that it was lowered
        self.since = self.cut = self.refused = now  # `cut`: when it was lowered last; `refused`: the last refusal
        self.free = now  # when the next request may be sent
        self.accepted = Meter(now)

    def grow(self, now: float) -> None:
        seconds, self.since = now - self.since, now
        growth = max(_LEAST_GROWTH, _GROWTH * self.rate) * 2.0 ** ((now - self.refused) / _DOUBLES)
        self.rate = min(_MOST_RATE, self.rate + seconds * growth)

    def lower(self, now: float) -> None:
        self.refused = now
        if now - self.cut < _HOLD:
            return
        self.cut = self.since = now
        measured = min(self.rate, _BELOW * self.accepted.rate(now))
        # Where little was asked for, little was accepted.
        self.rate = self.known = max(_LEAST, measured, min(self.rate, self.known) / 2)


class RequestRates:
    """The rates of the prefixes of one server that have one. *now* is seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[str, _Prefix] = OrderedDict()  # the one refused last is the last one

    @property
    def is_limited(self) -> bool:
        """Is any rate known?"""
        return bool(self._prefixes)

    @property
    def lowest(self) -> float:
        """Requests per second of the prefix that may have the fewest; inf where none has a limit."""
        return min((prefix.rate for prefix in self._prefixes.values()), default=math.inf)

    def rate(self, prefix: str) -> float:
        """Requests per second; inf where there is no limit."""
        found = self._prefixes.get(prefix)
        return found.rate if found is not None else math.inf

    def when(self, prefix: str, now: float) -> float:
        """When a request that is ready *now* may be sent. It counts as sent then."""
        found = self._prefixes.get(prefix)
        if found is None:
            return now
        if now - found.refused >= FORGOTTEN:
            del self._prefixes[prefix]
            return now
        found.grow(now)
        found.free = max(found.free, now - _CATCH_UP) + 1 / found.rate
        return max(now, found.free)

    def accepted(self, prefix: str, now: float) -> None:
        """A request was answered as it should be."""
        if (found := self._prefixes.get(prefix)) is not None:
            found.accepted.count(now)

    def refused(self, prefix: str, sent: float, now: float) -> None:
        """A request was refused, as there are too many.

        sent: about how many per second are sent to the server, at most; 0 where nobody knows.
        """
        found = self._prefixes.get(prefix)
        if found is not None:
            found.lower(now)
            self._prefixes.move_to_end(prefix)
            return
        if sent < _LEAST:
            return
        # From here on accepted requests are counted, and the next refusal knows better.
        self._prefixes[prefix] = _Prefix(sent, now)
        if len(self._prefixes) > MOST:
            self._prefixes.popitem(last=False)
