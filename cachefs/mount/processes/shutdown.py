"""Ends a mount after a signal, without ever leaving an empty directory under a program that reads the mount.

The kernel refuses to unmount a mount that has open files, mappings or working directories. It does not know of a loader
between two files, whose next open would find the empty directory below the mount: no error, but a missing file. A mount
that gets SIGTERM is therefore unmounted only when QUIET_WATCHES consecutive watches have seen no use: the kernel calls
the mount free, no process opens anything of it, no process that has read it still runs
(cachefs.mount.reads.read_records), and no published job reads through it. If the grace (mount option `grace`) ends
first, the mount's connection is ended and the mount point stays: every use is an error (ENOTCONN) until `cachectl
umount`, `umount` or the next mount removes it. Where no use was seen at all, the watches may go on for UNUSED_SECONDS
beyond the grace, so that a free mount does not stay dead because the grace is short or the node busy.

A child process watches, since watching may block. Watches count rather than time: a child that gets no processor has
seen nothing. Without root the kernel does not report opens. The kernel's cache of names is then invalidated once a
second (Linux 6.16), so that each open by path is a request; not below a shield, where programs that read would get
errors.
"""

import contextlib
import logging
import os
import signal
import time
from typing import Final

from cachefs.errors import Busy, CachefsError
from cachefs.job_messages import JobView
from cachefs.messages import Empty
from cachefs.mount import child_process, device, kernel
from cachefs.mount.child_process import RestartBackoff
from cachefs.mount.device import FuseConnection
from cachefs.mount.mount_use import WATCH_SECONDS, describe_users, watch_opens
from cachefs.mount.processes.worker import MountState
from cachefs.mount.reads.read_records import ReaderTable
from cachefs.mount_table import find_mount_point
from cachefs.rpc import JOB_LIST, DaemonClient

log = logging.getLogger(__name__)

# Consecutive watches without use after which a mount counts as free.
QUIET_WATCHES: Final = 5
# Seconds beyond the grace in which a mount without observed use may still be found free. The watches take 6 s, and
# longer on a busy node.
UNUSED_SECONDS: Final = 10.0
# Signals within this time after the first one are echoes of it.
_ECHO_SECONDS: Final = 1.0
_JOBS_TIMEOUT: Final = 2.0
# A watch's message: whether the kernel reported opens, then how the mount was used, empty where it was not.
_MESSAGE: Final = 256
_WATCHED_MARK: Final = "w"
_UNWATCHED_MARK: Final = "u"
_RUNNING: Final = "running"
_OPEN_FILES: Final = "files or directories of it are open"


