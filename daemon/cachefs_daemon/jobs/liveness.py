"""Determines whether the publisher of a consumer is still alive.

A publisher may be in a container. The first process of a pid namespace has number 1 in it. It, and all others in it,
have numbers of their own in every namespace around it, and the daemon is usually in one of these.
"""

import os
from pathlib import Path

from cachefs_daemon.runtime.boot_clock import BootMoment, birth_of
from cachefs_daemon.runtime.process_users import users_of

_PROC = Path("/proc")


def own_namespace() -> int:
    """Return the inode number of this process's pid namespace, by which others name it; 0 where unknown."""
    return namespace_of("self")


def namespace_of(pid: str) -> int:
    """Return the inode number of the pid namespace of a process; 0 where this process may not read it."""
    try:
        return os.stat(_PROC / pid / "ns" / "pid").st_ino
    except OSError:
        return 0


def find_pid(pid: int, namespace: int) -> int:
    """Return the number, here, of the process with the number *pid* in that namespace; 0 where it is not visible.
    Searches all processes (10 us each), so call it in a thread."""
    for name in os.listdir(_PROC):
        if name.isdigit() and namespace_of(name) == namespace and _pid_in_own_namespace(name) == pid:
            return int(name)
    return 0


def _pid_in_own_namespace(pid: str) -> int:
    """Return the number of a process in its own namespace; 0 where it has ended."""
    try:
        status = (_PROC / pid / "status").read_bytes()
    except OSError:
        return 0
    return next((int(line.split()[-1]) for line in status.splitlines() if line.startswith(b"NSpid:")), 0)


class PublisherLiveness:
    """A publisher with a process that the daemon sees lives as long as the process. One without (pid 0, one that the
    daemon does not see, or another user's) lives until *seconds* have passed without a heartbeat. For an unknown user
    both apply. *now* is seconds of a monotonic clock."""

    def __init__(self, pid: int, seconds: float, now: float, namespace: int = 0, owner: int | None = 0) -> None:
        """pid: number of the process in the pid namespace with that inode number; 0: the daemon's own namespace. owner:
        id of the user who names the process, None where unknown. Root may name any process."""
        self.seconds = seconds
        self._named_process = (pid, namespace)
        self._owner = owner
        # True until `find_process` is called: the process is in another namespace.
        self.is_in_other_namespace = pid > 0 and namespace not in (0, own_namespace())
        self.pid = 0  # its number in the daemon's namespace
        self.process_start: BootMoment | None = None  # None: the daemon sees no such process of that user
        self._renewed = now  # time of the last heartbeat
        if not self.is_in_other_namespace:
            self._set_process(pid)

    def find_process(self) -> None:
        """Find a process of another namespace. Blocks: call it in a thread."""
        self._set_process(find_pid(*self._named_process))

    def _set_process(self, pid: int) -> None:
        if self._owner in (0, None) or self._owner in users_of(pid):
            self.process_start, self.pid = birth_of(pid), pid

    def renew(self, now: float) -> None:
        """Record a heartbeat."""
        self._renewed = now

    def silence(self, now: float) -> float:
        """Return the seconds since the last heartbeat."""
        return now - self._renewed

    def end_reason(self, now: float) -> str:
        """Return the reason for which the publisher is gone, or ""."""
        if self.process_start is not None and birth_of(self.pid) != self.process_start:
            return f"its process {self.pid} has ended"
        if self.process_start is not None and self._owner is not None:
            return ""
        return f"no heartbeat for {self.seconds:.0f} s" if self.silence(now) > self.seconds else ""
