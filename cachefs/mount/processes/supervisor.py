"""The supervisor: mounts, keeps workers, guard and pusher running, and unmounts. It lives as long as the mount.

The supervisor holds the device, and does nothing that could fail or wait: it uses no gRPC, no event loop and no files
of the node.

The guard is a process that ends the mount's connection when the supervisor is gone. Workers and pusher are killed with
the supervisor, and the close of the last device would end the connection too. But a pusher may wait for a page that a
reader has locked. It cannot die before the reader's request is answered, and no process is left to answer.
"""

import contextlib
import ctypes
import functools
import logging
import os
import resource
import select
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs.messages import DatasetView, MountReport, NodeView
from cachefs.mount import child_process, device, kernel, shield
from cachefs.mount.child_process import RestartBackoff, close_all_but, fork, kill_child
from cachefs.mount.device import FuseConnection
from cachefs.mount.namespace import named_datasets
from cachefs.mount.node_view import ViewLog
from cachefs.mount.options import MountOptions
from cachefs.mount.processes.control_process import ControlProcess
from cachefs.mount.processes.registration import check_apart_from_origins, register_mount
from cachefs.mount.processes.session import FuseSession, open_session
from cachefs.mount.processes.shutdown import MountShutdown
from cachefs.mount.processes.worker import MountState
from cachefs.mount.processes.worker_pool import WorkerPool
from cachefs.mount.push.pusher import PusherSettings, run_pusher
from cachefs.mount.reads import read_records
from cachefs.mount_spec import MountSpec, SpecDataset
from cachefs.sizes import parse_share

# A file from the SSD tier takes a thread 50 us of a processor and 130 us of waiting, in which other threads work.
_MAX_THREADS: Final = 4

# Seconds that the supervisor waits for the end of the pusher.
END_SECONDS: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
log = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
WORKER_END_SECONDS: Final = 3.0
# Open files that each process of a mount may have.
MAX_OPEN_FILES: Final = 1 << 16


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


