"""Starts and restarts the pusher of a mount (see cachefs.mount.push), for the mount's supervisor."""

import contextlib
import logging
import os
import select
from typing import Final

from cachefs.mount import device
from cachefs.mount.child_process import close_all_but, fork, kill_child
from cachefs.mount.push.process import run_pusher
from cachefs.mount.push.pusher import PusherSettings
from cachefs.mount.restart_backoff import RestartBackoff
from cachefs.mount.session import FuseSession
from cachefs.mount.worker import MountState
from cachefs.mount_spec import MountSpec
from cachefs.sizes import parse_share

log = logging.getLogger(__name__)

# A file from the SSD tier takes a thread 50 us of a processor and 130 us of waiting, in which other threads work.
_MAX_THREADS: Final = 4

# Seconds that the supervisor waits for the end of the pusher.
END_SECONDS: Final = 5.0


class PusherProcess:
    """Keeps the pusher process of a mount running."""

    def __init__(self, mount: MountState, spec: MountSpec, session: FuseSession) -> None:
        self._mount = mount
        self._spec = spec
        self._session = session
        self._pid: int | None = None
        self._restarts = RestartBackoff()

    def keep_running(self) -> None:
        """Start the process where it does not run. To be called about once a second."""
        if self._pid is not None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                self._pid = None
                # Status 0: the mount has ended.
                level = logging.WARNING if status else logging.DEBUG
                how = os.waitstatus_to_exitcode(status)
                self._restarts.record_end(f"the pusher ended with status {how}", level=level)
        if self._pid is None and self._restarts.is_due:
            try:
                self._pid = self._start_process()
            except OSError as error:
                self._restarts.record_end(f"the pusher cannot be started: {error}")
            else:
                self._restarts.record_start()

    def kill_process(self) -> None:
        """Kill the process, and wait some seconds for its end."""
        if self._pid is None:
            return
        with contextlib.ExitStack() as closing:
            watched = []
            with contextlib.suppress(OSError):  # where no descriptor is free
                # Opened before the kill, after which the number may be reused.
                watched.append(os.pidfd_open(self._pid))
                closing.callback(os.close, watched[0])
            kill_child(self._pid)
            if watched and not select.select(watched, [], [], END_SECONDS)[0]:
                log.warning("the pusher (process %d) does not die; does a disk of this node hang?", self._pid)

    def _start_process(self) -> int:
        clone = device.clone_device(self._session.device, blocking=True)
        parent = os.getpid()

        def work() -> None:
            connection = self._session.connection
            close_all_but({clone, self._mount.read_marks, *connection.control_files})
            run_pusher(self._make_settings(clone), connection, parent)

        try:
            return fork("pusher", self._mount.directory, work, ends_with_parent=False)
        finally:
            os.close(clone)

    def _make_settings(self, clone: int) -> PusherSettings:
        mount, options = self._mount, self._mount.options
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        return PusherSettings(
            clone, mount.read_marks, self._spec, mount.directory, mount.id, options.socket,
            parse_share(options.page_cache_budget), threads, options.push,
        )  # fmt: skip
