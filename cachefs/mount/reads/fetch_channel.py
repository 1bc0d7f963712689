"""Fetches of blocks through the daemon: the mount's end of the fetch channel, with many requests on one connection that
are answered in any order.

A request is one send(2) of a small frame. Its task sleeps until the task that reads the connection hands it the answer,
so that thousands of readers that wait for an origin take no threads. While the daemon is away, requests wait for it,
and a single task tries to connect for all of them. All reads of a block in one worker share one request.
"""

import contextlib
import errno
import itertools
import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import outcome
import trio

from cachefs import errors
from cachefs.errors import AccessDenied, CachefsError, DaemonUnavailable
from cachefs.fetch_frames import (
    HELLO_SECONDS,
    MAX_RESPONSE_BYTES,
    VERSION,
    FetchRequestFrame,
    FetchResponseFrame,
    FrameSplitter,
    Hello,
    InvalidFrame,
    body_decoder,
    encode_frame,
    fetch_socket_path,
)  # fmt: skip
from cachefs.messages import BlockRef, FetchedBlock, FetchRequest
from cachefs.mount.reads.read_records import ReadMarks

log = logging.getLogger(__name__)

# Seconds between tries to reach a daemon that does not answer.
DAEMON_RETRY_SECONDS: Final = 0.1
# Most bytes queued for a daemon that does not read; beyond them the connection is closed.
MAX_UNSENT: Final = 4 << 20
_MAX_RECEIVE: Final = 260 << 10  # most bytes of one recv: an answer with a block in it
_HINT: Final = "one older than this mount has no such socket: restart it with this version of cachefs"

_decode_hello, _decode_response = body_decoder(Hello), body_decoder(FetchResponseFrame)
# Seconds for which the failure of a block is remembered. The kernel follows a failed readahead with a read of the same
# page, often at another worker. That read must not wait for a whole deadline again.
FAILURE_SECONDS: Final = 1.0
# A fetch that fails within this many seconds before its deadline counts as timed out: the daemon answers a little
# early.
_NEAR_DEADLINE: Final = 1.5


class FetchChannelClient:
    """Requests blocks from the daemon, for one process of a mount."""

    def __init__(self, daemon_socket: Path) -> None:
        self._path = fetch_socket_path(daemon_socket)
        self._connection: _ClientConnection | None = None
        self._connection_needed = trio.Event()  # set while a connection is needed, as at the start
        self._connection_needed.set()
        self._attempt = _ConnectAttempt()  # the next attempt to connect
        self._waiting = 0  # requests that wait for a connection
        self._last_error = ""  # error of the last attempt

    @property
    def is_disconnected(self) -> bool:
        """True where there is no connection to the daemon."""
        return self._connection is None

    async def run(self) -> None:
        """Keep a connection to the daemon while requests need one. Never returns."""
        while True:
            await self._connection_needed.wait()
            try:
                connection = await _connect(self._path)
            except CachefsError as error:
                self._last_error = str(error)
                if not isinstance(error, DaemonUnavailable):
                    self._end_attempt(error)
                await trio.sleep(DAEMON_RETRY_SECONDS)
                if not self._waiting:
                    self._connection_needed = trio.Event()
                continue
            self._connection = connection
            self._end_attempt(None)
            try:
                await connection.dispatch_responses()
            finally:
                self._connection = None
                self._connection_needed = trio.Event()

    async def call(self, fetch: FetchRequest, seconds: float) -> list[FetchedBlock]:
        """Return the results of the blocks, in order. Waits at most *seconds*, also for a daemon that has not started.

        Raises DaemonUnavailable, also where the daemon ends in the meantime, and the daemon's error where it refuses.
        """
        with trio.move_on_after(max(0.0, seconds)):
            response = await (self._connection or await self._wait_for_connection()).request_blocks(fetch)
            if response.kind:
                raise _refusal_error(response.kind, response.message)
            if len(response.blocks) != len(fetch.blocks):
                raise CachefsError(f"the daemon has answered {len(response.blocks)} blocks for {len(fetch.blocks)}")
            return response.blocks
        trouble = f": {self._last_error}" if self._connection is None and self._last_error else ""
        raise DaemonUnavailable(
            f"the daemon at {self._path} did not answer in time; is it running? See its log{trouble}"
        )

    def announce_fetch(self, fetch: FetchRequest) -> None:
        """Announce fetches without waiting for an answer. While the daemon is away, nothing is sent."""
        if self._connection is not None:
            self._connection.send_announcement(fetch)

    async def _wait_for_connection(self) -> "_ClientConnection":
        """Raises CachefsError where the daemon refuses."""
        self._waiting += 1
        try:
            while self._connection is None:
                attempt = self._attempt
                self._connection_needed.set()
                await attempt.ended.wait()
                if attempt.error is not None:
                    raise type(attempt.error)(*attempt.error.args)
            return self._connection
        finally:
            self._waiting -= 1

    def _end_attempt(self, error: CachefsError | None) -> None:
        """Pass the outcome of the attempt to all requests that wait for a connection."""
        attempt, self._attempt = self._attempt, _ConnectAttempt()
        attempt.error = error
        attempt.ended.set()


