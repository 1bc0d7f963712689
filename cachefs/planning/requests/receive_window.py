"""How many bytes a node lets all its peers together have on the way to it (incast).

Many senders that answer at once overflow the queue of the switch port towards the receiver, and each drop costs a
timeout of TCP. So the receiver asks for no more at a time than keeps its link busy:

    2 g <= W    and    C (RTT + serve) <= W <= C RTT + Q

with grains of g bytes, a link of C bytes a second, and a queue of Q bytes. C, RTT and the time to serve are measured.
Q is not known: it begins at 256 KiB, which the smallest switches have for a port, or at a millisecond of a faster link,
whose switches have more; where something is sent twice, it is halved. Where a window needs more, it is
tried out: Q stays larger where blocks come faster then and nothing is sent twice, and else is what it was. What decides
is the upper bound where the two cannot both be met, since a drop costs more than an idle moment.

While only one peer is asked, there is no incast: what it sends comes through its own link first, and TCP sees to the
rest. It may then have some times as much on the way, so that neither side waits for the other's processors.

To bound what is asked for, and not what is sent, is the idea of receiver-driven transports; the rate is taken as BBR
takes it (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016): the largest of the last
seconds.
"""

import math
from collections import deque
from typing import Final

# Bytes of a grain: what is asked for in one piece, for planning. Larger blocks count with all their bytes.
GRAIN: Final = 128 << 10
# Bytes of the queue of a switch port, at first and at most.
FIRST_QUEUE: Final = 256 << 10
MOST_QUEUE: Final = 4 << 20
# Seconds that a queue is assumed to last at first, and that make no difference any more.
_FIRST_DEPTH: Final = 0.001
_LEAST_DEPTH: Final = 0.0001
# Bytes of the window, at most: those of a question.
MOST: Final = 64 << 20
# How many times the window is that which just keeps the link busy: what takes a moment longer then leaves no gap.
_GAIN: Final = 1.5
# How many times the window a single peer may have on the way; halved where something is sent twice. On two busy
# processors 3 MB brought 1.15 times the bytes of 1 MB, and 8 MB no more.
_ALONE: Final = 4.0
# What is assumed before anything was measured: bytes a second of a link of 1 Gbit/s, and seconds.
_FIRST_RATE: Final = 1.25e8
_FIRST_LATENCY: Final = 0.0005
# Seconds that a latency counts as, at most.
_LONGEST: Final = 0.1
# Seconds for which measurements count.
_REMEMBERED: Final = 10.0
# Seconds over which a rate is measured, at least and at most: what takes longer was held up, here or there.
_SPAN: Final = 0.02
_LONGEST_SPAN: Final = 1.0
# A larger queue is tried out over so many windows, at least; it is so many times larger, and stays where the rate is so
# many times higher.
_TRIAL_WINDOWS: Final = 48
_GROWTH: Final = 1.5
_WORTH: Final = 1.04
# Seconds between a trial that gained nothing, or packets that were sent twice, and the next trial: at first, at most.
_HOLD: Final = 1.0
_LONGEST_HOLD: Final = 60.0
# The part of each new time in the smoothed one.
_SMOOTHING: Final = 1 / 32


class _Best:
    """The best of what was measured in the last seconds, by buckets of a tenth of that time."""

    def __init__(self, first: float, *, largest: bool) -> None:
        self.value = first
        self._sign = 1.0 if largest else -1.0
        self._buckets: deque[tuple[float, float]] = deque()  # when each began, and the best in it

    def add(self, value: float, now: float) -> None:
        if self._buckets and now - self._buckets[-1][0] < _REMEMBERED / 10:
            began, best = self._buckets[-1]
            self._buckets[-1] = began, max(best, value * self._sign)
        else:
            self._buckets.append((now, value * self._sign))
            while now - self._buckets[0][0] > _REMEMBERED:
                self._buckets.popleft()
        self.value = max(best for _, best in self._buckets) * self._sign


