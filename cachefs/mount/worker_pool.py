"""The workers of a mount, as their supervisor sees them: started, watched, and replaced.

A worker that dies leaves requests behind that no other worker would ever get. The supervisor has the worker's clone of
the device open too, so these requests do not fail with the worker: the kernel hands them out again, and their readers
notice nothing but a pause. A kernel that cannot do that fails them when the supervisor closes the clone, so that no
reader waits for ever.
"""

import contextlib
import functools
import logging
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.errors import CachefsError
from cachefs.mount import device
from cachefs.mount.blame import Blame
from cachefs.mount.process import fork_watched, is_held
from cachefs.mount.restarts import Restarts
from cachefs.mount.session import Session
from cachefs.mount.worker import Mount, work
from cachefs.mount.worker_messages import WorkerMessage, unpack

log = logging.getLogger(__name__)

# A worker that says nothing for so many seconds, while readers wait, is replaced.
SILENT_SECONDS: Final = 10
# With so many workers that were killed and do not die, no other is started: each hangs in the kernel, most likely at a
# disk, as the next one would.
MOST_HANGING: Final = 4
# A mount that nobody serves for so many seconds, since no worker begins to or none may be started, is ended; as long
# as a read may wait by default. (A worker serves also where there is neither a daemon nor an index.)
UNSERVED_SECONDS: Final = 60
# So many crashes of workers, one soon after the other, end the mount. A worker that is killed does not count, since
# that says nothing about the next one.
MOST_CRASHES: Final = 8
_NO_CRASH: Final = (0, -signal.SIGTERM, -signal.SIGKILL)  # how a worker ends that was told to
# A worker that has lived for so many seconds has not crashed soon after another.
STEADY_SECONDS: Final = 10.0
# Seconds between a first crash, or a first worker that ended before it served, and the next start; doubled with every
# further one. A worker that never serves is started again after LONGEST_PAUSE at most: so long do readers wait on after
# what kept it from serving, such as a lack of memory, is over.
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 8.0
_MESSAGE: Final = 1 << 16


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker that runs."""

    number: int
    pid: int
    # Descriptor that can be read when the process has ended.
    pidfd: int
    # The socket on which the worker's messages come (cachefs.mount.worker_messages).
    channel: socket.socket
    # The supervisor's descriptor of the worker's clone of the device.
    clone: int
    # When it was started (monotonic seconds).
    began: float = field(default_factory=time.monotonic)
    ready: bool = False
    # Why it cannot serve, in its own words.
    failed: str = ""
    # Seconds since it last said anything.
    silent: int = 0


class WorkerPool:
    """As many workers as the mount is to have; one that ends leaves its place empty until another is started in it.

    It has many attributes, since each way in which a worker may fail is counted for itself.
    """

    def __init__(self, mount: Mount, session: Session, size: int) -> None:
        self.ready = False  # requests are served
        self.over = False  # the mount has ended
        self.failure: CachefsError | None = None  # why the mount has to end
        self._mount = mount
        self._session = session
        self._blame = Blame(size)
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._hanging: list[_Worker] = []  # killed, and not dead
        self._unserved = 0  # seconds for which nobody has served the mount
        # Number of each worker that does not run -> when to start it (monotonic seconds).
        self._empty_places = dict.fromkeys(range(size), 0.0)
        self._restarts: dict[int, Restarts] = {}  # of each number whose last worker has not served
        self._crashes = 0  # one soon after the other
        self._wakes: set[int] = set()  # descriptors of others that are watched

    def wait(self, seconds: float, wakes: Sequence[int]) -> None:
        """Handle whatever happens within *seconds*, or until one of the descriptors *wakes* can be read."""
        for wake in self._wakes.difference(wakes):
            self._ignore(wake)
        for wake in set(wakes) - self._wakes:
            self._selector.register(wake, selectors.EVENT_READ, lambda: None)
        self._wakes = set(wakes)
        self._fill_places()
        if self._empty_places and not self._is_full_of_hanging():
            seconds = min(seconds, max(0.0, min(self._empty_places.values()) - time.monotonic()))
        for key, _ in self._selector.select(seconds):
            key.data()

    def requests(self) -> tuple[int, ...]:
        """The requests that the workers took last; it changes with each request, where the piece of C notes them."""
        return self._blame.requests()

    def tend(self) -> None:
        """Replace workers that say nothing; find out whether the mount has ended or has to end.

        To be called once a second. These calls are counted and not the seconds of a clock, so that no worker is blamed
        for a time in which the machine slept or the whole mount was stopped.
        """
        if device.is_over(self._session.device):  # which else only a worker that serves would say
            self.over = True
            return
        self._replace_silent()
        self._unserved = 0 if any(worker.ready for worker in self._workers) else self._unserved + 1
        if self._unserved > UNSERVED_SECONDS:
            self.failure = self.failure or self._not_served()

    def _replace_silent(self) -> None:
        for worker in self._hanging:
            worker.silent += 1
            if worker.silent == 1:
                log.error("process %d was killed and does not die; does a disk of this node hang?", worker.pid)
        for worker in list(self._workers):
            worker.silent += 1
            if worker.silent > SILENT_SECONDS and self._session.connection.has_waiting():
                log.warning("worker %d (process %d) does nothing and is replaced", worker.number, worker.pid)
                # Not only when it has died, since its death may have to wait for what it hangs on.
                if not is_held(worker.pid):
                    self._blame.died(worker.number)
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
                self._remove(worker)
                worker.silent = 0
                self._hanging.append(worker)

    def end(self, seconds: float) -> None:
        """Have the workers end, which tell the daemon so, and kill those that have not ended within *seconds*."""
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            signal.pidfd_send_signal(worker.pidfd, signal.SIGTERM)
        for worker in self._workers:
            if not select.select([worker.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                log.warning("worker %d (process %d) does not end and is killed", worker.number, worker.pid)
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _is_full_of_hanging(self) -> bool:
        return len(self._hanging) >= MOST_HANGING

    def _not_served(self) -> CachefsError:
        why = "no worker has begun to; see the log"
        if self._hanging:
            pids = ", ".join(str(worker.pid) for worker in self._hanging)
            why = f"workers were killed and do not die (processes {pids}); does a disk of this node hang?"
        return CachefsError(f"nobody has served the mount for {UNSERVED_SECONDS} s, so it ends: {why}")

    def _fill_places(self) -> None:
        if self._is_full_of_hanging():
            return
        for number in [number for number, due in self._empty_places.items() if due <= time.monotonic()]:
            del self._empty_places[number]
            try:
                self._start(number)
            except OSError as error:
                what = f"worker {number} cannot be started: {error.strerror}"
                if not self.ready:
                    self.failure = self.failure or CachefsError(what)
                self._pause(number, what)

    def _start(self, number: int) -> None:
        clone = self._session.clone()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def serve() -> None:
            self._close_in_worker(ours)
            self._session.use(clone)
            if self._session.library is not None:
                self._blame.note_requests(self._session.library, number)
            connection = self._session.connection.number
            work(self._mount, number, self._session.operations, connection, theirs, begins=not self.ready)

        try:
            pid, pidfd = fork_watched(f"worker{number}", self._mount.directory, serve)
        except OSError:
            os.close(clone)
            ours.close()
            raise
        finally:
            theirs.close()
        worker = _Worker(number, pid, pidfd, ours, clone)
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, functools.partial(self._receive, worker))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, functools.partial(self._reap, worker))

    def _close_in_worker(self, channel: socket.socket) -> None:
        """Close, in a new worker, what belongs to the supervisor; the other workers' clones must not stay open here."""
        self._selector.close()
        channel.close()
        for worker in self._workers:
            worker.channel.close()
            os.close(worker.clone)
            os.close(worker.pidfd)
        for worker in self._hanging:
            os.close(worker.pidfd)

    def _receive(self, worker: _Worker) -> None:
        """Handle all messages of *worker*; none of one that was removed for an event of the same `select`."""
        if worker not in self._workers:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while packet := worker.channel.recv(_MESSAGE, socket.MSG_DONTWAIT):
                with contextlib.suppress(ValueError):  # no message that we know
                    message, text = unpack(packet)
                    self._handle(worker, message, text)
            self._ignore(worker.channel)  # it has closed its end, and is about to die

    def _handle(self, worker: _Worker, message: WorkerMessage, text: str) -> None:
        worker.silent = 0
        if message == WorkerMessage.READY:
            self.ready = worker.ready = True
            self._restarts.pop(worker.number, None)
        elif message == WorkerMessage.OVER:
            self.over = True
        elif message == WorkerMessage.FAILED:
            worker.failed = text
            if not self.ready:
                self.failure = CachefsError(text)

    def _reap(self, worker: _Worker) -> None:
        """Take note of the end of *worker*, and leave its place to another."""
        self._receive(worker)
        self._ignore(worker.pidfd)
        os.close(worker.pidfd)
        _, status = os.waitpid(worker.pid, 0)
        if worker in self._hanging:
            self._hanging.remove(worker)
            return
        how = os.waitstatus_to_exitcode(status)
        crashed = how not in _NO_CRASH or not self.ready
        if crashed and not self.over:
            self._blame.died(worker.number)
        self._remove(worker)
        if self.over:
            return
        what = f"worker {worker.number} (process {worker.pid}) ended with {how}"
        if not crashed and not worker.ready:
            self._pause(worker.number, f"{what} before it served" + (worker.failed and f": {worker.failed}"))
            return
        log.warning("%s and is replaced", what)
        if crashed:
            self._note_crash(worker.number, time.monotonic() - worker.began)

    def _ignore(self, source: int | socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _remove(self, worker: _Worker) -> None:
        """Have the requests of *worker* handed out again, and its place filled."""
        self._workers.remove(worker)
        self._ignore(worker.channel)
        worker.channel.close()
        if not self.over and not device.resend(self._session.device):
            log.warning("this kernel hands out no request twice: those of worker %d fail", worker.number)
        os.close(worker.clone)
        self._empty_places[worker.number] = time.monotonic()

    def _pause(self, number: int, what: str) -> None:
        """Have worker *number* started later, and log *what* has happened, which is nobody's fault: where no worker
        serves for long, that ends the mount (`tend`)."""
        restarts = self._restarts.setdefault(number, Restarts(FIRST_PAUSE, LONGEST_PAUSE))
        restarts.end(what)
        self._empty_places[number] = restarts.due

    def _note_crash(self, number: int, lived: float) -> None:
        """lived: seconds."""
        self._crashes = 1 if lived > STEADY_SECONDS else self._crashes + 1
        if self._crashes >= MOST_CRASHES or not self.ready:
            self.failure = self.failure or CachefsError("the workers of the mount crash; see its log")
        self._empty_places[number] = time.monotonic() + FIRST_PAUSE * 2**self._crashes
