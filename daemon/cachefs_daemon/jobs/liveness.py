"""How long somebody who published something is taken to be there."""

from cachefs_daemon.runtime import pid_namespaces
from cachefs_daemon.runtime.boot_clock import Moment, birth_of


class Liveness:
    """A process of this node counts as there for as long as it lives. Somebody without one (pid 0, or one that the
    daemon does not see) does until *seconds* have passed without a sign of life. *now* is seconds of a monotonic
    clock."""

    def __init__(self, pid: int, seconds: float, now: float, namespace: int = 0) -> None:
        """pid: number of the process in the pid namespace with that inode number; 0: in the daemon's own."""
        self.seconds = seconds
        self._given = (pid, namespace)
        # Whether `look` has to be called, before which nobody knows of a process.
        self.is_elsewhere = pid > 0 and namespace not in (0, pid_namespaces.own())
        self.pid = 0 if self.is_elsewhere else pid  # for the daemon
        self.born: Moment | None = birth_of(self.pid)  # None: the daemon sees no such process
        self._renewed = now  # when there was a sign of life

    def look(self) -> None:
        """Look for a process of another namespace. Blocks: call it in a thread."""
        pid = pid_namespaces.find(*self._given)
        self.born, self.pid = birth_of(pid), pid

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