class ReceiveWindow:
    """*now* is seconds of one monotonic clock."""

    def __init__(self, fixed: int = 0) -> None:
        """fixed: bytes, where people know better; 0 to learn it."""
        self._fixed = fixed
        self._rate = _Best(_FIRST_RATE, largest=True)  # bytes a second
        self._latency = _FIRST_LATENCY  # seconds from a question to the first byte of its answer, smoothed
        self._round_trip = _Best(_FIRST_LATENCY / 2, largest=False)
        self._queue = float(FIRST_QUEUE)
        self._depth = _FIRST_DEPTH
        self._kept_queue = self._queue  # what it was before the trial
        self._kept_rate = 0.0  # bytes a second before the trial; 0: there is none
        self._trial_bytes = 0
        self._trial_began = 0.0
        self._alone = _ALONE
        self._hold = _HOLD
        self._held_until = -math.inf
        self._span_began = -math.inf
        self._span_bytes = 0
        self.size = fixed or self._sized()  # bytes

    @property
    def rate(self) -> float:
        """Bytes a second that have come at best."""
        return self._rate.value

    @property
    def queue(self) -> int:
        """Bytes that the queue of the switch is assumed to hold."""
        return int(self._held)

    @property
    def alone(self) -> int:
        """Bytes that may be on the way from a single peer while no other is asked."""
        return self.size if self._fixed else int(min(MOST, self.size * self._alone))

    def room(self, in_flight: int, length: int, *, alone: bool = False) -> bool:
        """May a block of *length* bytes be asked for while others of *in_flight* bytes are on the way? One always may.
        What is larger than half of the window is asked for when the rest of the one before is not. alone: is a single
        peer asked?"""
        size = self.alone if alone else self.size
        return in_flight == 0 or in_flight + min(length, self.size // 2) <= size

    def answered(self, latency: float, round_trip: float, now: float) -> None:
        """The first byte of an answer came so many seconds after its question. round_trip: of its connection."""
        self._latency += (min(max(0.0, latency), _LONGEST) - self._latency) * _SMOOTHING
        if round_trip > 0:
            self._round_trip.add(round_trip, now)
        self._update()

    def received(self, count: int, now: float, *, is_full: bool) -> None:
        """Bytes have come. is_full: the window was, so that more could not have been asked for."""
        if not is_full:
            # Less may have come than could.
            self._span_began = -math.inf
            return
        if now - self._span_began > _LONGEST_SPAN:  # also the first one
            self._span_began, self._span_bytes = now, 0
            return
        self._span_bytes += count
        self._trial_bytes += count
        if now - self._span_began >= _SPAN:
            self._rate.add(self._span_bytes / (now - self._span_began), now)
            self._span_began, self._span_bytes = now, 0
            self._try(now)
            self._update()

    def sent_twice(self, packets: int, now: float) -> None:
        """Peers had to send packets again."""
        if packets <= 0 or now < self._held_until:
            return  # or it was sent before the window has shrunk
        self._queue = self._kept_queue if self._kept_rate else max(float(FIRST_QUEUE), self._queue / 2)
        self._depth = self._depth / 2 if self._depth > _LEAST_DEPTH else 0.0
        self._alone = max(1.0, self._alone / 2)
        self._end_trial(now)
        self._update()

    def _try(self, now: float) -> None:
        """Is the queue larger than was thought?"""
        if self._trial_bytes < _TRIAL_WINDOWS * self.size:
            return
        rate = self._trial_bytes / max(1e-6, now - self._trial_began)
        self._trial_bytes, self._trial_began = 0, now
        if self._kept_rate and rate < self._kept_rate * _WORTH:
            self._queue = self._kept_queue
            self._end_trial(now)
        elif now >= self._held_until and self._queue < MOST_QUEUE and self._needed > self._upper:
            self._kept_queue, self._kept_rate = self._queue, rate
            self._queue = self._held * _GROWTH
        else:
            self._kept_rate = 0.0

    def _end_trial(self, now: float) -> None:
        self._kept_rate, self._trial_bytes, self._trial_began = 0.0, 0, now
        self._held_until = now + self._hold
        self._hold = min(_LONGEST_HOLD, self._hold * 2)

    @property
    def _needed(self) -> float:
        """Bytes that keep the link busy."""
        return self._rate.value * self._latency * _GAIN + 2 * GRAIN

    @property
    def _held(self) -> float:
        """Bytes that the queue of the switch is assumed to hold."""
        return max(self._queue, min(MOST_QUEUE, self._rate.value * self._depth))

    @property
    def _upper(self) -> float:
        """Bytes that the switch can hold."""
        return max(2.0 * GRAIN, self._rate.value * self._round_trip.value + self._held)

    def _sized(self) -> int:
        return int(min(MOST, self._needed, self._upper))

    def _update(self) -> None:
        if not self._fixed:
            self.size = self._sized()
