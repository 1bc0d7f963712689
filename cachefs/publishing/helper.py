"""The helper process: it receives what one training process and its workers say, and tells the daemon.

It ends when the training process has ended, in whatever way. Where the daemon cannot be reached, it tries again at
growing intervals, and says so once on stderr.
"""

import os

# Before numpy is imported, which would start a thread per processor; each spins for 50 ms and has nothing to do here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import array
import contextlib
import json
import select
import selectors
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from cachefs.errors import CachefsError, ConfigError
from cachefs.publishing.channel import MAX_PACKET, PAGE_NAME, SLOTS, SOCKET_NAME, Line, Op, Page, Unheard
from cachefs.publishing.published_consumer import Opening, PublishedConsumer, as_order, spec_of
from cachefs.publishing.reporter import Reporter
from cachefs.rpc import DaemonClient
from cachefs.socket_path import socket_path

# Seconds between two reports of how far a consumer is.
TICK: Final = 0.25
# Seconds after which a consumer ends whose loader has ended. A loader that is made anew for every epoch is the same
# consumer.
REOPEN_SECONDS: Final = 10.0
# Seconds in which the daemon is told that it is over, once the training process has ended.
FAREWELL_SECONDS: Final = 3.0
# Seconds, at most, between the making of a helper's socket and the moment when the helper listens.
STARTING_SECONDS: Final = 60.0
_ONE_FD: Final = socket.CMSG_SPACE(array.array("i").itemsize)


def main(listener: str, owner: str, directory: str) -> None:
    """listener: descriptor of a listening socket; owner: process number of the training process."""
    try:
        alive = os.pidfd_open(int(owner))
    except ProcessLookupError:
        _clean_up(Path(directory))
        return
    try:
        # If it died before we could watch it, its number may be that of another process by now.
        if os.getppid() == int(owner):
            _sweep(Path(directory).parent.parent)
            threading.Thread(target=_end_soon_after, args=(alive, Path(directory)), daemon=True).start()
            Helper(socket.socket(fileno=int(listener)), alive, Path(directory), int(owner)).run()
    finally:
        _clean_up(Path(directory))


