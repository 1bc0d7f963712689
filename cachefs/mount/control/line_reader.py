"""Reads the control FIFO of a mount independently of the daemon, so that writers never wait for the daemon.

Lines are taken out of the FIFO as they come, and queued for the daemon. The lines of one job are sent in order, and
jobs do not wait for each other. Of a consumer's heartbeats only the latest is queued. While the daemon is away, lines
are dropped and logged once they are CALL_SECONDS old. When the queue is full, the user who has most of it loses a line.
Lines that are not calls do not identify their writer; together they have the share of one user.

An answer to a call is one line, written to the FIFO that the caller named. A caller that does not read or has gone
loses its answer; the mount does not wait for it.
"""

import contextlib
import logging
import os
import select
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
import trio

from cachefs.control_calls import MAX_LINE_BYTES, CallResponse, RequestEnd, RequestPart, response_fifo_name
from cachefs.errors import CachefsError, DaemonUnavailable
from cachefs.job_messages import JobProgress, JobView
from cachefs.largest_user import find_largest_user
from cachefs.messages import Message
from cachefs.mount.control.calls import ControlCall, IncompleteRequests, decode_line, translate_call, translate_line
from cachefs.mount.daemon_link import DaemonLink

# Most characters of an error that an answer has.
_MAX_ERROR_TEXT: Final = 500
log = logging.getLogger(__name__)

# Seconds within which a writer that has looked up the FIFO's name opens the FIFO.
IDLE_SECONDS: Final = 2.0
# Most seconds that a line may wait for the daemon's answer.
CALL_SECONDS: Final = 30.0
MAX_LINE: Final = 64 << 20
# Most lines that are queued for the daemon, and their bytes.
MAX_LINES: Final = 4096
MAX_BYTES: Final = 128 << 20
# Most tokens of callers whose users are remembered.
MAX_TOKENS: Final = 1024
_PIPE: Final = 1 << 16
# Most characters of a line, and of its error, that are logged.
_MAX_TEXT: Final = 200


class ResponseFifos:
    """Writes to the answer FIFOs of one mount."""

    def __init__(self, directory: Path) -> None:
        """directory: the control directory."""
        self._directory = directory

    async def write_response(self, token: str, response: CallResponse) -> None:
        line = msgspec.json.encode(response) + b"\n"
        if len(line) <= MAX_LINE_BYTES:
            await trio.to_thread.run_sync(self._write, token, line, abandon_on_cancel=True)

    def _write(self, token: str, line: bytes) -> None:
        with contextlib.suppress(OSError):
            # Neither call blocks: the open fails without a reader, the write fails where the FIFO is full.
            fd = os.open(self._directory / response_fifo_name(token), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)


def make_response(number: int, reply: Message) -> CallResponse:
    if isinstance(reply, JobView):  # the caller needs only name and state; a thousand ranks do not fit into a line
        reply = msgspec.structs.replace(reply, consumers=[], dataset="", snapshot="", source="", reason="")
    return CallResponse(number, reply=msgspec.msgpack.encode(reply))


def make_error_response(number: int, error: CachefsError) -> CallResponse:
    """Return an error answer. Unprintable characters, which a caller may have sent, become question marks."""
    text = "".join(one if one.isprintable() else "?" for one in str(error)[:_MAX_ERROR_TEXT])
    return CallResponse(number, error=type(error).__name__, text=text)


@dataclass(frozen=True, slots=True)
class _QueuedLine:
    """A line queued for the daemon."""

    control_call: ControlCall
    # Bytes of the line.
    size: int
    # When the line was read, by trio's clock.
    read_at: float
    # The writer; None where unknown.
    user: int | None