class MountShutdown:
    """Ends one mount. Handles the signals of its process that ask for the end."""

    def __init__(self, mount: MountState, fuse_device: int, connection: FuseConnection) -> None:
        """fuse_device: a descriptor of the FUSE connection."""
        self.signals = _listen_to_signals()  # a descriptor, readable once a signal has come
        self._mount = mount
        self._device = fuse_device
        self._connection = connection
        self._signalled_at = 0.0  # time of the first signal (monotonic seconds)
        self._deadline = 0.0  # end of the grace (monotonic seconds); 0 before the first signal
        self._end_at = 0.0  # when the mount ends even if no use was seen (monotonic seconds)
        self._quiet_watches = 0  # consecutive watches that have seen no use
        self._last_use = ""  # the last use since the signal
        self._is_watched = True  # whether the kernel reports opens
        self._last_requests: tuple[int, ...] = ()
        # Messages of the watches: each read returns the message of one watch.
        self._reader, self._writer = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._watcher: int | None = None  # process id
        self._restarts = RestartBackoff()

    def check_signals(self) -> bool:
        """Return whether a signal has asked for the end. The first signal starts the watches, a further one ends the
        grace.

        Signals within a second of the first one are its echo: the kernel reports a parent's death (PR_SET_PDEATHSIG)
        once for each thread of the parent.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self.signals, 4096)
            now = time.monotonic()
            if not self._deadline:
                os.eventfd_write(self._mount.end_request, 1)
                self._signalled_at, self._deadline = now, now + self._mount.options.grace
                self._end_at = self._deadline + UNUSED_SECONDS
                log.info(
                    "shutdown requested: %s is unmounted after %.0f s without use, within %.0f s",
                    self._mount.directory, _quiet_seconds(), self._mount.options.grace,
                )  # fmt: skip
                if self._connection.is_visible:
                    self._keep_watcher_running()
            elif now - self._signalled_at > _ECHO_SECONDS:
                self._deadline = self._end_at = now
        return self._deadline > 0

    def advance_shutdown(self, requests: tuple[int, ...]) -> bool:
        """Advance the end; to be called about once a second after a signal. Returns whether the mount may end now: it
        is unmounted, or the grace is over.

        requests: changes with each request that the workers take.
        """
        if is_seen := self._connection.is_visible:
            self._keep_watcher_running()
            self._read_watches(requests)
        else:  # another mount is at the directory, and must not be unmounted
            self.kill_watcher()
            self._record_use("it was detached, or something is mounted over it")
        if self._quiet_watches >= QUIET_WATCHES and self._try_unmount():
            return True
        now = time.monotonic()
        if now < self._deadline:
            return False
        if self._last_use in ("", _OPEN_FILES):
            self._last_use = describe_users(self._mount.directory) or self._last_use
        if not self._last_use and now < self._end_at:
            return False
        log.warning(
            "the grace of %s is over, and it was never seen unused (%s): from now on, all requests to the mount fail "
            "with ENOTCONN%s",
            self._mount.directory, self._last_use or f"it was not watched for {_quiet_seconds():.0f} s",
            f", until `cachectl umount {self._mount.directory}`" if is_seen else "",
        )  # fmt: skip
        return True

    def kill_watcher(self) -> None:
        if self._watcher is not None:
            with contextlib.suppress(ProcessLookupError):
                child_process.kill_child(self._watcher)
            self._watcher = None

    def _read_watches(self, requests: tuple[int, ...]) -> None:
        with contextlib.suppress(BlockingIOError):
            while message := os.read(self._reader, _MESSAGE).decode(errors="replace"):
                self._is_watched = message[0] == _WATCHED_MARK
                if use := message[1:]:
                    self._record_use(use)
                else:
                    self._quiet_watches += 1
        if self._is_watched:
            return
        before, self._last_requests = self._last_requests, requests
        if before not in ((), requests):
            self._record_use("its files are looked up or read")
        # Below a shield, overlayfs answers ESTALE for a name that the kernel looks up anew.
        point = find_mount_point(self._mount.directory)
        if point is not None and point.shielded_connection is None:
            device.invalidate_names(self._device)

    def _record_use(self, how: str) -> None:
        self._quiet_watches, self._last_use = 0, how

    def _try_unmount(self) -> bool:
        try:
            kernel.unmount(self._mount.directory)
        except Busy:
            self._last_use = _OPEN_FILES
        except CachefsError as error:
            self._last_use = str(error)
        else:
            return True
        return False

    def _keep_watcher_running(self) -> None:
        """Start the watching process where none runs: signals to the whole group or unit end it as well."""
        if self._watcher is not None and os.waitpid(self._watcher, os.WNOHANG)[0]:
            self._restarts.record_end(f"the process that watches the use of the mount ({self._watcher}) is gone")
            self._watcher = None
            self._quiet_watches = 0  # its last observation is lost
        if self._watcher is None and self._restarts.is_due:
            try:
                self._watcher = child_process.fork("ending", self._mount.directory, self._watch_uses)
            except OSError as error:
                self._restarts.record_end(f"no process watches the use of the mount: {error.strerror}")
            else:
                self._restarts.record_start()

    def _watch_uses(self) -> None:
        """In the child: report the use seen by each watch to the supervisor."""
        for descriptor in device.device_descriptors():
            os.close(descriptor)
        client = DaemonClient(self._mount.options.socket)
        readers = ReaderTable(self._mount.reader_table, self._mount.pid)
        can_watch = True
        while True:
            use = self._find_reading_job(client) or readers.describe_living_reader()
            opened: set[int] = set()
            try:
                if can_watch:
                    opened = watch_opens(self._mount.directory, WATCH_SECONDS, _is_own)
            except OSError as error:
                log.info("opens of %s cannot be watched: %s", self._mount.directory, error.strerror)
                can_watch = False
            if not can_watch:
                time.sleep(WATCH_SECONDS)
            if opened:
                use = use or "its files are opened"
            # Blocks until the supervisor reads: no observed use may be lost.
            os.write(self._writer, ((_WATCHED_MARK if can_watch else _UNWATCHED_MARK) + use).encode()[:_MESSAGE])
            for pid in opened:
                readers.record_reader(pid)

    def _find_reading_job(self, client: DaemonClient) -> str:
        """Return which running job has published reads through this mount, or reads of one of its datasets without
        naming a mount; empty where no such job is known."""
        try:
            jobs = client.call(JOB_LIST, Empty(), timeout=_JOBS_TIMEOUT).jobs
        except CachefsError:
            return ""
        point = find_mount_point(self._mount.directory)
        here = "" if point is None else point.device
        running = (job for job in jobs if job.state == _RUNNING)
        return next((f"job {job.job} reads it" for job in running if self._may_read(job, here)), "")

    def _may_read(self, job: JobView, device: str) -> bool:
        devices = {consumer.mount_device for consumer in job.consumers} or {""}
        return device in devices or ("" in devices and any(map(self._mount.spec.is_showing, job.dataset.split(","))))


def _quiet_seconds() -> float:
    """Return the least number of seconds without use after which a mount is free."""
    return QUIET_WATCHES * WATCH_SECONDS


def _is_own(pid: int) -> bool:
    """Return whether *pid* is a process of this mount: the supervisor, or one of its children."""
    return pid == os.getppid() or child_process.is_sibling(pid)


def _listen_to_signals() -> int:
    """Return a descriptor that becomes readable once a signal has asked for the end."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return reader
