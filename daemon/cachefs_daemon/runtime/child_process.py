"""Sets up a child process of the daemon, which ends with it."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import Final

# Of prctl(2).
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


def set_up_child(name: str, parent: int) -> bool:
    """Set up the process; call this first. name: shown in lists of processes, 15 characters at most; parent: process id
    of the daemon. Return False where the daemon has ended already: then this process must end too."""
    # These signals are for the daemon, which ends this process when it no longer needs it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Where memory is short, the kernel should end this process, which loses nothing, before the daemon.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("300")
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, name.encode())
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
