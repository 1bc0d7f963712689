"""Child processes of a mount, which are forked from its supervisor and end with it."""

import ctypes
import gc
import logging
import os
import signal
from collections.abc import Callable
from typing import Final, NoReturn

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


def fork(name: str, work: Callable[[], None], *, ends_with_parent: bool = True) -> int:
    """Fork a child that does *work* and then ends; returns its process id. The caller must have one thread only.

    name: what `ps -o comm` and `top` show, up to 15 bytes; ends_with_parent: the child is killed when this process
    ends, in whatever way. Raises OSError.
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
        log.exception("a process of the mount failed")
    _end(status)


def _begin(name: str, parent: int) -> None:
    """Give up the parent's signal handlers. A terminal's Ctrl-C is meant for the parent alone, which unmounts.

    parent: whose end is to be the child's, 0 for none.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
