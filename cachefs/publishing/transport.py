"""Transport to the daemon: its socket, or, where that is missing or forbidden, the control files of mounts.

Each call chooses anew until one was answered. Then the choice stays, since a daemon has no socket while it restarts.

`ControlClient` replaces `DaemonClient` where the process may not use the daemon's socket. A call opens the control
file, writes its lines, and waits for the response in a FIFO of its own (cachefs.control_calls). Between calls nothing
is open, so that the mount can be unmounted.
"""

import contextlib
import errno
import os
import secrets
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from cachefs import errors
from cachefs.control_calls import (
    MAX_REQUEST_BYTES,
    TOKEN_BITS,
    CallResponse,
    call_lines,
    format_token,
    response_fifo_name,
)
from cachefs.errors import CachefsError, ConfigError, DaemonUnavailable, NotFound
from cachefs.inodes import read_mounted_snapshot, slot_of
from cachefs.job_messages import JobPublication
from cachefs.messages import Empty, Message
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import MountPoint
from cachefs.publishing import clock
from cachefs.rpc import DATASET_LIST, DaemonClient, Method, encode, response_decoder
from cachefs.socket_path import refusal_reason

CONTROL_FILE: Final = ".cachefs/publish"
# Seconds between two attempts to open the control file, until the mount has started a process that reads.
_RETRY_SECONDS: Final = 0.02
# Maximum writes of one call, as each process that reads the control file may end during the call.
_MAX_TRIES: Final = 5
_PIPE: Final = 1 << 16
_READ: Final = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC  # to have written too means that there is never an end
_WRITE: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)

# Seconds without a call after which a job has ended whose process the daemon does not see.
SOCKET_LEASE: Final = 60.0
# A lease through a mount, where the daemon may not trust the process number, and often does not see the process.
CONTROL_LEASE: Final = 30.0
# Maximum timeout of a call until one was answered through a mount, whose daemon may be away.
_FIRST_SECONDS: Final = 10.0


class ControlClient:
    """Makes the calls of one process. May be used by one thread."""

    def __init__(self) -> None:
        self._token = format_token(secrets.randbits(TOKEN_BITS))
        self._calls = 0
        # Directory of the mount that shows a (dataset, snapshot); and, once it is published, a consumer.
        self._shown: dict[tuple[str, str], Path] = {}
        self._consumers: dict[str, Path] = {}

    def dataset_at(self, mount: MountPoint, slot: int) -> tuple[str, str]:
        """Return name and snapshot of the dataset whose files have inodes of this slot. Raises ConfigError."""
        for name, directory in _shown_datasets(mount):
            with contextlib.suppress(OSError):
                shown, snapshot = read_mounted_snapshot(directory)
                if shown == slot:
                    self._shown[name, snapshot] = mount.path
                    return name, snapshot
        raise _unusable_mount(mount.path / CONTROL_FILE, "the mount does not name its snapshot")

    def call(self, method: Method[Request, Reply], request: Request, timeout: float = 30.0) -> Reply:
        """Call the daemon.

        Raises the CachefsError that the daemon raised, DaemonUnavailable where there is no progress for *timeout*
        seconds, and ConfigError for a request too large for a mount.
        """
        encoded = encode(request)
        if len(encoded) > MAX_REQUEST_BYTES:
            raise ConfigError(
                f"{len(encoded) >> 20} MiB to publish at once; {MAX_REQUEST_BYTES >> 20} go through the mount, and "
                "more over the daemon's socket"
            )
        self._calls += 1
        directory = self._directory(request)
        with _open_fifo(
            directory / ".cachefs" / response_fifo_name(self._token), _READ, clock.monotonic() + timeout
        ) as response_fifo:
            response = _ControlCall(directory, response_fifo, timeout).run(
                list(call_lines(self._token, self._calls, method.name, encoded)), self._calls
            )
        if response.error:
            kind: Any = getattr(errors, response.error, None)
            raise (kind if isinstance(kind, type) and issubclass(kind, CachefsError) else CachefsError)(response.text)
        reply: Reply = response_decoder(method.response)(response.reply)
        return reply

    def _directory(self, request: Any) -> Path:
        if isinstance(request, JobPublication):
            self._consumers[request.consumer] = self._shown[request.dataset, request.snapshot]
        consumer = getattr(request, "consumer", None)
        found = self._consumers.get(consumer) if consumer is not None else next(iter(self._consumers.values()), None)
        if found is None:
            raise NotFound(f"consumer {consumer} was not published through a mount")
        return found


