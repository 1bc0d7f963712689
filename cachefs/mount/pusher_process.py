"""The pusher of a mount (see cachefs.mount.push) as its supervisor keeps it: started, and restarted when it ends."""

import logging
import os
import subprocess
import sys
from typing import Final

from cachefs.mount import device
from cachefs.mount.restarts import Restarts
from cachefs.mount.session import Session
from cachefs.mount.worker import Mount
from cachefs.mount_spec import MountSpec

log = logging.getLogger(__name__)

_END_SECONDS: Final = 5.0


class PusherProcess:
    """The pusher's process."""

    def __init__(self, mount: Mount, spec: MountSpec, session: Session) -> None:
        self._command = _command(mount, spec)
        self._session = session
        self._marks = mount.marks
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = Restarts()

    def tend(self) -> None:
        """Start the process where it does not run; to be called every second or so."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self._process = None
            # It exits with 0 when the mount has ended.
            level = logging.WARNING if status else logging.DEBUG
            self._restarts.end(f"the pusher ended with status {status}", level=level)
        if self._process is None and self._restarts.is_due:
            try:
                self._process = self._start()
            except OSError as error:
                self._restarts.end(f"the pusher cannot be started: {error}")
            else:
                self._restarts.begin()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("the pusher (process %d) does not die", self._process.pid)

    def _start(self) -> subprocess.Popen[bytes]:
        clone = device.clone(self._session.device, blocking=True)
        try:
            number = self._session.connection.number
            command = [
                *self._command, "--device", str(clone), "--connection", str(number), "--marks", str(self._marks),
            ]  # fmt: skip
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(clone, self._marks))
        finally:
            os.close(clone)


def _command(mount: Mount, spec: MountSpec) -> list[str]:
    command = [
        sys.executable, "-P", "-m", "cachefs.mount.push", "--spec", str(spec), "--directory", str(mount.directory),
        "--mount", mount.id, "--socket", str(mount.options.socket), "--budget", mount.options.page_cache_budget,
        "--parent", str(os.getpid()),
    ]  # fmt: skip
    if not mount.options.push:
        command.append("--only-check")
    if mount.options.log is not None:
        command += ["--log", str(mount.options.log)]
    if log.isEnabledFor(logging.DEBUG):
        command.append("-v")
    return command
