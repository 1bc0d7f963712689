"""The workers of a mount, as their supervisor sees them: started, watched, and replaced.

A worker that dies leaves requests behind that no other would ever see. Its clone of the device is open here too, so
they do not fail with it: they are handed out again, and their readers notice nothing but a pause. Where the kernel
cannot do that, the clone is closed, and they get an error rather than wait for ever.
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
from dataclasses import dataclass, field
from typing import Final

from cachefs.errors import CachefsError
from cachefs.mount import device
from cachefs.mount.process import fork
from cachefs.mount.session import Session
from cachefs.mount.worker import FAILED, OVER, READY, Mount, work

log = logging.getLogger(__name__)

SILENT_SECONDS: Final = 10
# Workers that crash, one soon after the other, before the mount is given up. Who is killed does not count: that says
# nothing of the next.
MOST_CRASHES: Final = 8
STEADY_SECONDS: Final = 10.0
FIRST_PAUSE: Final = 0.05
_MESSAGE: Final = 1 << 16


@dataclass(slots=True, eq=False)
class _Employed:
    """channel: what it says; clone: its device; began: monotonic; silent: seconds since it was last heard."""

    number: int
    pid: int
    pidfd: int
    channel: socket.socket
    clone: int
    began: float = field(default_factory=time.monotonic)
    ready: bool = False
    silent: int = 0


class WorkerPool:
    """ready: requests are served; over: the mount has ended; failure: why it has to."""

    def __init__(self, mount: Mount, session: Session, size: int) -> None:
        self.ready = False
        self.over = False
        self.failure: CachefsError | None = None
        self._mount = mount
        self._session = session
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Employed] = []
        self._vacant = dict.fromkeys(range(size), 0.0)
        self._crashes = 0

    def wait(self, seconds: float, wake: int) -> None:
        """See to whatever happens within *seconds*, or until *wake* can be read."""
        if wake not in self._selector.get_map():
            self._selector.register(wake, selectors.EVENT_READ, lambda: None)
        self._fill_vacancies()
        if self._vacant:
            seconds = min(seconds, max(0.0, min(self._vacant.values()) - time.monotonic()))
        for key, _ in self._selector.select(seconds):
            key.data()

    def replace_silent(self) -> None:
        """To be called once a second of ours, so that a machine that slept, or froze us all, is nobody's fault."""
        for worker in list(self._workers):
            worker.silent += 1
            if worker.silent > SILENT_SECONDS and self._session.connection.has_waiting():
                log.warning("worker %d (process %d) does nothing and is replaced", worker.number, worker.pid)
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
                # Before its death, for which it may have to wait itself.
                self._vacate(worker)

    def end(self, seconds: float) -> None:
        """Have them say goodbye to the daemon, and kill who has not done so within *seconds*."""
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            signal.pidfd_send_signal(worker.pidfd, signal.SIGTERM)
        for worker in self._workers:
            if not select.select([worker.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                log.warning("worker %d (process %d) does not end and is killed", worker.number, worker.pid)
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _fill_vacancies(self) -> None:
        for number in [number for number, due in self._vacant.items() if due <= time.monotonic()]:
            del self._vacant[number]
            try:
                self._start(number)
            except OSError as error:
                log.error("worker %d cannot be started: %s", number, error.strerror)
                self._crashed(number, 0.0)

    def _start(self, number: int) -> None:
        clone = self._session.clone()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def serve() -> None:
            self._leave(ours)
            self._session.use(clone)
            work(self._mount, number, self._session.operations, theirs)

        try:
            pid = fork(f"worker{number}", serve)
            pidfd = _watched(pid)
        except OSError:
            os.close(clone)
            ours.close()
            raise
        finally:
            theirs.close()
        worker = _Employed(number, pid, pidfd, ours, clone)
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, functools.partial(self._hear, worker))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, functools.partial(self._bury, worker))

    def _leave(self, channel: socket.socket) -> None:
        """In a worker: what is the supervisor's must not stay open here, least of all the others' clones."""
        self._selector.close()
        channel.close()
        for worker in self._workers:
            worker.channel.close()
            os.close(worker.clone)
            os.close(worker.pidfd)

    def _hear(self, worker: _Employed) -> None:
        """All it has said; nothing once it has left, which the same look at the selector may have told before."""
        if worker not in self._workers:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while said := worker.channel.recv(_MESSAGE, socket.MSG_DONTWAIT):
                self._heard(worker, said)
            self._ignore(worker.channel)  # it has closed its end, and is about to die

    def _heard(self, worker: _Employed, said: bytes) -> None:
        worker.silent = 0
        if said == READY:
            self.ready = worker.ready = True
        elif said == OVER:
            self.over = True
        elif said.startswith(FAILED):
            text = said.removeprefix(FAILED).decode()
            log.error("worker %d: %s", worker.number, text)
            if not self.ready:
                self.failure = CachefsError(text)

    def _bury(self, worker: _Employed) -> None:
        self._hear(worker)
        self._ignore(worker.pidfd)
        os.close(worker.pidfd)
        _, status = os.waitpid(worker.pid, 0)
        if worker not in self._workers:
            return
        self._vacate(worker)
        if self.over:
            return
        how = os.waitstatus_to_exitcode(status)
        log.warning("worker %d (process %d) ended with %d and is replaced", worker.number, worker.pid, how)
        if how != -signal.SIGKILL or not self.ready:
            self._crashed(worker.number, time.monotonic() - worker.began)
        elif not worker.ready:
            self._vacant[worker.number] += FIRST_PAUSE

    def _ignore(self, source: int | socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def _vacate(self, worker: _Employed) -> None:
        self._workers.remove(worker)
        self._ignore(worker.channel)
        worker.channel.close()
        if not self.over and not device.resend(self._session.device):
            log.warning("this kernel hands out no request twice: those of worker %d fail", worker.number)
        os.close(worker.clone)
        self._vacant[worker.number] = time.monotonic()

    def _crashed(self, number: int, lived: float) -> None:
        self._crashes = 1 if lived > STEADY_SECONDS else self._crashes + 1
        if self._crashes >= MOST_CRASHES or not self.ready:
            self.failure = self.failure or CachefsError("the workers of the mount crash; see its log")
        self._vacant[number] = time.monotonic() + FIRST_PAUSE * 2**self._crashes


def _watched(pid: int) -> int:
    """A descriptor that tells of our child's end. A child of which nobody would notice it is ended. Raises OSError."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
