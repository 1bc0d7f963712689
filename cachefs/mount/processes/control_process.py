"""The process that reads the control FIFO of a mount, started when a program wants to write, ended when no writer is
left.

It is separate from the workers since lines are untrusted: a line of 64 MiB takes up to 3.4 s and half a gigabyte to
decode, and requests must not wait for that. When memory is short, the kernel kills this process before any other. A
process without a heartbeat is replaced: writers who have the FIFO open get EPIPE, and writers who open it wait for the
next process.
"""

import contextlib
import logging
import os
import select
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio

from cachefs.errors import CachefsError
from cachefs.mount import device
from cachefs.mount.child_process import LineRateLimit, RestartBackoff, fork_watched
from cachefs.mount.control import line_reader
from cachefs.mount.control.control_directory import fifo_path
from cachefs.mount.control.line_reader import ControlReader
from cachefs.mount.daemon_link import DaemonLink
from cachefs.mount.namespace import shown_datasets
from cachefs.mount.processes.worker import MountState
from cachefs.rpc import DaemonClient

# A process without a heartbeat for this long is killed and replaced, as writers wait for it. The slowest line takes 3.4
# s (64 MiB of empty paths).
SILENT_SECONDS: Final = 10
HEARTBEAT_SECONDS: Final = 1.0
# Most lines about the control file that are logged per second: untrusted users can trigger them.
MAX_LINES: Final = 10

log = logging.getLogger(__name__)


class ControlProcess:
    """Starts, watches and replaces the process. Used by the mount's supervisor."""

    def __init__(self, mount: MountState) -> None:
        self._mount = mount
        self._pid: int | None = None
        self._pidfd = -1
        self._restarts = RestartBackoff()
        self._heartbeats = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # counted up by each heartbeat
        self._silent_seconds = 0  # seconds since the last heartbeat

    @property
    def wakeup_descriptors(self) -> list[int]:
        """Descriptors that become readable when `keep_running` has something to do."""
        if self._pid is not None:
            return [self._pidfd]
        return [self._mount.control_wakeup] if self._restarts.is_due else []

    def keep_running(self) -> None:
        """Start or reap the process. To be called when one of `wakeup_descriptors` is readable, or about once a second.
        `wakeup_descriptors` must be read anew before each wait."""
        if self._pid is not None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if not ended:
                return
            self._pid = None  # the next process starts only once no selector watches the old descriptor
            if status:
                how = os.waitstatus_to_exitcode(status)
                self._restarts.record_end(f"the process that reads the control file ended with {how}")
                # Writers that the process knew may still wait, and do not look the name up again.
                os.eventfd_write(self._mount.control_wakeup, 1)
            return
        if self._pidfd >= 0:
            # Closed only once no selector has it registered: where another process of the mount has inherited the
            # descriptor, the kernel would keep the registration, and report it for ever.
            os.close(self._pidfd)
            self._pidfd = -1
        if self._restarts.is_due and select.select([self._mount.control_wakeup], [], [], 0)[0]:
            try:
                self._pid, self._pidfd = fork_watched("control", self._mount.directory, self._run_process)
            except OSError as error:
                self._restarts.record_end(f"no process reads the control file: {error.strerror}")
            else:
                self._restarts.record_start()
                self._silent_seconds = 0

    def kill_if_silent(self) -> None:
        """Kill a process without heartbeats. To be called once a second; the calls are the clock, as in
        WorkerPool.replace_silent."""
        try:
            os.eventfd_read(self._heartbeats)
            self._silent_seconds = 0
        except BlockingIOError:
            self._silent_seconds += 1
        if self._pid is not None and self._silent_seconds == SILENT_SECONDS + 1:
            log.warning(
                "the process that reads the control file (process %d) sends no heartbeats and is killed", self._pid
            )
            os.kill(self._pid, signal.SIGKILL)

    def kill_process(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _run_process(self) -> None:
        for descriptor in device.device_descriptors():
            os.close(descriptor)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        mount = self._mount
        logging.getLogger(line_reader.__name__).addFilter(LineRateLimit(MAX_LINES, seconds=1))
        client = DaemonClient(mount.options.socket, for_unknown_user=True)
        first, *later = mount.views.read_new()
        last = later[-1] if later else first

        def datasets() -> Mapping[str, str]:
            nonlocal last
            *_, last = last, *mount.views.read_new()
            with contextlib.suppress(CachefsError):
                shown = shown_datasets(mount.spec, first.view.datasets, last.view.datasets)
                return {dataset.name: dataset.snapshot for dataset in shown}
            return {}

        reader = ControlReader(fifo_path(mount.directory), mount.control_wakeup, datasets)

        async def read() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_heartbeats)
                await reader.run(DaemonLink(client))
                nursery.cancel_scope.cancel()

        trio.run(read)
        client.close()

    async def _send_heartbeats(self) -> None:
        """Send heartbeats from the loop that reads, as a worker does."""
        while True:
            os.eventfd_write(self._heartbeats, 1)
            await trio.sleep(HEARTBEAT_SECONDS)
