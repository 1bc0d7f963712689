"""Starts, watches and replaces the workers of a mount, in its supervisor.

A worker that dies leaves requests behind that no other worker would get. The supervisor has the worker's clone of the
device open too, so these requests do not fail with the worker: the kernel hands them out again, and their readers
notice only a pause. On a kernel that cannot do that, the requests fail when the supervisor closes the clone, so that no
reader waits for ever.

A request that kills workers is found and answered with EIO. A worker that dies leaves its requests to the next worker,
which would die of the same request. The C code under pyfuse3 (_zero_open.c) therefore notes the number of the request
that each worker took last, in memory shared with the supervisor. When a worker crashes or its loop stands still, that
request is the likely cause. After the second worker that a request has killed, all workers answer it with EIO.
"""

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import select
import selectors
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.errors import CachefsError
from cachefs.mount import device
from cachefs.mount.child_process import RestartBackoff, fork_watched, is_stopped
from cachefs.mount.processes.session import FuseSession
from cachefs.mount.processes.worker import MountState, WorkerMessage, run_worker, unpack

# Most requests that all workers refuse at a time; CONDEMNED in _zero_open.c.
CONDEMNED: Final = 8
# Workers that one request may kill before it is refused.
MAX_DEATHS: Final = 2
# Most requests that are remembered for having killed a worker.
_MAX_SUSPECTS: Final = 64
_NUMBER: Final = 8  # bytes
log = logging.getLogger(__name__)

# A worker without a message for this long, while readers wait, is replaced.
SILENT_SECONDS: Final = 10
# With this many killed workers that do not die, no other is started: each hangs in the kernel, most likely at a disk,
# as the next one would.
MAX_HANGING: Final = 4
# A mount that no worker has served for this long is ended; as long as a read may wait by default. (A worker serves also
# without a daemon and without an index.)
UNSERVED_SECONDS: Final = 60
# This many crashes of workers in quick succession end the mount. A killed worker does not count, since a kill does not
# predict how the next worker ends.
MAX_CRASHES: Final = 8
_NO_CRASH: Final = (0, -signal.SIGTERM, -signal.SIGKILL)  # exit codes of a commanded end
# A crash after this lifetime does not count as in quick succession.
STEADY_SECONDS: Final = 10.0
# Seconds between a first crash, or a first worker that ended before it served, and the next start; doubled with each
# further one. A worker that never serves is restarted after LONGEST_PAUSE at most: readers wait at most this long after
# the cause, such as a lack of memory, is over.
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 8.0
_MESSAGE: Final = 1 << 16


class PoisonRequests:
    """Counts the workers that each request has killed, in shared memory. To be created before the workers are
    forked."""

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, (CONDEMNED + workers) * _NUMBER)
        self._numbers = (ctypes.c_uint64 * (CONDEMNED + workers)).from_buffer(self._memory)
        self._deaths: OrderedDict[int, int] = OrderedDict()  # request number -> workers it has killed
        self._refused = 0  # requests condemned so far

    def track_requests(self, library: ctypes.CDLL, worker: int) -> None:
        """In a worker: start to note the requests that the worker takes. library: see cachefs.mount.zero_open."""
        self._numbers[CONDEMNED + worker] = 0
        library.cachefs_note_requests(ctypes.byref(self._numbers), worker)

    def latest_requests(self) -> tuple[int, ...]:
        """Return the number of the request that each worker took last."""
        return tuple(self._numbers[CONDEMNED:])

    def record_death(self, worker: int) -> None:
        """In the supervisor: record that *worker* has crashed or that its loop stands still."""
        request = self._numbers[CONDEMNED + worker]
        self._numbers[CONDEMNED + worker] = 0
        if not request:
            return
        self._deaths[request] = self._deaths.pop(request, 0) + 1
        if len(self._deaths) > _MAX_SUSPECTS:
            self._deaths.popitem(last=False)
        if self._deaths[request] == MAX_DEATHS:
            log.error("request %d has cost %d workers, and fails with EIO", request, MAX_DEATHS)
            self._numbers[self._refused % CONDEMNED] = request
            self._refused += 1


@dataclass(slots=True, eq=False)
class _RunningWorker:
    """A running worker."""

    number: int
    pid: int
    # Descriptor that becomes readable when the process has ended.
    pidfd: int
    # The socket on which the worker's messages come (cachefs.mount.processes.worker).
    channel: socket.socket
    # The supervisor's descriptor of the worker's clone of the device.
    clone: int
    # When it was started (monotonic seconds).
    began: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    # Why the worker cannot serve, in its own words.
    failure_text: str = ""
    # Seconds since its last message.
    silent_seconds: int = 0


