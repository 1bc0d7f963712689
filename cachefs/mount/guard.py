"""A process that ends the mount's connection when its supervisor is gone.

Workers and pusher are killed then, and the last device closed ends the connection too; but a pusher that waits for a
page which a reader has locked cannot die before that reader's request is answered, by nobody.
"""

import contextlib
import logging
import os
import select
import signal

from cachefs.mount import device
from cachefs.mount.device import Connection
from cachefs.mount.process import fork

log = logging.getLogger(__name__)


class Guard:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pid: int | None = None
        self.tend()

    def tend(self) -> None:
        """Have one, or another where it is gone; to be called every second or so."""
        if self._pid is not None and os.waitpid(self._pid, os.WNOHANG)[0]:
            log.warning("the guard of the mount (process %d) is gone and is replaced", self._pid)
            self._pid = None
        if self._pid is None:
            try:
                self._pid = self._start()
            except OSError as error:  # what is short now is no reason to unmount
                log.warning("no guard: %s", error.strerror)

    def end(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _start(self) -> int:
        supervisor = os.pidfd_open(os.getpid())

        def watch() -> None:
            for descriptor in device.descriptors():
                os.close(descriptor)
            select.select([supervisor], [], [])
            self._connection.abort()

        try:
            return fork("guard", watch, ends_with_parent=False)
        finally:
            os.close(supervisor)
