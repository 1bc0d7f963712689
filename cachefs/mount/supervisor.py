"""The supervisor: mounts, keeps workers, guard and pusher running, and unmounts. It lives as long as the mount.

The supervisor holds the device, and does nothing that could fail or wait: it uses no gRPC, no event loop and no files
of the node.
"""

import ctypes
import functools
import logging
import os
import resource
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs.messages import DatasetView, MountReport, NodeView
from cachefs.mount import child_process, kernel, shield
from cachefs.mount.control_process import ControlProcess
from cachefs.mount.guard import ConnectionGuard
from cachefs.mount.namespace import named_datasets
from cachefs.mount.node_view import ViewLog
from cachefs.mount.options import MountOptions
from cachefs.mount.origin_overlap import check_apart_from_origins
from cachefs.mount.pusher_process import PusherProcess
from cachefs.mount.reads import read_records
from cachefs.mount.registration import register_mount
from cachefs.mount.session import FuseSession, open_session
from cachefs.mount.shutdown import MountShutdown
from cachefs.mount.worker import MountState
from cachefs.mount.worker_pool import WorkerPool
from cachefs.mount_spec import MountSpec, SpecDataset

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
WORKER_END_SECONDS: Final = 3.0
# Open files that each process of a mount may have.
MAX_OPEN_FILES: Final = 1 << 16


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
        wanted, told_to_end = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
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
            wanted,
            marks,
            failures,
            readers,
            told_to_end,
        )

    def run(self, interposer: ctypes.CDLL | None, mounted: Callable[[], None], ready: Callable[[], None]) -> None:
        """Mount, call *mounted*, call *ready* once reads are answered; return when the mount has ended, also after a
        signal (cachefs.mount.shutdown). Raises CachefsError."""
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
            is_told = ending.check_signals()
            if is_told and not self._is_serving:
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
                if is_told and ending.advance_shutdown(workers.latest_requests()):
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
