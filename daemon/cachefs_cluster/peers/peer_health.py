"""The health of one peer: whether it gets requests.

A dead peer must not cost a timeout per requested block, so one failure of its connection stops all requests to it. It
is then probed, on a separate connection and with growing pauses, and gets requests again once a probe succeeds. A peer
that answers BUSY is alive, and gets none for a moment.
"""

from typing import Final

from cachefs.backoff import Backoff

# Seconds to the first probe after a failure, and the longest pause between probes; pauses double. Up to a quarter is
# added at random, so that the nodes of a cluster do not probe in step.
FIRST_PAUSE: Final = 0.25
MAX_PAUSE: Final = 30.0
_SPREAD: Final = 0.25
# Seconds for which a busy peer gets no requests: at first, and at most.
FIRST_BUSY_SECONDS: Final = 0.02
MAX_BUSY_SECONDS: Final = 1.0


class PeerHealth:
    """The state of one peer. *now* is in seconds of one monotonic clock, *chance* a random number from 0 to 1."""

    __slots__ = ("_busy", "_probes", "is_out_of_use", "probe_at", "reason")

    def __init__(self) -> None:
        self.is_out_of_use = False
        self.reason = ""  # why it gets no requests
        self.probe_at = 0.0  # when to probe it next, while it gets no requests
        self._probes = Backoff(FIRST_PAUSE, MAX_PAUSE)
        self._busy = Backoff(FIRST_BUSY_SECONDS, MAX_BUSY_SECONDS)

    def is_busy(self, now: float) -> bool:
        """Return whether the peer answered BUSY a moment ago."""
        return not self._busy.is_due(now)

    def note_failure(self, reason: str, now: float, chance: float) -> bool:
        """Record that a connection could not be made, broke, or fell silent. Return whether the peer was in use."""
        first = not self.is_out_of_use
        if first:
            self.is_out_of_use, self.reason = True, reason
            self._schedule_probe(now, chance)
        return first

    def note_probe(self, *, alive: bool, now: float, chance: float) -> None:
        """Record the end of a probe. Until the peer answers a request too, its next failure gets a longer pause."""
        if alive:
            self.is_out_of_use = False
        else:
            self._schedule_probe(now, chance)

    def note_response(self) -> None:
        """Record that the peer answered a request."""
        self.is_out_of_use = False
        self._probes.reset()

    def note_block(self) -> None:
        """Record that the peer sent a block."""
        self._busy.forget_failures()

    def note_busy(self, now: float) -> None:
        """Record that the peer answered BUSY."""
        if self._busy.is_due(now):
            self._busy.note_failure(now)

    def _schedule_probe(self, now: float, chance: float) -> None:
        self.probe_at = now + self._probes.note_failure(now) * (1 + _SPREAD * chance)