class WorkerPool:
    """The workers of a mount: one per number; the number of an ended worker is free until another is started."""

    def __init__(self, mount: MountState, session: FuseSession, size: int) -> None:
        self.is_ready = False  # whether requests are served
        self.has_ended = False  # whether the mount has ended
        self.failure: CachefsError | None = None  # why the mount must end
        self._mount = mount
        self._session = session
        self._poison_requests = PoisonRequests(size)
        self._selector = selectors.DefaultSelector()
        self._workers: list[_RunningWorker] = []
        self._hanging: list[_RunningWorker] = []  # killed, but not dead yet
        self._unserved = 0  # seconds without a worker that serves
        # Worker number without a running process -> when to start one (monotonic seconds).
        self._missing_numbers = dict.fromkeys(range(size), 0.0)
        self._restarts: dict[int, RestartBackoff] = {}  # by worker number, where the last worker has not served
        self._crashes = 0  # crashes in quick succession
        self._wakes: set[int] = set()  # watched descriptors of the caller of `handle_events`

    def handle_events(self, seconds: float, wakes: Sequence[int]) -> None:
        """Handle events for *seconds*, or until one of the descriptors *wakes* becomes readable."""
        for wake in self._wakes.difference(wakes):
            self._unwatch(wake)
        for wake in set(wakes) - self._wakes:
            self._selector.register(wake, selectors.EVENT_READ, lambda: None)
        self._wakes = set(wakes)
        self._start_missing()
        if self._missing_numbers and not self._is_full_of_hanging():
            seconds = min(seconds, max(0.0, min(self._missing_numbers.values()) - time.monotonic()))
        for key, _ in self._selector.select(seconds):
            key.data()

    def latest_requests(self) -> tuple[int, ...]:
        """Return the requests that the workers took last; changes with each request where the C code notes them."""
        return self._poison_requests.latest_requests()

    def check_workers(self) -> None:
        """Replace silent workers, and find out whether the mount has ended or must end.

        To be called once a second. The calls are the clock, so that no worker is blamed for a time in which the machine
        slept or the whole mount was stopped.
        """
        if device.has_ended(self._session.device):  # otherwise only a serving worker would report it
            self.has_ended = True
            return
        self._replace_silent()
        self._unserved = 0 if any(worker.is_ready for worker in self._workers) else self._unserved + 1
        if self._unserved > UNSERVED_SECONDS:
            self.failure = self.failure or self._unserved_error()

    def _replace_silent(self) -> None:
        for worker in self._hanging:
            worker.silent_seconds += 1
            if worker.silent_seconds == 1:
                log.error("process %d was killed and does not die; does a disk of this node hang?", worker.pid)
        for worker in list(self._workers):
            worker.silent_seconds += 1
            if worker.silent_seconds > SILENT_SECONDS and self._session.connection.has_waiting():
                log.warning("worker %d (process %d) sends no heartbeats and is replaced", worker.number, worker.pid)
                # Recorded before the worker's death, which may have to wait for the hanging operation.
                if not is_stopped(worker.pid):
                    self._poison_requests.record_death(worker.number)
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
                self._remove_worker(worker)
                worker.silent_seconds = 0
                self._hanging.append(worker)

    def end_workers(self, seconds: float) -> None:
        """End the workers, which say goodbye to the daemon; kill those that have not ended within *seconds*."""
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            signal.pidfd_send_signal(worker.pidfd, signal.SIGTERM)
        for worker in self._workers:
            if not select.select([worker.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                log.warning("worker %d (process %d) does not end and is killed", worker.number, worker.pid)
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _is_full_of_hanging(self) -> bool:
        return len(self._hanging) >= MAX_HANGING

    def _unserved_error(self) -> CachefsError:
        why = "no worker has begun to; see the log"
        if self._hanging:
            pids = ", ".join(str(worker.pid) for worker in self._hanging)
            why = f"workers were killed and do not die (processes {pids}); does a disk of this node hang?"
        return CachefsError(f"no worker has served the mount for {UNSERVED_SECONDS} s, so it ends: {why}")

    def _start_missing(self) -> None:
        if self._is_full_of_hanging():
            return
        for number in [number for number, due in self._missing_numbers.items() if due <= time.monotonic()]:
            del self._missing_numbers[number]
            try:
                self._start_worker(number)
            except OSError as error:
                what = f"worker {number} cannot be started: {error.strerror}"
                if not self.is_ready:
                    self.failure = self.failure or CachefsError(what)
                self._postpone_start(number, what)

    def _start_worker(self, number: int) -> None:
        clone = self._session.clone()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def serve() -> None:
            self._close_in_worker(ours)
            self._session.serve_clone(clone)
            if self._session.library is not None:
                self._poison_requests.track_requests(self._session.library, number)
            connection = self._session.connection.number
            run_worker(self._mount, number, self._session.operations, connection, theirs, begins=not self.is_ready)

        try:
            pid, pidfd = fork_watched(f"worker{number}", self._mount.directory, serve)
        except OSError:
            os.close(clone)
            ours.close()
            raise
        finally:
            theirs.close()
        worker = _RunningWorker(number, pid, pidfd, ours, clone)
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, functools.partial(self._receive_messages, worker))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, functools.partial(self._reap_worker, worker))

    def _close_in_worker(self, channel: socket.socket) -> None:
        """In a new worker: close what belongs to the supervisor. The other workers' clones must not stay open here."""
        self._selector.close()
        channel.close()
        for worker in self._workers:
            worker.channel.close()
            os.close(worker.clone)
            os.close(worker.pidfd)
        for worker in self._hanging:
            os.close(worker.pidfd)

    def _receive_messages(self, worker: _RunningWorker) -> None:
        """Handle all messages of *worker*, unless an event of the same `select` has removed it."""
        if worker not in self._workers:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while packet := worker.channel.recv(_MESSAGE, socket.MSG_DONTWAIT):
                with contextlib.suppress(ValueError):  # an unknown message
                    message, text = unpack(packet)
                    self._handle_message(worker, message, text)
            self._unwatch(worker.channel)  # the worker has closed its end, and is about to die

    def _handle_message(self, worker: _RunningWorker, message: WorkerMessage, text: str) -> None:
        worker.silent_seconds = 0
        if message == WorkerMessage.READY:
            self.is_ready = worker.is_ready = True
            self._restarts.pop(worker.number, None)
        elif message == WorkerMessage.ENDED:
            self.has_ended = True
        elif message == WorkerMessage.FAILED:
            worker.failure_text = text
            if not self.is_ready:
                self.failure = CachefsError(text)

    def _reap_worker(self, worker: _RunningWorker) -> None:
        """Record the end of *worker*, and free its number."""
        self._receive_messages(worker)
        self._unwatch(worker.pidfd)
        os.close(worker.pidfd)
        _, status = os.waitpid(worker.pid, 0)
        if worker in self._hanging:
            self._hanging.remove(worker)
            return
        how = os.waitstatus_to_exitcode(status)
        crashed = how not in _NO_CRASH or not self.is_ready
        if crashed and not self.has_ended:
            self._poison_requests.record_death(worker.number)
        self._remove_worker(worker)
        if self.has_ended:
            return
        what = f"worker {worker.number} (process {worker.pid}) ended with {how}"
        if not crashed and not worker.is_ready:
            self._postpone_start(
                worker.number, f"{what} before it served" + (worker.failure_text and f": {worker.failure_text}")
            )
            return
        log.warning("%s and is replaced", what)
        if crashed:
            self._record_crash(worker.number, time.monotonic() - worker.began)

    def _unwatch(self, source: int | socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _remove_worker(self, worker: _RunningWorker) -> None:
        """Have the requests of *worker* handed out again, and schedule its replacement."""
        self._workers.remove(worker)
        self._unwatch(worker.channel)
        worker.channel.close()
        if not self.has_ended and not device.resend_requests(self._session.device):
            log.warning("this kernel hands out no request twice: those of worker %d fail", worker.number)
        os.close(worker.clone)
        self._missing_numbers[worker.number] = time.monotonic()

    def _postpone_start(self, number: int, what: str) -> None:
        """Start worker *number* later, and log *what* has happened. The failure blames no request; where no worker
        serves for long, `check_workers` ends the mount."""
        restarts = self._restarts.setdefault(number, RestartBackoff(FIRST_PAUSE, LONGEST_PAUSE))
        restarts.record_end(what)
        self._missing_numbers[number] = restarts.due

    def _record_crash(self, number: int, lived: float) -> None:
        """Record a crash, and schedule the next start. lived: seconds."""
        self._crashes = 1 if lived > STEADY_SECONDS else self._crashes + 1
        if self._crashes >= MAX_CRASHES or not self.is_ready:
            self.failure = self.failure or CachefsError("the workers of the mount crash; see its log")
        self._missing_numbers[number] = time.monotonic() + FIRST_PAUSE * 2**self._crashes
