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
from cachefs.mount import kernel, process, read_marks, reader_table, shield
from cachefs.mount.attach import attach
from cachefs.mount.control_process import ControlProcess
from cachefs.mount.ending import Ending
from cachefs.mount.guard import Guard
from cachefs.mount.namespace import wanted_datasets
from cachefs.mount.options import MountOptions
from cachefs.mount.origin_overlap import check_apart_from_origins
from cachefs.mount.pusher_process import PusherProcess
from cachefs.mount.session import Session, open_session
from cachefs.mount.view_log import ViewLog
from cachefs.mount.worker import Mount
from cachefs.mount.worker_pool import WorkerPool
from cachefs.mount_spec import MountSpec, Part

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
GOODBYE_SECONDS: Final = 3.0
# Open files that each process of a mount may have.
MOST_FILES: Final = 1 << 16


def default_workers() -> int:
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
        spec = spec.following() if options.follow or spec.latest else spec
        identity = uuid.uuid4().hex
        view = attach(options, MountReport(id=identity, mountpoint=str(directory), spec=str(spec), pid=os.getpid()))
        spec = spec.resolved(view.datasets)
        self._shown = wanted_datasets(spec, view.datasets)
        _check_hides_nothing(directory, view, self._shown)
        check_apart_from_origins(directory, self._shown, view.datasets)
        wanted, told_to_end = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        marks, failures = read_marks.create(), read_marks.create()
        self._begun = False  # True once reads were answered: programs may rely on the mount
        readers = reader_table.create()
        self._mount = Mount(
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
        signal (cachefs.mount.ending). Raises CachefsError."""
        mount = self._mount
        _raise_soft_limit()
        session = open_session(mount.spec, mount.directory, mount.options, interposer)
        mounted()
        ending = Ending(mount, session.device, session.connection)
        guard = Guard(session.connection)
        workers = WorkerPool(mount, session, self._worker_count(session))
        control = ControlProcess(mount)
        pusher = PusherProcess(mount, self._pinned_spec(), session)
        try:
            begin = functools.partial(self._begin, session, ready)
            self._supervise(workers, control, guard, pusher, ending, begin)
            if workers.failure is not None:
                raise workers.failure
        finally:
            if not self._begun:
                self._unmount(session)
            ending.close()
            # A mount that still exists may have readers, which would find an empty directory if it were detached.
            session.connection.abort()
            workers.end(GOODBYE_SECONDS)
            control.end()
            pusher.end()
            guard.end()

    def _supervise(
        self,
        workers: WorkerPool,
        control: ControlProcess,
        guard: Guard,
        pusher: PusherProcess,
        ending: Ending,
        ready: Callable[[], None],
    ) -> None:
        ticked = time.monotonic()
        while not workers.over and workers.failure is None:
            workers.wait(TICK_SECONDS, [ending.signals, *control.wakes])
            control.tend()
            is_told = ending.is_told()
            if is_told and not self._begun:
                return
            if workers.ready and not self._begun:
                ready()
            if self._begun:
                pusher.tend()
            if time.monotonic() - ticked >= TICK_SECONDS:
                ticked = time.monotonic()
                workers.tend()
                control.kill_silent()
                guard.tend()
                process.reap_killed()
                if is_told and ending.tend(workers.requests()):
                    return

    def _begin(self, session: Session, ready: Callable[[], None]) -> None:
        """Put up the shield and report the mount as ready. To be called when requests are answered. Raises
        CachefsError."""
        mount, options = self._mount, self._mount.options
        if options.readahead:
            kernel.raise_readahead(mount.directory, options.readahead)
        shield.put_up(
            options.shield, mount.spec, mount.directory, session.connection, options.kernel, shared=options.allow_other
        )
        ready()
        self._begun = True

    def _unmount(self, session: Session) -> None:
        """Detach a mount that no program uses yet."""
        if session.connection.is_seen:
            try:
                kernel.unmount(self._mount.directory, lazy=True, force=not session.connection.has_abort)
            except CachefsError as error:
                log.warning("%s", error)

    def _worker_count(self, session: Session) -> int:
        wanted = self._mount.options.workers or default_workers()
        if wanted > 1 and not session.shared:
            log.warning("without zero-open one worker serves all")
            return 1
        return wanted

    def _pinned_spec(self) -> MountSpec:
        """Return the SPEC for the pusher, which may start later and must find the snapshot that this mount stays at."""
        if self._mount.spec.stays:
            (dataset,) = self._shown
            return MountSpec((Part(dataset.name, dataset.snapshot),))
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
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