class Helper:
    """The helper of one training process."""

    def __init__(self, listener: socket.socket, alive: int, directory: Path, owner: int) -> None:
        """alive: descriptor that can be read when the training process has ended; owner: its process number."""
        self.consumers: dict[int, PublishedConsumer] = {}  # by slot
        self.reporter = Reporter(DaemonClient(socket_path()), owner)
        self._listener = listener
        self._alive = alive
        self._directory = directory
        self._page = Page(directory / PAGE_NAME)
        self._siblings: dict[Path, Line] = {}  # by directory, to the helpers of the job's other processes on this node
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(alive, selectors.EVENT_READ)

    def run(self) -> None:
        """Receive and report until the training process has ended."""
        due = 0.0
        while True:
            ready = [key.fileobj for key, _ in self._selector.select(max(0.0, due - time.monotonic()))]
            for source in ready:
                if source is self._listener:
                    self._accept()
                elif isinstance(source, socket.socket) and self._receive(source):
                    due = 0.0
            if time.monotonic() >= due:
                self._tick()
                due = time.monotonic() + TICK
            if self._alive in ready:
                self._farewell()
                return

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> bool:
        """Act on a message. True where the daemon should be told at once."""
        try:
            packet, ancillary, _, _ = connection.recvmsg(MAX_PACKET, _ONE_FD)
        except BlockingIOError:
            return False
        except OSError:
            packet, ancillary = b"", []
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not packet:
            self._selector.unregister(connection)
            connection.close()
            return False
        try:
            message = json.loads(packet)
            self._handle(message, b"".join(_read_all(fd) for fd in fds))
            return message["op"] in (Op.ORDER, Op.SPEC)
        except OSError as error:
            self.reporter.say(_of_system(error))
        except CachefsError as error:
            self.reporter.say(str(error))
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            self.reporter.say(f"a message of the training process makes no sense ({error!r})")
        finally:
            for fd in fds:
                os.close(fd)
        return False

    def _handle(self, message: dict[str, Any], bulk: bytes) -> None:
        if message["op"] == Op.OPEN:
            self._open(msgspec.convert(message["opening"], Opening), bulk)
            return
        consumer = self.consumers.get(message["slot"])
        if consumer is None:
            return
        if message["op"] == Op.ORDER:
            consumer.set_order(message["epoch"], as_order(bulk))
        elif message["op"] == Op.SPEC:
            consumer.set_spec(spec_of(message["spec"]), message["epoch"])
            consumer.published = False
        elif message["op"] == Op.OPENED and message["length"] == consumer.opening.length and consumer.opening.learn:
            consumer.learn(message["pairs"])
            if not message.get("relayed"):
                self._relay(message)
        elif message["op"] == Op.CLOSE:
            consumer.closing = time.monotonic() + message.get("after", REOPEN_SECONDS)

    def _open(self, opening: Opening, bulk: bytes) -> None:
        if not 0 <= opening.slot < SLOTS:
            raise ConfigError(f"consumer {opening.name} has no slot {opening.slot}")
        old = self.consumers.get(opening.slot)
        if old is not None and old.opening == opening and opening.learn:
            old.reopen()
            return
        consumer = self.consumers[opening.slot] = PublishedConsumer(opening)
        self._page.set_learned(opening.slot, not opening.learn)
        if opening.tree:
            consumer.set_files(files_below(os.path.join(opening.cwd, opening.tree)))
        elif not opening.learn:
            consumer.set_files([os.fsdecode(path) for path in bulk.split(b"\0")])

    def _tick(self) -> None:
        now = time.monotonic()
        for slot, consumer in list(self.consumers.items()):
            if consumer.closing is not None and now >= consumer.closing:
                self.reporter.end(consumer)
                del self.consumers[slot]
                continue
            position = self._page.position(slot)
            moved = position is not None and consumer.move(*position)
            if consumer.opening.learn:
                self._page.set_learned(slot, consumer.is_learned)
                try:
                    consumer.resolve_learned()
                except OSError as error:
                    self.reporter.say(_of_system(error))
            self.reporter.report(consumer, moved)

    def _farewell(self) -> None:
        for consumer in self.consumers.values():
            self.reporter.end(consumer)

    def _relay(self, message: dict[str, Any]) -> None:
        """Pass on what was learned to the job's other helpers, since ranks read different samples of one dataset."""
        for path in self._directory.parent.glob(f"*/{SOCKET_NAME}"):
            directory = path.parent
            if directory == self._directory:
                continue
            try:
                if directory not in self._siblings:
                    self._siblings[directory] = Line(directory)
                self._siblings[directory].send({**message, "relayed": True}, wait=False)
            except (OSError, Unheard):
                self._siblings.pop(directory, None)


def files_below(directory: str) -> list[str]:
    """All files below *directory* in the order of their path bytes, as a SampleMap of kind `tree`. Raises OSError."""
    found: list[bytes] = []
    for parent, _, names in os.walk(os.fsencode(directory), onerror=_raise):
        found += [os.path.join(parent, name) for name in names]
    return [os.fsdecode(path) for path in sorted(found)]


def _end_soon_after(alive: int, directory: Path) -> None:
    """End the helper after the training process, even where a call to the daemon is under way: the helper has the job's
    stderr open, and somebody may wait for the end of it."""
    select.select([alive], [], [])
    time.sleep(FAREWELL_SECONDS)
    _clean_up(directory)
    os._exit(0)


def _clean_up(directory: Path) -> None:
    """Remove the directory, and those of the job and of the user if it was the last one in them."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()
        directory.parent.parent.rmdir()


def _of_system(error: OSError) -> str:
    return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else str(error)


def _sweep(top: Path) -> None:
    """Remove what helpers have left that were killed, and whose sockets nobody listens to."""
    for socket_file in top.glob(f"*/*/{SOCKET_NAME}"):
        with contextlib.suppress(OSError):
            if time.time() - socket_file.lstat().st_mtime < STARTING_SECONDS:
                continue
            try:
                Line(socket_file.parent).close()
            except ConnectionRefusedError:
                _clean_up(socket_file.parent)


def _raise(error: OSError) -> None:
    raise error


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    parts = []
    offset = 0
    while offset < size and (part := os.pread(fd, size - offset, offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