class LineQueue:
    """The queue of lines for the daemon."""

    def __init__(self, link: DaemonLink, nursery: trio.Nursery, response_fifos: ResponseFifos) -> None:
        """nursery: runs the tasks that send."""
        self.empty = trio.Event()  # replaced when a line is queued
        self.empty.set()
        self._link = link
        self._nursery = nursery
        self._response_fifos = response_fifos
        # Job name -> its lines, oldest first. A job stays here as long as a task sends its lines.
        self._jobs: dict[str, OrderedDict[object, _QueuedLine]] = {}
        self._lines = 0
        self._bytes = 0

    def queue_line(self, control_call: ControlCall, size: int, user: int | None = None) -> None:
        """Queue a line. Raises DaemonUnavailable where there is no room for a line of this *user*."""
        job = self._jobs.get(control_call.job)
        if isinstance(control_call.request, JobProgress):
            key: object = control_call.consumer, control_call.request.ended
            if job is not None and (older := job.pop(key, None)) is not None:
                self._count_line(older, -1)
        else:
            key = object()
        while self._lines >= MAX_LINES:
            self._drop_line_of(find_largest_user(((one.user, 1) for one in self._queued_lines()), user, 1), user)
        while self._bytes + size > MAX_BYTES:
            self._drop_line_of(
                find_largest_user(((one.user, one.size) for one in self._queued_lines()), user, size), user
            )
        if job is None:
            job = self._jobs[control_call.job] = OrderedDict()
            self._nursery.start_soon(self._send_job_lines, control_call.job, job)
        job[key] = waiting = _QueuedLine(control_call, size, trio.current_time(), user)
        self._count_line(waiting, 1)
        if self.empty.is_set():
            self.empty = trio.Event()

    def _queued_lines(self) -> Iterator[_QueuedLine]:
        return chain.from_iterable(job.values() for job in self._jobs.values())

    def _drop_line_of(self, user: int | None, caller: int | None) -> None:
        """Drop a line of *user* to make room for the user *caller*. Raises DaemonUnavailable where both are the
        same."""
        full = DaemonUnavailable("too many lines wait for the daemon; is it running?")
        found = ((job, key) for job in self._jobs.values() for key, one in job.items() if one.user == user)
        job, key = next(found, (None, None))
        if job is None or user == caller:
            raise full
        dropped = job.pop(key)
        self._count_line(dropped, -1)
        if dropped.control_call.call is not None:
            self.refuse_call(dropped.control_call.call, full)

    def refuse_call(self, call: RequestEnd, error: CachefsError) -> None:
        self._nursery.start_soon(self._response_fifos.write_response, call.answers, make_error_response(call.id, error))

    def _count_line(self, waiting: _QueuedLine, sign: int) -> None:
        self._lines += sign
        self._bytes += sign * waiting.size

    async def _send_job_lines(self, name: str, job: OrderedDict[object, _QueuedLine]) -> None:
        """Send the lines of one job until none is left."""
        while job:
            _, waiting = job.popitem(last=False)
            call = waiting.control_call.call
            try:
                reply = await self._call_daemon(
                    waiting.control_call, waiting.read_at + CALL_SECONDS - trio.current_time()
                )
                if call is not None:
                    await self._response_fifos.write_response(call.answers, make_response(call.id, reply))
            except CachefsError as error:
                if call is None:
                    log.warning("a line of job %r has failed: %s", name, _loggable_text(error))
                else:
                    await self._response_fifos.write_response(call.answers, make_error_response(call.id, error))
            finally:
                self._count_line(waiting, -1)
        del self._jobs[name]
        if not self._jobs:
            self.empty.set()

    async def _call_daemon(self, call: ControlCall, seconds: float) -> Message:
        if seconds <= 0:
            raise DaemonUnavailable(f"the daemon has not answered for {CALL_SECONDS:.0f} s; the line is dropped")
        reply: Message = await self._link.call(call.method, call.request, seconds)
        return reply