def default_worker_count() -> int:
    """Return the number of workers of a mount without the option `workers`.

    One process answers 6,000 to 14,000 cold files per second, and a file that was pushed ahead needs no answer. More
    processes take processors from the job, which has use for all of them. There is therefore a second worker from four
    processors on, and further ones are added slowly.
    """
    processors = len(os.sched_getaffinity(0))
    return 1 if processors < 4 else min(4, processors // 4 + 1)


class Supervisor:
    """Runs one mount, from the registration with the daemon to unmounting. Raises CachefsError, with nothing
    mounted."""

    def __init__(self, spec: MountSpec, directory: Path, options: MountOptions) -> None:
        spec = spec.with_latest() if options.follow or spec.is_latest else spec
        identity = uuid.uuid4().hex
        view = register_mount(
            options, MountReport(id=identity, mountpoint=str(directory), spec=str(spec), pid=os.getpid())
        )
        spec = spec.resolve_url(view.datasets)
        self._shown_datasets = named_datasets(spec, view.datasets)
        _check_hides_nothing(directory, view, self._shown_datasets)
        check_apart_from_origins(directory, self._shown_datasets, view.datasets)
        wakeup, end_requested = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        marks, failures = read_records.create_read_marks(), read_records.create_read_marks()
        self._is_serving = False  # True once reads were answered: programs may rely on the mount
        readers = read_records.create_reader_table()
        self._mount = MountState(
            identity,
            os.getpid(),
            spec,
            directory,
            options,
            ViewLog(view),
            wakeup,
            marks,
            failures,
            readers,
            end_requested,
        )

    def run(self, interposer: ctypes.CDLL | None, mounted: Callable[[], None], ready: Callable[[], None]) -> None:
        """Mount, call *mounted*, call *ready* once reads are answered; return when the mount has ended, also after a
        signal (cachefs.mount.processes.shutdown). Raises CachefsError."""
        mount = self._mount
        _raise_soft_limit()
        session = open_session(mount.spec, mount.directory, mount.options, interposer)
        mounted()
        ending = MountShutdown(mount, session.device, session.connection)
        guard = ConnectionGuard(session.connection)
        workers = WorkerPool(mount, session, self._worker_count(session))
        control = ControlProcess(mount)
        pusher = PusherProcess(mount, self._pinned_spec(), session)
        try:
            begin = functools.partial(self._start_serving, session, ready)
            self._supervise(workers, control, guard, pusher, ending, begin)
            if workers.failure is not None:
                raise workers.failure
        finally:
            if not self._is_serving:
                self._unmount(session)
            ending.kill_watcher()
            # A mount that still exists may have readers, which would find an empty directory if it were detached.
            session.connection.abort()
            workers.end_workers(WORKER_END_SECONDS)
            control.kill_process()
            pusher.kill_process()
            guard.kill_process()

    def _supervise(
        self,
        workers: WorkerPool,
        control: ControlProcess,
        guard: ConnectionGuard,
        pusher: PusherProcess,
        ending: MountShutdown,
        ready: Callable[[], None],
    ) -> None:
        ticked = time.monotonic()
        while not workers.has_ended and workers.failure is None:
            workers.handle_events(TICK_SECONDS, [ending.signals, *control.wakeup_descriptors])
            control.keep_running()
            is_ending = ending.check_signals()
            if is_ending and not self._is_serving:
                return
            if workers.is_ready and not self._is_serving:
                ready()
            if self._is_serving:
                pusher.keep_running()
            if time.monotonic() - ticked >= TICK_SECONDS:
                ticked = time.monotonic()
                workers.check_workers()
                control.kill_if_silent()
                guard.keep_running()
                child_process.reap_killed()
                if is_ending and ending.advance_shutdown(workers.latest_requests()):
                    return

    def _start_serving(self, session: FuseSession, ready: Callable[[], None]) -> None:
        """Put up the shield and report the mount as ready. To be called when requests are answered. Raises
        CachefsError."""
        mount, options = self._mount, self._mount.options
        if options.readahead:
            kernel.raise_readahead(mount.directory, options.readahead)
        shield.put_up_shield(
            options.shield, mount.spec, mount.directory, session.connection, options.kernel, shared=options.allow_other
        )
        ready()
        self._is_serving = True

    def _unmount(self, session: FuseSession) -> None:
        """Detach a mount that no program uses yet."""
        if session.connection.is_visible:
            try:
                kernel.unmount(self._mount.directory, lazy=True, force=not session.connection.has_abort)
            except CachefsError as error:
                log.warning("%s", error)

    def _worker_count(self, session: FuseSession) -> int:
        wanted = self._mount.options.workers or default_worker_count()
        if wanted > 1 and not session.is_shared:
            log.warning("without zero-open, a single worker serves all requests")
            return 1
        return wanted

    def _pinned_spec(self) -> MountSpec:
        """Return the SPEC for the pusher, which may start later and must find the snapshot that this mount stays at."""
        if self._mount.spec.is_fixed:
            (dataset,) = self._shown_datasets
            return MountSpec((SpecDataset(dataset.name, dataset.snapshot),))
        return self._mount.spec


def _check_hides_nothing(directory: Path, view: NodeView, shown: Sequence[DatasetView]) -> None:
    """Raise CachefsError where the mount would hide files that its workers read: they would wait for themselves."""
    needed = [("the daemon's index", view.index)]
    needed += [(f"the {name} tier", path) for name, path in view.tiers.items()]
    needed += [(f"the snapshot of {dataset.name}", dataset.path) for dataset in shown]
    for name, path in needed:
        if Path(path).resolve().is_relative_to(directory):
            raise CachefsError(f"a mount on {directory} would cover {name} ({path}); choose another directory")


def _raise_soft_limit() -> None:
    """Raise the limit of open files for all processes of the mount: snapshots and segments are files, and each thread
    of the pusher keeps some open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
