"""Child processes of a mount: forked from its supervisor and ended with it, restarted after growing pauses, and limited
in the log lines that untrusted users can make them write.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NoReturn

from cachefs.backoff import Backoff

LONGEST_PAUSE: Final = 60.0
log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
# States in /proc/PID/stat of a process that is stopped (t: by a debugger) or about to end.
_STOPPED_STATES: Final = b"TtZX"

_killed: set[int] = set()  # process ids of killed children that have not ended yet


class LineRateLimit(logging.Filter):
    """Passes at most *max_lines* lines per span of *seconds*. The next span's first line tells how many were
    dropped."""

    def __init__(self, max_lines: int, *, seconds: float) -> None:
        super().__init__()
        self._max_lines = max_lines
        self._seconds = seconds
        self._span = 0  # span of the last line, counted from 1970
        self._lines = 0  # lines in that span

    def filter(self, record: logging.LogRecord) -> bool:
        span = int(record.created // self._seconds)
        if span != self._span:
            dropped = max(0, self._lines - self._max_lines)
            if dropped:
                record.msg, record.args = f"{record.getMessage()} ({dropped} earlier lines left out)", None
            self._span, self._lines = span, 0
        self._lines += 1
        return self._lines <= self._max_lines


class RestartBackoff:
    """The backoff of one child process: a pause of *first* seconds, then of twice as many, and so on."""

    def __init__(self, first: float = 1.0, longest: float = LONGEST_PAUSE) -> None:
        """first, longest: pauses, in seconds."""
        self._backoff = Backoff(first, longest)  # in monotonic seconds
        self._began: float | None = None  # time of the start (monotonic seconds); None while it does not run

    @property
    def due(self) -> float:
        """Earliest time of the next start, in monotonic seconds."""
        return self._backoff.until

    @property
    def is_due(self) -> bool:
        """True when the process may be started."""
        return self._backoff.is_due(time.monotonic())

    def record_start(self) -> None:
        """Record a start."""
        self._began = time.monotonic()

    def record_end(self, what: str, *, level: int = logging.WARNING) -> None:
        """Record that the process has ended or could not be started. Logs *what* has happened, as a warning until the
        pause has reached its longest."""
        now = time.monotonic()
        backoff = self._backoff
        if self._began is not None and now - self._began > backoff.longest:
            backoff.reset()
        if backoff.failures and backoff.pause == backoff.longest:
            level = logging.DEBUG
        self._began = None
        log.log(level, "%s; the next is started in %.4g s", what, backoff.note_failure(now))


def fork(name: str, directory: Path, work: Callable[[], None], *, ends_with_parent: bool = True) -> int:
    """Fork a child that does *work* and then ends; return its process id. The caller must have one thread only.

    name: shown by `ps -o comm` and `top`, up to 15 bytes; directory: of the mount, for the log; ends_with_parent: kill
    the child when this process ends, in whatever way. Raises OSError.
    """
    parent = os.getpid()
    gc.freeze()  # keeps the collector from copying the parent's pages
    pid = os.fork()
    if pid:
        return pid
    _set_up_child(name, parent if ends_with_parent else 0)
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        log.exception("the process %r of the mount on %s failed", name, directory)
    _exit_child(status)


def fork_watched(name: str, directory: Path, work: Callable[[], None]) -> tuple[int, int]:
    """Fork as `fork` does. Returns the process id, and a descriptor that becomes readable when the child has ended.

    Raises OSError; then there is no child.
    """
    pid = fork(name, directory, work)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        kill_child(pid)
        raise


def close_all_but(kept: Iterable[int]) -> None:
    """Close the descriptors that a child has inherited, except *kept*, the standard streams and the log.

    The objects that own them must not be used in the child, and must live until it ends.
    """
    needed = {0, 1, 2, *kept}
    for handler in logging.getLogger().handlers:
        file = getattr(handler, "stream", None) or getattr(handler, "socket", None)
        if file is not None:
            needed.add(file.fileno())
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - needed:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
            os.close(descriptor)


def kill_child(pid: int) -> None:
    """Kill a child without waiting for its end: a child that hangs in the kernel, as at a disk, ends later."""
    os.kill(pid, signal.SIGKILL)
    _killed.add(pid)
    reap_killed()


def reap_killed() -> None:
    """Reap children ended by `kill_child`. To be called now and then, so that no zombies stay."""
    _killed.difference_update([pid for pid in _killed if _has_ended(pid)])


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, also where it was reaped elsewhere."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def is_stopped(pid: int) -> bool:
    """Return whether a child stands still because it was stopped or is about to end."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return status.rpartition(b") ")[2][:1] in _STOPPED_STATES


def is_sibling(pid: int) -> bool:
    """Return whether *pid*, a process or thread, has the same parent as this process: in a child, the supervisor."""
    try:
        return f"\nPPid:\t{os.getppid()}\n".encode() in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False


def _set_up_child(name: str, parent: int) -> None:
    """Give up the parent's signal handlers. A terminal's Ctrl-C and hang-up are meant for the parent alone, which
    unmounts.

    parent: the process whose death kills this one, 0 for none.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, name.encode())
    if parent:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            _exit_child(1)


def _exit_child(status: int) -> NoReturn:
    """End without the parent's exit handlers, and without waiting for threads, which may wait for this mount."""
    logging.shutdown()
    os._exit(status)
