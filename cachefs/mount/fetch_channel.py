"""The mount's end of the fetch channel: many requests on one connection, answered in any order.

A request is one send(2) of a small frame. Its task sleeps until the task that reads the connection hands it the answer,
so that thousands of readers that wait for an origin take no threads. While the daemon is away, requests wait for it,
and a single task tries to connect for all of them.
"""

import contextlib
import itertools
import logging
import socket
from pathlib import Path
from typing import Final

import outcome
import trio

from cachefs import errors
from cachefs.errors import AccessDenied, CachefsError, DaemonUnavailable
from cachefs.fetch_frames import (
    HELLO_SECONDS,
    MOST_ANSWERED,
    VERSION,
    Answered,
    Asked,
    BadFrame,
    Frames,
    Hello,
    decoder,
    fetch_socket,
    frame,
)  # fmt: skip
from cachefs.messages import Fetch, FetchedBlock

log = logging.getLogger(__name__)

# Seconds between tries to reach a daemon that does not answer.
DAEMON_RETRY: Final = 0.1
# Most bytes queued for a daemon that does not read; beyond them the connection is closed.
MOST_UNSENT: Final = 4 << 20
_AT_ONCE: Final = 260 << 10  # most bytes of one recv: an answer with a block in it
_HINT: Final = "one older than this mount has no such socket: restart it with this version of cachefs"

_hello, _answered = decoder(Hello), decoder(Answered)


class FetchChannel:
    """Requests blocks from the daemon, for one process of a mount."""

    def __init__(self, daemon_socket: Path) -> None:
        self._path = fetch_socket(daemon_socket)
        self._connection: _Connection | None = None
        self._wanted = trio.Event()  # set while a connection is needed, as at the start
        self._wanted.set()
        self._attempt = _Attempt()  # the next attempt to connect
        self._waiting = 0  # requests that wait for a connection
        self._trouble = ""  # error of the last attempt

    @property
    def is_away(self) -> bool:
        """True where there is no connection to the daemon."""
        return self._connection is None

    async def run(self) -> None:
        """Keep a connection to the daemon while requests need one. Never returns."""
        while True:
            await self._wanted.wait()
            try:
                connection = await _connect(self._path)
            except CachefsError as error:
                self._trouble = str(error)
                if not isinstance(error, DaemonUnavailable):
                    self._end_attempt(error)
                await trio.sleep(DAEMON_RETRY)
                if not self._waiting:
                    self._wanted = trio.Event()
                continue
            self._connection = connection
            self._end_attempt(None)
            try:
                await connection.serve()
            finally:
                self._connection = None
                self._wanted = trio.Event()

    async def call(self, fetch: Fetch, seconds: float) -> list[FetchedBlock]:
        """Return the results of the blocks, in order. Waits at most *seconds*, also for a daemon that has not started.

        Raises DaemonUnavailable, also where the daemon ends in the meantime, and the daemon's error where it refuses.
        """
        with trio.move_on_after(max(0.0, seconds)):
            answer = await (self._connection or await self._connected()).ask(fetch)
            if answer.kind:
                raise _refusal(answer.kind, answer.message)
            if len(answer.blocks) != len(fetch.blocks):
                raise CachefsError(f"the daemon has answered {len(answer.blocks)} blocks for {len(fetch.blocks)}")
            return answer.blocks
        trouble = f": {self._trouble}" if self._connection is None and self._trouble else ""
        raise DaemonUnavailable(
            f"the daemon at {self._path} did not answer in time; is it running? See its log{trouble}"
        )

    def send(self, fetch: Fetch) -> None:
        """Announce fetches without waiting for an answer. While the daemon is away, nothing is sent."""
        if self._connection is not None:
            self._connection.tell(fetch)

    async def _connected(self) -> "_Connection":
        """Raises CachefsError where the daemon refuses."""
        self._waiting += 1
        try:
            while self._connection is None:
                attempt = self._attempt
                self._wanted.set()
                await attempt.over.wait()
                if attempt.error is not None:
                    raise type(attempt.error)(*attempt.error.args)
            return self._connection
        finally:
            self._waiting -= 1

    def _end_attempt(self, error: CachefsError | None) -> None:
        """Pass the outcome of the attempt to all requests that wait for a connection."""
        attempt, self._attempt = self._attempt, _Attempt()
        attempt.error = error
        attempt.over.set()


