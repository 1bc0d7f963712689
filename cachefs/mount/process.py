"""Child processes of a mount, which are forked from its supervisor and end with it."""

import contextlib
import ctypes
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NoReturn

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
# States in /proc/PID/stat of a process that somebody has stopped (a debugger: t), or that is about to end.
_HELD: Final = b"TtZX"

_killed: set[int] = set()  # process ids of children that were killed and have not ended yet


def fork(name: str, directory: Path, work: Callable[[], None], *, ends_with_parent: bool = True) -> int:
    """Fork a child that does *work* and then ends; returns its process id. The caller must have one thread only.

    name: what `ps -o comm` and `top` show, up to 15 bytes; directory: of the mount, for the log; ends_with_parent: the
    child is killed when this process ends, in whatever way. Raises OSError.
    """
    parent = os.getpid()
    gc.freeze()  # keeps the collector from copying the parent's pages
    pid = os.fork()
    if pid:
        return pid
    _begin(name, parent if ends_with_parent else 0)
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        log.exception("the process %r of the mount on %s failed", name, directory)
    _end(status)


def fork_watched(name: str, directory: Path, work: Callable[[], None]) -> tuple[int, int]:
    """As `fork`. Returns the process id, and a descriptor that can be read when the child has ended.

    Raises OSError; then there is no child, whose end nobody would notice.
    """
    pid = fork(name, directory, work)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        kill(pid)
        raise


def close_all_but(kept: Iterable[int]) -> None:
    """Close the descriptors that a child has inherited, but *kept*, its standard streams and its log.

    The objects that own them must not be used in the child, and must live until it ends.
    """
    needed = {0, 1, 2, *kept}
    for handler in logging.getLogger().handlers:
        file = getattr(handler, "stream", None) or getattr(handler, "socket", None)
        if file is not None:
            needed.add(file.fileno())
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - needed:
        with contextlib.suppress(OSError):  # the one by which they were listed
            os.close(descriptor)


def kill(pid: int) -> None:
    """Kill a child and do not wait for its end: one that hangs in the kernel, as at a disk, ends when that answers."""
    os.kill(pid, signal.SIGKILL)
    _killed.add(pid)
    reap_killed()


def reap_killed() -> None:
    """To be called now and then, so that no children stay as zombies that were left by `kill`."""
    _killed.difference_update([pid for pid in _killed if _has_ended(pid)])


def _has_ended(pid: int) -> bool:
    """Returns whether a child has ended, also where its end was taken note of elsewhere."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def is_held(pid: int) -> bool:
    """Does a child stand still because somebody has stopped it, or because it is about to end?"""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return status.rpartition(b") ")[2][:1] in _HELD


def is_sibling(pid: int) -> bool:
    """Is *pid*, a process or thread, a child of this process's parent: of the supervisor, if a child of it asks?"""
    try:
        return f"\nPPid:\t{os.getppid()}\n".encode() in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False


def _begin(name: str, parent: int) -> None:
    """Give up the parent's signal handlers. A terminal's Ctrl-C and end are meant for the parent alone, which unmounts.

    parent: whose end is to be the child's, 0 for none.
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
            _end(1)


def _end(status: int) -> NoReturn:
    """End without the parent's exit handlers, and without waiting for threads, which may wait for our own mount."""
    logging.shutdown()
    os._exit(status)