class ControlReader:
    """Reads the FIFO as long as there are writers."""

    def __init__(self, path: Path, wakeup: int, datasets: Callable[[], Mapping[str, str]]) -> None:
        """path: of the FIFO; wakeup: an eventfd, set when a program is about to write to the FIFO; datasets: returns
        the datasets shown, name -> id of the snapshot."""
        self._path = path
        self._wakeup = wakeup
        self._datasets = datasets
        self._requests = IncompleteRequests()  # requests that come in parts
        self._users: OrderedDict[str, int] = OrderedDict()  # token -> its user, of the latest tokens

    async def run(self, link: DaemonLink) -> None:
        """Read until no writer is left and the daemon has answered all lines."""
        async with trio.open_nursery() as nursery:
            outbox = LineQueue(link, nursery, ResponseFifos(self._path.parent))
            while True:
                try:
                    await self._read_writers(outbox)
                except OSError as error:
                    log.warning("%s cannot be read: %s", self._path, error.strerror)
                if self._has_wakeup():
                    continue
                with contextlib.suppress(trio.Cancelled):
                    await self._wait_until_empty_or_wanted(outbox)
                if not self._has_wakeup():
                    return

    async def _wait_until_empty_or_wanted(self, outbox: LineQueue) -> None:
        async with trio.open_nursery() as either:

            async def until_wanted() -> None:
                await trio.lowlevel.wait_readable(self._wakeup)
                either.cancel_scope.cancel()

            either.start_soon(until_wanted)
            await outbox.empty.wait()
            either.cancel_scope.cancel()

    def _has_wakeup(self) -> bool:
        return bool(select.select([self._wakeup], [], [], 0)[0])

    async def _read_writers(self, outbox: LineQueue) -> None:
        fd = await self._open_fifo()
        try:
            while await self._read_lines(fd, outbox) or self._has_wakeup():
                # Once a writer has gone, poll(2) keeps reporting it, and only a new descriptor waits for the next
                # writer. The old one stays open until then: it keeps the bytes that the next writer has already
                # written.
                old, fd = fd, await self._open_fifo()
                os.close(old)
        finally:
            os.close(fd)

    async def _open_fifo(self) -> int:
        def open_here() -> int:
            return os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        return await trio.to_thread.run_sync(open_here, abandon_on_cancel=True)

    async def _read_lines(self, fd: int, outbox: LineQueue) -> bool:
        """Process lines until the last writer has closed the FIFO. Returns False where no writer came."""
        line, too_long = bytearray(), False
        while True:
            with trio.move_on_after(IDLE_SECONDS) as waiting:
                await trio.lowlevel.wait_readable(fd)
            try:
                piece = os.read(fd, _PIPE)
            except BlockingIOError:
                continue  # a writer is there, and silent
            begun, ends, remainder = piece.partition(b"\n")
            line += begun
            if len(line) > MAX_LINE and not too_long:
                log.warning("%s: a line longer than %d bytes is ignored", self._path, MAX_LINE)
                too_long = True
            if too_long:
                line.clear()
            if ends or not piece:
                await self._process_line(bytes(line), outbox)
                *lines, begun = remainder.split(b"\n")
                for one in lines:
                    await self._process_line(one, outbox)
                line, too_long = bytearray(begun), False
            if not piece:
                return not waiting.cancelled_caught

    async def _user_of_token(self, token: str) -> int | None:
        """Return the user who looked up the token's FIFO, according to the kernel; None where no caller has it open."""
        user = self._users.get(token)
        if user is None:
            fifo = self._path.with_name(response_fifo_name(token))
            with contextlib.suppress(OSError):
                found = await trio.to_thread.run_sync(os.stat, fifo, abandon_on_cancel=True)
                user = self._users[token] = found.st_uid
                if len(self._users) > MAX_TOKENS:
                    self._users.popitem(last=False)
        return user

    async def _process_line(self, line: bytes, outbox: LineQueue) -> None:
        """Process one line. An invalid line is logged, and refused where it is a call."""
        if not line.strip():
            return
        call: RequestEnd | None = None
        try:
            decoded = decode_line(line)
            if isinstance(decoded, RequestPart):
                self._requests.add_part(decoded, trio.current_time(), await self._user_of_token(decoded.answers))
            elif isinstance(decoded, RequestEnd):
                call = decoded
                request = self._requests.complete_request(call, trio.current_time())
                user = await self._user_of_token(call.answers)
                outbox.queue_line(translate_call(call, request, self._datasets(), user), len(request), user)
            else:
                outbox.queue_line(translate_line(decoded, self._datasets()), len(line))
        except CachefsError as error:
            log.warning("%s: %s; the line was %r", self._path, _loggable_text(error), line[:_MAX_TEXT])
            if call is not None:
                outbox.refuse_call(call, error)


def _loggable_text(error: CachefsError) -> str:
    """Return the error's text, safe to log: the writer of the line may have chosen parts of it."""
    return "".join(one if one.isprintable() else "?" for one in str(error)[:_MAX_TEXT])
