"""Limits the bytes that all peers together have on the way to this node (incast).

Many senders that answer at once overflow the queue of the switch port towards the receiver, and each drop costs a
timeout of TCP. The receiver therefore requests no more at a time than keeps its link busy:

    2 g <= W    and    C (RTT + serve) <= W <= C RTT + Q

with grains of g bytes, a link of C bytes a second, and a queue of Q bytes. C, RTT and the time to serve are measured. Q
is not known: it begins at 256 KiB, which the smallest switches have for a port, or at a millisecond of a faster link,
whose switches have more; retransmissions halve it. Where a window needs more, a larger Q is tried: it stays where
blocks then come faster without retransmissions, and else returns to its old value. Where both bounds cannot be met, the
upper one decides, since a drop costs more than an idle moment.

With a single peer there is no incast: its bytes come through its own link first, and TCP controls the rest. A single
peer may have several windows on the way, so that neither side waits for the other's processors.

Incast happens at the switch port of one link. A node with several network cards has a window for each of them, which
learns from the bytes of that card alone. A single peer that sends through several of its own links into one card counts
as several peers.

Limiting requests instead of sends is the idea of receiver-driven transports. The rate is estimated as in BBR (Cardwell
et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016): the maximum of the last seconds.
"""

import math
from collections import deque
from typing import Final

# Bytes of a grain: one request, for planning. Larger blocks count with all their bytes.
GRAIN_BYTES: Final = 128 << 10
# Bytes of the queue of a switch port, at first and at most.
INITIAL_QUEUE_BYTES: Final = 256 << 10
MAX_QUEUE_BYTES: Final = 4 << 20
# Seconds of the link's rate that a queue is assumed to hold at first, and below which it counts as 0.
_INITIAL_DEPTH_SECONDS: Final = 0.001
_MIN_DEPTH_SECONDS: Final = 0.0001
# Most bytes of the window: those of one request message.
MAX_WINDOW_BYTES: Final = 64 << 20
# Factor on the window that just keeps the link busy, so that small delays leave no gap.
_GAIN: Final = 1.5
# Windows that a single peer may have on the way; halved by retransmissions. On two busy processors 3 MB brought 1.15
# times the bytes of 1 MB, and 8 MB no more.
_SINGLE_PEER_WINDOWS: Final = 4.0
# Assumptions before any measurement: bytes a second of a link of 1 Gbit/s, and seconds.
_FIRST_RATE: Final = 1.25e8
_FIRST_LATENCY: Final = 0.0005
# Most seconds that a latency counts as.
_MAX_LATENCY: Final = 0.1
# Seconds for which measurements count.
_REMEMBERED: Final = 10.0
# Least and most seconds over which a rate is measured: longer ones were held up, here or there.
_MIN_SPAN: Final = 0.02
_MAX_SPAN: Final = 1.0
# A trial of a larger queue takes at least this many windows; the factor on the queue; the factor on the rate from which
# the larger queue stays.
_TRIAL_WINDOWS: Final = 48
_GROWTH: Final = 1.5
_MIN_GAIN: Final = 1.04
# Seconds between a trial without gain, or retransmissions, and the next trial: at first, at most.
_HOLD: Final = 1.0
_MAX_HOLD: Final = 60.0
# Weight of each new time in the smoothed one.
_SMOOTHING: Final = 1 / 32


class RecentBest:
    """The best measurement of the last seconds, by buckets of a tenth of that time."""

    def __init__(self, first: float, *, largest: bool) -> None:
        self.value = first
        self._sign = 1.0 if largest else -1.0
        self._buckets: deque[tuple[float, float]] = deque()  # (begin, best value) of each

    def add(self, value: float, now: float) -> None:
        if self._buckets and now - self._buckets[-1][0] < _REMEMBERED / 10:
            began, best = self._buckets[-1]
            self._buckets[-1] = began, max(best, value * self._sign)
        else:
            self._buckets.append((now, value * self._sign))
            while now - self._buckets[0][0] > _REMEMBERED:
                self._buckets.popleft()
        self.value = max(best for _, best in self._buckets) * self._sign

    def is_recent(self, now: float) -> bool:
        """Return whether anything was measured in the last seconds."""
        return bool(self._buckets) and now - self._buckets[-1][0] <= _REMEMBERED


