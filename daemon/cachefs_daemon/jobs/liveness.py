"""How long somebody who published something is taken to be there."""

from cachefs_daemon.runtime.boot_clock import birth_of


class Liveness:
    """A process of this node counts as there for as long as it lives. Somebody without one (pid 0, or that of another
    pid namespace) does until *seconds* have passed without a sign of life. *now* is seconds of a monotonic clock."""

    def __init__(self, pid: int, seconds: float, now: float) -> None:
        self.pid = pid
        self.seconds = seconds
        self.born = birth_of(pid)  # None: the daemon sees no such process
        self._renewed = now  # when there was a sign of life

    def renew(self, now: float) -> None:
        """There is a sign of life."""
        self._renewed = now

    def silence(self, now: float) -> float:
        """Seconds since the last sign of life."""
        return now - self._renewed

    def lapsed(self, now: float) -> str:
        """Why it is over; an empty text while it is not."""
        if self.born is not None:
            return "" if birth_of(self.pid) == self.born else f"its process {self.pid} is gone"
        return f"no sign of life for {self.seconds:.0f} s" if self.silence(now) > self.seconds else ""