class _Attempt:
    """An attempt to connect."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.error: CachefsError | None = None  # the refusal of the daemon


class _Connection:
    """One connection, after the exchange of Hello frames."""

    def __init__(self, connection: socket.socket, frames: Frames) -> None:
        """frames: holds the bytes received so far of the next frame."""
        self._socket = connection
        self._frames = frames
        self._numbers = itertools.count(1)
        self._waiting: dict[int, trio.lowlevel.Task] = {}  # by request number
        self._unsent = bytearray()
        self._more = trio.Event()  # set while bytes are unsent

    async def ask(self, fetch: Fetch) -> Answered:
        """Raises DaemonUnavailable where the connection ends before the answer."""
        number = next(self._numbers)
        data = frame(Asked(number=number, fetch=fetch))
        self._waiting[number] = trio.lowlevel.current_task()
        self._write(data)

        def give_up(_: object) -> trio.lowlevel.Abort:
            # The daemon goes on with the fetch; its answer will be ignored.
            self._waiting.pop(number, None)
            return trio.lowlevel.Abort.SUCCEEDED

        answer: Answered = await trio.lowlevel.wait_task_rescheduled(give_up)
        return answer

    def tell(self, fetch: Fetch) -> None:
        """Send a request whose answer is ignored, unless the daemon does not read."""
        if not self._unsent:
            self._write(frame(Asked(number=next(self._numbers), fetch=fetch)))

    def close(self) -> None:
        self._socket.close()

    async def serve(self) -> None:
        """Hand out answers until the connection ends. Tasks that still wait then get an error."""
        error: CachefsError = DaemonUnavailable("the daemon has gone away")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_rest)
                await self._hand_out()
                nursery.cancel_scope.cancel()
        except* BadFrame as found:
            error = CachefsError(
                f"the daemon's answer makes no sense ({found.exceptions[0]}); are mount and daemon of one version?"
            )
        except* OSError:
            pass
        finally:
            self.close()
            for task in self._waiting.values():
                trio.lowlevel.reschedule(task, outcome.Error(type(error)(*error.args)))
            self._waiting.clear()

    async def _hand_out(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            data = self._socket.recv(_AT_ONCE)
            if not data:
                return
            for body in self._frames.feed(data):
                answer = _answered(body)
                task = self._waiting.pop(answer.number, None)
                if task is not None:
                    trio.lowlevel.reschedule(task, outcome.Value(answer))

    def _write(self, data: bytes | bytearray) -> None:
        """Send as much as the socket takes now; `_send_rest` sends the rest."""
        sent = 0
        if not self._unsent:
            with contextlib.suppress(OSError):  # `serve` meets and handles the same error
                sent = self._socket.send(data)
        if sent < len(data):
            self._unsent += data[sent:]
            self._more.set()
        if len(self._unsent) > MOST_UNSENT:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    async def _send_rest(self) -> None:
        """Send the queued bytes whenever the socket takes more. Raises OSError."""
        while True:
            await self._more.wait()
            await trio.lowlevel.wait_writable(self._socket)
            with contextlib.suppress(BlockingIOError):
                del self._unsent[: self._socket.send(self._unsent)]
            if not self._unsent:
                self._more = trio.Event()


async def check(daemon_socket: Path) -> None:
    """Connect once, to find out whether the daemon serves blocks. Raises CachefsError where it does not."""
    (await _connect(fetch_socket(daemon_socket))).close()


async def _connect(path: Path) -> _Connection:
    """Connect and exchange Hello. Raises DaemonUnavailable without an answer, another CachefsError after a refusal."""
    with contextlib.ExitStack() as undo:
        frames = Frames(MOST_ANSWERED)
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            undo.callback(connection.close)
            connection.connect(str(path))
            with contextlib.suppress(BrokenPipeError):  # a daemon that refuses hangs up at once; its Hello says why
                connection.send(frame(Hello(version=VERSION)))
            with trio.fail_after(HELLO_SECONDS):
                hello = await _first_frame(connection, frames)
        except PermissionError:
            raise AccessDenied(f"you may not use the socket {path} of the daemon; ask who runs it") from None
        except (OSError, trio.TooSlowError) as error:
            hint = f"; {_HINT}" if isinstance(error, FileNotFoundError | ConnectionRefusedError) else ""
            raise DaemonUnavailable(f"no daemon answers at {path} ({error}){hint}") from None
        _check(hello, path)
        undo.pop_all()
    return _Connection(connection, frames)


async def _first_frame(connection: socket.socket, frames: Frames) -> bytes | memoryview:
    """Raises OSError, BadFrame."""
    while True:
        await trio.lowlevel.wait_readable(connection)
        data = connection.recv(_AT_ONCE)
        if not data:
            raise ConnectionResetError("it has hung up")
        if found := frames.feed(data):
            return found[0]


def _check(body: bytes | memoryview, path: Path) -> None:
    """Raise CachefsError where the daemon's Hello is a refusal, or of another version."""
    try:
        hello = _hello(body)
    except BadFrame as error:
        raise CachefsError(f"what answers at {path} is no daemon of this mount's version ({error})") from None
    if hello.refusal:
        raise _refusal(hello.kind, hello.refusal)
    if hello.version != VERSION:
        raise CachefsError(
            f"the daemon at {path} speaks version {hello.version} of the fetch channel and this mount version "
            f"{VERSION}: update the older one; unmount and mount again, or restart the daemon"
        )


def _refusal(kind: str, message: str) -> CachefsError:
    found = getattr(errors, kind, None)
    is_ours = isinstance(found, type) and issubclass(found, CachefsError)
    return (found if is_ours else CachefsError)(message)  # type: ignore[misc]