class _ConnectAttempt:
    """An attempt to connect."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.error: CachefsError | None = None  # the refusal of the daemon


class _ClientConnection:
    """One connection, after the exchange of Hello frames."""

    def __init__(self, connection: socket.socket, frames: FrameSplitter) -> None:
        """frames: holds the bytes received so far of the next frame."""
        self._socket = connection
        self._frames = frames
        self._numbers = itertools.count(1)
        self._waiting_tasks: dict[int, trio.lowlevel.Task] = {}  # by request number
        self._unsent = bytearray()
        self._has_unsent = trio.Event()  # set while bytes are unsent

    async def request_blocks(self, fetch: FetchRequest) -> FetchResponseFrame:
        """Raises DaemonUnavailable where the connection ends before the answer."""
        number = next(self._numbers)
        data = encode_frame(FetchRequestFrame(number=number, request=fetch))
        self._waiting_tasks[number] = trio.lowlevel.current_task()
        self._send_or_queue(data)

        def give_up(_: object) -> trio.lowlevel.Abort:
            # The daemon goes on with the fetch; its answer will be ignored.
            self._waiting_tasks.pop(number, None)
            return trio.lowlevel.Abort.SUCCEEDED

        response: FetchResponseFrame = await trio.lowlevel.wait_task_rescheduled(give_up)
        return response

    def send_announcement(self, fetch: FetchRequest) -> None:
        """Send a request whose answer is ignored, unless the daemon does not read."""
        if not self._unsent:
            self._send_or_queue(encode_frame(FetchRequestFrame(number=next(self._numbers), request=fetch)))

    def close(self) -> None:
        self._socket.close()

    async def dispatch_responses(self) -> None:
        """Hand out answers until the connection ends. Tasks that still wait then get an error."""
        error: CachefsError = DaemonUnavailable("the daemon has gone away")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_unsent)
                await self._receive_responses()
                nursery.cancel_scope.cancel()
        except* InvalidFrame as found:
            error = CachefsError(
                f"the daemon sent an invalid response ({found.exceptions[0]}); "
                "do mount and daemon have the same version?"
            )
        except* OSError:
            pass
        finally:
            self.close()
            for task in self._waiting_tasks.values():
                trio.lowlevel.reschedule(task, outcome.Error(type(error)(*error.args)))
            self._waiting_tasks.clear()

    async def _receive_responses(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            data = self._socket.recv(_MAX_RECEIVE)
            if not data:
                return
            for body in self._frames.split_frames(data):
                response = _decode_response(body)
                task = self._waiting_tasks.pop(response.number, None)
                if task is not None:
                    trio.lowlevel.reschedule(task, outcome.Value(response))

    def _send_or_queue(self, data: bytes | bytearray) -> None:
        """Send as much as the socket takes now; `_send_unsent` sends the rest."""
        sent = 0
        if not self._unsent:
            with contextlib.suppress(OSError):  # `dispatch_responses` meets and handles the same error
                sent = self._socket.send(data)
        if sent < len(data):
            self._unsent += data[sent:]
            self._has_unsent.set()
        if len(self._unsent) > MAX_UNSENT:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    async def _send_unsent(self) -> None:
        """Send the queued bytes whenever the socket takes more. Raises OSError."""
        while True:
            await self._has_unsent.wait()
            await trio.lowlevel.wait_writable(self._socket)
            with contextlib.suppress(BlockingIOError):
                del self._unsent[: self._socket.send(self._unsent)]
            if not self._unsent:
                self._has_unsent = trio.Event()


async def check_daemon(daemon_socket: Path) -> None:
    """Connect once, to find out whether the daemon serves blocks. Raises CachefsError where it does not."""
    (await _connect(fetch_socket_path(daemon_socket))).close()


async def _connect(path: Path) -> _ClientConnection:
    """Connect and exchange Hello. Raises DaemonUnavailable without an answer, another CachefsError after a refusal."""
    with contextlib.ExitStack() as undo:
        frames = FrameSplitter(MAX_RESPONSE_BYTES)
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            undo.callback(connection.close)
            connection.connect(str(path))
            with contextlib.suppress(BrokenPipeError):  # a daemon that refuses hangs up at once; its Hello says why
                connection.send(encode_frame(Hello(version=VERSION)))
            with trio.fail_after(HELLO_SECONDS):
                hello = await _first_frame(connection, frames)
        except PermissionError:
            raise AccessDenied(f"you may not use the socket {path} of the daemon; ask its administrator") from None
        except (OSError, trio.TooSlowError) as error:
            hint = f"; {_HINT}" if isinstance(error, FileNotFoundError | ConnectionRefusedError) else ""
            raise DaemonUnavailable(f"no daemon answers at {path} ({error}){hint}") from None
        _check_hello(hello, path)
        undo.pop_all()
    return _ClientConnection(connection, frames)


async def _first_frame(connection: socket.socket, frames: FrameSplitter) -> bytes | memoryview:
    """Raises OSError, InvalidFrame."""
    while True:
        await trio.lowlevel.wait_readable(connection)
        data = connection.recv(_MAX_RECEIVE)
        if not data:
            raise ConnectionResetError("the daemon closed the connection")
        if found := frames.split_frames(data):
            return found[0]


def _check_hello(body: bytes | memoryview, path: Path) -> None:
    """Raise CachefsError where the daemon's Hello is a refusal, or of another version."""
    try:
        hello = _decode_hello(body)
    except InvalidFrame as error:
        raise CachefsError(f"the server at {path} is not a daemon of this mount's version ({error})") from None
    if hello.refusal:
        raise _refusal_error(hello.kind, hello.refusal)
    if hello.version != VERSION:
        raise CachefsError(
            f"the daemon at {path} speaks version {hello.version} of the fetch channel and this mount version "
            f"{VERSION}: update the older one; unmount and mount again, or restart the daemon"
        )


