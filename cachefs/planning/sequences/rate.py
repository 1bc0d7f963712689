"""How fast a consumer reads, and how fast it would if it never waited."""

from typing import Final, NamedTuple

# The rate is that of so many seconds.
RATE_SECONDS: Final = 3.0
# A rate that was reached is taken for possible for this long, though it may have become invisible since.
RATE_HALF_LIFE: Final = 10.0
# Over less than this many seconds a rate says nothing.
SHORTEST_SPAN: Final = 0.2
# Who waits nearly always is taken to be busy for this part of the time.
LEAST_BUSY: Final = 0.1


class _Mark(NamedTuple):
    when: float  # seconds
    done: int  # reads until then
    waited: float  # seconds until then, of all readers together


class ReadRate:
    """The rate of one consumer."""

    def __init__(self) -> None:
        self.value = 0.0  # reads per second, 0 until it is known
        self.demand = 0.0  # the same with the time spent waiting left out
        self._done = 0  # reads so far
        self._waited = 0.0  # seconds so far
        self._marks: list[_Mark] = []  # of the last seconds

    def count(self, reads: int) -> None:
        """So many more reads are done."""
        self._done += reads

    def measure(self, now: float, waited: float, readers: int) -> None:
        """To be called every now and then. now: seconds; waited: seconds that the consumer's *readers* parallel readers
        have waited since the last call."""
        self._waited += waited
        self._marks.append(_Mark(now, self._done, self._waited))
        while len(self._marks) > 2 and now - self._marks[1].when >= RATE_SECONDS:
            del self._marks[0]
        since = self._marks[0]
        span = now - since.when
        if span < SHORTEST_SPAN or self._done == since.done:
            return
        self.value = (self._done - since.done) / span
        busy = max(LEAST_BUSY, 1 - (self._waited - since.waited) / max(1, readers) / span)
        faded = self.demand * 0.5 ** ((now - self._marks[-2].when) / RATE_HALF_LIFE)
        self.demand = max(self.value / busy, faded)
