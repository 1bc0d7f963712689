"""How long somebody who published something is taken to be there."""

from cachefs_daemon.runtime import pid_namespaces
from cachefs_daemon.runtime.boot_clock import Moment, birth_of
from cachefs_daemon.runtime.process_users import users_of


class Liveness:
    """A process of this node counts as there for as long as it lives. Somebody without one (pid 0, one that the daemon
    does not see, or another user's) does until *seconds* have passed without a sign of life. Of somebody unknown both
    counts. *now* is seconds of a monotonic clock."""

    def __init__(self, pid: int, seconds: float, now: float, namespace: int = 0, owner: int | None = 0) -> None:
        """pid: number of the process in the pid namespace with that inode number; 0: in the daemon's own; owner: id of
        the user who names it, None for somebody unknown. Root may name anybody's."""
        self.seconds = seconds
        self._given = (pid, namespace)
        self._owner = owner
        # Whether `look` has to be called, before which nobody knows of a process.
        self.is_elsewhere = pid > 0 and namespace not in (0, pid_namespaces.own())
        self.pid = 0  # for the daemon
        self.born: Moment | None = None  # None: the daemon sees no such process of the user's
        self._renewed = now  # when there was a sign of life
        if not self.is_elsewhere:
            self._take(pid)

    def look(self) -> None:
        """Look for a process of another namespace. Blocks: call it in a thread."""
        self._take(pid_namespaces.find(*self._given))

    def _take(self, pid: int) -> None:
        if self._owner in (0, None) or self._owner in users_of(pid):
            self.born, self.pid = birth_of(pid), pid

    def renew(self, now: float) -> None:
        """There is a sign of life."""
        self._renewed = now

    def silence(self, now: float) -> float:
        """Seconds since the last sign of life."""
        return now - self._renewed

    def lapsed(self, now: float) -> str:
        """Why it is over; an empty text while it is not."""
        if self.born is not None and birth_of(self.pid) != self.born:
            return f"its process {self.pid} is gone"
        if self.born is not None and self._owner is not None:
            return ""
        return f"no sign of life for {self.seconds:.0f} s" if self.silence(now) > self.seconds else ""