class ReceiveWindow:
    """The window of one network card of a node. *now* is seconds of one monotonic clock."""

    def __init__(self, fixed: int = 0) -> None:
        """fixed: bytes set by configuration; 0 to learn them."""
        self._fixed = fixed
        self._rate = RecentBest(_FIRST_RATE, largest=True)  # bytes a second
        self._latency = _FIRST_LATENCY  # seconds from a question to the first byte of its answer, smoothed
        self._round_trip = RecentBest(_FIRST_LATENCY / 2, largest=False)
        self._queue = float(INITIAL_QUEUE_BYTES)
        self._depth = _INITIAL_DEPTH_SECONDS
        self._kept_queue = self._queue  # the value before the trial
        self._kept_rate = 0.0  # bytes a second before the trial; 0: no trial
        self._trial_bytes = 0
        self._trial_began = 0.0
        self._single_peer_windows = _SINGLE_PEER_WINDOWS
        self._hold = _HOLD
        self._held_until = -math.inf
        self._span_began = -math.inf
        self._span_bytes = 0
        self.size = fixed or self._compute_size()  # bytes

    @property
    def rate(self) -> float:
        """Best rate, in bytes a second."""
        return self._rate.value

    @property
    def queue(self) -> int:
        """Bytes that the queue of the switch is assumed to hold."""
        return int(self._queue_bytes)

    @property
    def single_peer_size(self) -> int:
        """Bytes that may be on the way from a single peer while no other is asked."""
        return self.size if self._fixed else int(min(MAX_WINDOW_BYTES, self.size * self._single_peer_windows))

    def can_request(self, in_flight: int, length: int, *, is_single_peer: bool = False) -> bool:
        """Return whether to request a block of *length* bytes while *in_flight* bytes are on the way. A first block is
        always allowed, and one larger than half of the window once the rest of the one before is no larger.
        is_single_peer: whether a single peer is asked."""
        size = self.single_peer_size if is_single_peer else self.size
        return in_flight == 0 or in_flight + min(length, self.size // 2) <= size

    def note_latency(self, latency: float, round_trip: float, now: float) -> None:
        """Record the seconds from a request to the first byte of its answer. round_trip: of its connection."""
        self._latency += (min(max(0.0, latency), _MAX_LATENCY) - self._latency) * _SMOOTHING
        if round_trip > 0:
            self._round_trip.add(round_trip, now)
        self._update()

    def note_received(self, count: int, now: float, *, is_full: bool) -> None:
        """Count bytes. is_full: whether the window was full, so that more could not have been requested."""
        if not is_full:
            # The rate was limited by the requests.
            self._span_began = -math.inf
            return
        if now - self._span_began > _MAX_SPAN:  # also the first one
            self._span_began, self._span_bytes = now, 0
            return
        self._span_bytes += count
        self._trial_bytes += count
        if now - self._span_began >= _MIN_SPAN:
            self._rate.add(self._span_bytes / (now - self._span_began), now)
            self._span_began, self._span_bytes = now, 0
            self._judge_trial(now)
            self._update()

    def note_retransmissions(self, packets: int, now: float) -> None:
        """Record packets that peers had to retransmit."""
        if packets <= 0 or now < self._held_until:
            return  # or the packets were sent before the window was reduced
        self._queue = self._kept_queue if self._kept_rate else max(float(INITIAL_QUEUE_BYTES), self._queue / 2)
        self._depth = self._depth / 2 if self._depth > _MIN_DEPTH_SECONDS else 0.0
        self._single_peer_windows = max(1.0, self._single_peer_windows / 2)
        self._end_trial(now)
        self._update()

    def _judge_trial(self, now: float) -> None:
        """Begin or judge a trial of a larger queue."""
        if self._trial_bytes < _TRIAL_WINDOWS * self.size:
            return
        rate = self._trial_bytes / max(1e-6, now - self._trial_began)
        self._trial_bytes, self._trial_began = 0, now
        if self._kept_rate and rate < self._kept_rate * _MIN_GAIN:
            self._queue = self._kept_queue
            self._end_trial(now)
        elif now >= self._held_until and self._queue < MAX_QUEUE_BYTES and self._needed > self._upper_bound:
            self._kept_queue, self._kept_rate = self._queue, rate
            self._queue = self._queue_bytes * _GROWTH
        else:
            self._kept_rate = 0.0

    def _end_trial(self, now: float) -> None:
        self._kept_rate, self._trial_bytes, self._trial_began = 0.0, 0, now
        self._held_until = now + self._hold
        self._hold = min(_MAX_HOLD, self._hold * 2)

    @property
    def _needed(self) -> float:
        """Bytes that keep the link busy."""
        return self._rate.value * self._latency * _GAIN + 2 * GRAIN_BYTES

    @property
    def _queue_bytes(self) -> float:
        """Bytes that the queue of the switch is assumed to hold."""
        return max(self._queue, min(MAX_QUEUE_BYTES, self._rate.value * self._depth))

    @property
    def _upper_bound(self) -> float:
        """Bytes that the switch can hold."""
        return max(2.0 * GRAIN_BYTES, self._rate.value * self._round_trip.value + self._queue_bytes)

    def _compute_size(self) -> int:
        return int(min(MAX_WINDOW_BYTES, self._needed, self._upper_bound))

    def _update(self) -> None:
        if not self._fixed:
            self.size = self._compute_size()
