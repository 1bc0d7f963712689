"""How long somebody who published something is taken to be there."""

import psutil


class Liveness:
    """A process of this node counts as there for as long as it lives. Somebody without one (pid 0, or that of another
    pid namespace) does until *seconds* have passed without a sign of life. *now* is seconds of a monotonic clock."""

    def __init__(self, pid: int, seconds: float, now: float) -> None:
        self.pid = pid
        self.seconds = seconds
        self.born = birth_of(pid)  # see there
        self._renewed = now  # when there was a sign of life

    def renew(self, now: float) -> None:
        """There is a sign of life."""
        self._renewed = now

    def silence(self, now: float) -> float:
        """Seconds since the last sign of life."""
        return now - self._renewed

    def lapsed(self, now: float) -> str:
        """Why it is over; an empty text while it is not."""
        if self.born:
            return "" if birth_of(self.pid) == self.born else f"its process {self.pid} is gone"
        return f"no sign of life for {self.seconds:.0f} s" if self.silence(now) > self.seconds else ""


def birth_of(pid: int) -> float:
    """When the process started (unix seconds), which tells it from a later one of the same number; 0 where there is
    none."""
    if pid <= 0:
        return 0.0
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return 0.0