def _refusal_error(kind: str, message: str) -> CachefsError:
    found = getattr(errors, kind, None)
    is_ours = isinstance(found, type) and issubclass(found, CachefsError)
    return (found if is_ours else CachefsError)(message)  # type: ignore[misc]


@dataclass(slots=True)
class _InFlightFetch:
    """A fetch in progress."""

    # By trio's clock: the deadline of the read that began the fetch.
    deadline: float
    completed: trio.Event = field(default_factory=trio.Event)
    # One of these two is set when `completed` is.
    fetched: FetchedBlock | None = None
    error: CachefsError | None = None
    # Time of trio's clock from which the block is requested again instead of answered with the error.
    forget_at: float = math.inf
    # Whether the fetch had to wait for a daemon that was away.
    was_daemon_away: bool = False
    # Whether the fetch failed because its time was over.
    has_timed_out: bool = False

    @property
    def source(self) -> str:
        """The source that its stalls name (see cachefs.messages.Stall)."""
        if self.was_daemon_away:
            return "daemon"
        return (self.fetched.source if self.fetched is not None else "") or "origin"


class SharedFetches:
    """The fetches in progress of one worker."""

    def __init__(
        self, channel: FetchChannelClient, failures: ReadMarks, note_stall: Callable[[bytes, float, str], None]
    ) -> None:
        """failures: where all workers of the mount mark blocks whose fetch failed at a read's deadline; note_stall:
        called for each wait with the block's key, the time at which the wait began, and the source."""
        self._channel = channel
        self._failures = failures
        self._record_stall = note_stall
        self._in_flight: dict[bytes, _InFlightFetch] = {}  # by block key: the fetch under way, or its recent failure

    def __contains__(self, key: bytes) -> bool:
        """Return whether the block is being fetched, or its fetch failed a moment ago."""
        return key in self._in_flight

    def fetch_ahead(self, blocks: list[BlockRef], seconds: float) -> None:
        """Start fetches of blocks that no read waits for yet."""
        self._channel.announce_fetch(FetchRequest(blocks=blocks, ahead=True, deadline=seconds))

    async def fetch_block(self, key: bytes, ref: BlockRef, deadline: float) -> FetchedBlock:
        """Return where the daemon has put the block, or its bytes where no tier can hold it.

        Reads of one block share one call, and its failure for FAILURE_SECONDS. When the call fails at the deadline of
        the read that began it, a later read may begin another call.
        """
        began = trio.current_time()
        over: _InFlightFetch | None = None
        while True:
            flight = self._in_flight.get(key)
            if flight is None or flight is over or trio.current_time() > flight.forget_at:
                flight = self._in_flight[key] = _InFlightFetch(deadline)
                await self._run_fetch(flight, key, ref, began)
                break
            has_come_before = flight.completed.is_set()
            with trio.move_on_at(deadline):
                await flight.completed.wait()
            if not flight.completed.is_set():
                self._record_stall(key, began, flight.source)
                raise DaemonUnavailable("the block did not come within the read deadline")
            if has_come_before or not flight.has_timed_out or deadline <= flight.deadline + _NEAR_DEADLINE:
                break
            over = flight
        self._record_stall(key, began, flight.source)
        if flight.fetched is None:
            raise flight.error or CachefsError("the mount is ending")
        return flight.fetched

    async def _run_fetch(self, flight: _InFlightFetch, key: bytes, ref: BlockRef, began: float) -> None:
        try:
            flight.fetched = await self._call_daemon(flight, key, ref, began)
        except CachefsError as error:
            flight.error = error
            self._forget_old_failures()
            now = trio.current_time()
            flight.forget_at = now + FAILURE_SECONDS
            flight.has_timed_out = now > flight.deadline - _NEAR_DEADLINE
            if flight.has_timed_out and error.errno == errno.EIO:
                self._failures.set(key)
        finally:
            flight.completed.set()
            if flight.error is None and self._in_flight.get(key) is flight:
                del self._in_flight[key]

    def _forget_old_failures(self) -> None:
        now = trio.current_time()
        self._in_flight = {key: flight for key, flight in self._in_flight.items() if flight.forget_at >= now}

    async def _call_daemon(self, flight: _InFlightFetch, key: bytes, ref: BlockRef, began: float) -> FetchedBlock:
        # A read that was already waiting when another worker's read failed keeps its own deadline. (Marks count whole
        # milliseconds.)
        age = self._failures.age(key)
        if age < FAILURE_SECONDS and trio.current_time() - began <= age + 0.002:
            raise DaemonUnavailable("the fetch of this block timed out a moment ago, for another read")
        while True:
            left = flight.deadline - trio.current_time()
            flight.was_daemon_away = flight.was_daemon_away or self._channel.is_disconnected
            try:
                [fetched] = await self._channel.call(FetchRequest(blocks=[ref], deadline=max(0.0, left)), left)
            except DaemonUnavailable:
                # The daemon may be restarting, and has until the deadline to return.
                flight.was_daemon_away = True
                if trio.current_time() + DAEMON_RETRY_SECONDS > flight.deadline:
                    raise
                await trio.sleep(DAEMON_RETRY_SECONDS)
                continue
            if fetched.errno:
                error = CachefsError(fetched.message)
                error.errno = fetched.errno
                raise error
            return fetched
