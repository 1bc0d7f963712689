"""The guard: a process that ends the mount's connection when the mount's supervisor is gone.

Workers and pusher are killed with the supervisor, and the close of the last device would end the connection too. But a
pusher may wait for a page that a reader has locked. It cannot die before the reader's request is answered, and no
process is left to answer.
"""

import contextlib
import ctypes
import os
import select
import signal
from typing import Final

from cachefs.mount import device
from cachefs.mount.child_process import fork
from cachefs.mount.device import FuseConnection
from cachefs.mount.restart_backoff import RestartBackoff

_PR_SET_PDEATHSIG: Final = 1


class ConnectionGuard:
    """Starts and restarts the guard process. Used by the mount's supervisor."""

    def __init__(self, connection: FuseConnection) -> None:
        self._connection = connection
        self._pid: int | None = None  # of the guard process; None while none is known to run
        self._restarts = RestartBackoff()
        self.keep_running()

    def keep_running(self) -> None:
        """Start the guard process where none runs. To be called about once a second."""
        if self._pid is not None and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._restarts.record_end(f"the guard of the mount (process {self._pid}) is gone")
            self._pid = None
        if self._pid is None and self._restarts.is_due:
            try:
                self._pid = self._start_process()
            except OSError as error:  # a passing shortage is no reason to unmount
                self._restarts.record_end(f"the guard of the mount cannot be started: {error.strerror}")
            else:
                self._restarts.record_start()

    def kill_process(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _start_process(self) -> int:
        supervisor = os.pidfd_open(os.getpid())

        def watch() -> None:
            # All processes of the mount may be stopped when its supervisor is killed; SIGCONT resumes this one.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
            for descriptor in device.device_descriptors():
                os.close(descriptor)
            select.select([supervisor], [], [])
            self._connection.abort()

        try:
            return fork("guard", self._connection.directory, watch, ends_with_parent=False)
        finally:
            os.close(supervisor)