class _ControlCall:
    """One call: writes its lines, and waits for its response."""

    def __init__(self, directory: Path, response_fifo: int, timeout: float) -> None:
        """directory: of the mount; response_fifo: descriptor of the FIFO; timeout: seconds without progress."""
        self._file = directory / CONTROL_FILE
        self._response_fifo = response_fifo
        self._timeout = timeout
        self._deadline = clock.monotonic() + timeout
        self._received = bytearray()

    def run(self, lines: list[bytes], number: int) -> CallResponse:
        """Write the lines and return the response. Where the process that reads the control file is replaced, the lines
        that it has read are lost, and all are written again. Raises DaemonUnavailable, ConfigError."""
        for _ in range(_MAX_TRIES):
            with _open_fifo(self._file, _WRITE, self._deadline) as fd:
                try:
                    for line in lines:
                        self._write_line(fd, line)
                    return self._wait_for_response(fd, number)
                except BrokenPipeError:
                    self._check_time()
        raise _unanswered(self._file)

    def _write_line(self, fd: int, line: bytes) -> None:
        """Raises BrokenPipeError, DaemonUnavailable."""
        while True:
            try:
                os.write(fd, line)  # all of it, or nothing (pipe(7))
            except BlockingIOError:
                self._wait_for_event(fd, select.POLLOUT)
            else:
                self._deadline = clock.monotonic() + self._timeout
                return

    def _wait_for_response(self, fd: int, number: int) -> CallResponse:
        """Raises BrokenPipeError where no process reads the control file any more, DaemonUnavailable."""
        while True:
            while b"\n" in self._received:
                line, _, remainder = bytes(self._received).partition(b"\n")
                self._received[:] = remainder
                with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
                    response = msgspec.json.decode(line, type=CallResponse)
                    if response.id == number:  # not a late response to a call that timed out
                        return response
            if self._wait_for_event(fd, 0, self._response_fifo):
                with contextlib.suppress(BlockingIOError):
                    self._received += os.read(self._response_fifo, _PIPE)

    def _wait_for_event(self, fd: int, events: int, also: int | None = None) -> bool:
        """Wait for *events* of *fd*, or until *also* can be read; return whether it can. Raises as
        `_wait_for_response`."""
        poll = select.poll()
        poll.register(fd, events)  # poll always reports POLLERR: no process reads the file
        if also is not None:
            poll.register(also, select.POLLIN)
        ready = dict(poll.poll(max(0.0, self._deadline - clock.monotonic()) * 1000))
        if also is not None and ready.get(also, 0) & select.POLLIN:
            return True
        if ready.get(fd, 0) & select.POLLERR:
            raise BrokenPipeError
        self._check_time()
        return False

    def _check_time(self) -> None:
        if clock.monotonic() >= self._deadline:
            raise _unanswered(self._file)


@contextlib.contextmanager
def _open_fifo(path: Path, flags: int, deadline: float) -> Iterator[int]:
    """Open a FIFO once another process has it open for reading. Raises DaemonUnavailable at the *deadline* (monotonic
    seconds), ConfigError where there is no FIFO."""
    while True:
        try:
            fd = os.open(path, flags)
            break
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS):
                raise _unusable_mount(path, str(error.strerror)) from None
            if error.errno not in (errno.ENXIO, errno.EINTR) or clock.monotonic() >= deadline:
                raise _unanswered(path) from None
            clock.sleep(_RETRY_SECONDS)
    try:
        yield fd
    finally:
        os.close(fd)


def _unusable_mount(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"nothing can be published through {path} ({why}): publishing needs a whole mount, not one of its "
        "directories, made by this version of cachefs and without a umask"
    )


def _unanswered(path: Path) -> DaemonUnavailable:
    return DaemonUnavailable(f"no daemon answers through {path}; does it run on the node, and the mount?")


def _shown_datasets(mount: MountPoint) -> Iterator[tuple[str, Path]]:
    """Yield name and root of each dataset that the mount shows."""
    spec = MountSpec.parse(mount.spec)
    if spec.is_single:
        yield spec.datasets[0].name, mount.path
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(mount.path):
            yield name, mount.path / name


class DaemonTransport:
    """Calls the daemon for one process."""

    def __init__(self, socket: DaemonClient) -> None:
        self._socket = socket
        self._control = ControlClient()
        self._answering_client: DaemonClient | ControlClient | None = None  # the client that was answered

    @property
    def socket_refusal(self) -> str:
        """The reason why the socket cannot be used; "" where it can, or was used."""
        return "" if self._client is self._socket else refusal_reason(self._socket.socket)

    @property
    def lease(self) -> float:
        """The lease in seconds, see JobPublication."""
        return SOCKET_LEASE if self._client is self._socket else CONTROL_LEASE

    def call(self, method: Method[Request, Reply], request: Request, timeout: float) -> Reply:
        """Call the daemon, with the arguments and errors of DaemonClient.call."""
        client = self._client
        if self._answering_client is None and client is self._control:
            timeout = min(timeout, _FIRST_SECONDS)
        try:
            reply = client.call(method, request, timeout)
        except ConfigError as error:
            if self._answering_client is None and client is self._control:
                raise ConfigError(f"{refusal_reason(self._socket.socket)}, and {error}") from None
            raise
        self._answering_client = client
        return reply

    def dataset_at(self, mount: MountPoint, slot: int, timeout: float) -> tuple[str, str]:
        """Return name and snapshot of the dataset with inodes of this slot. Raises NotFound, and as `call`."""
        client = self._client
        if isinstance(client, ControlClient):
            try:
                return client.dataset_at(mount, slot)
            except ConfigError as error:
                raise ConfigError(f"{refusal_reason(self._socket.socket)}, and {error}") from None
        views = self.call(DATASET_LIST, Empty(), timeout).datasets
        spec = MountSpec.parse(mount.spec)
        views = [view for view in views if spec.is_showing(view.name)]
        # Current snapshots come before others. `snapshot` is empty where a dataset's snapshot is lost.
        snapshots = [(view.name, view.snapshot) for view in views if view.snapshot]
        snapshots += [(view.name, snapshot) for view in views for snapshot in view.others]
        for name, snapshot in snapshots:
            if slot_of(snapshot) == slot:
                return name, snapshot
        raise NotFound(f"the daemon at {client.socket} does not know the snapshot at {mount.path}")

    @property
    def _client(self) -> DaemonClient | ControlClient:
        if self._answering_client is not None:
            return self._answering_client
        return self._control if refusal_reason(self._socket.socket) else self._socket
