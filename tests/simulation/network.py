"""A simulated network: TCP connections between machines, with delays, cuts, resets and the time-outs of TCP.

An `End` has the methods of `socket.socket` that the product calls, for its threads and for its event loop. Bytes
arrive in order, after the delay of their link and in pieces that the seed picks. Where a link is cut they wait until it
heals, as TCP sends them again; both ends give the connection up after the times that their socket options say.
"""

import asyncio
import contextlib
import contextvars
import errno
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from tests.simulation.loop import OUTSIDE, PROCESS, Process, SimulatedLoop, Wake, running_loop

# Bytes on their way, or not read yet, that a connection takes.
WINDOW: Final = 1 << 20
BANDWIDTH: Final = 1 << 30
# Seconds after which a connection with SO_KEEPALIVE is given up whose link is cut (see `peers.wire.prepare`).
KEEPALIVE_SECONDS: Final = 11.0
# Seconds that a look takes at least.
LEAST_SECONDS: Final = 1e-6
# Seconds between two attempts to connect over a link that is cut.
SYN_SECONDS: Final = 1.0

Address: TypeAlias = tuple[str, int]
Dialled = Callable[["End | OSError"], None]


class Network:
    """All machines, by their addresses, and what is between them."""

    def __init__(self, loop: SimulatedLoop, chances: random.Random, trace: Callable[..., None]) -> None:
        self.loop = loop
        self.chances = chances
        self.trace = trace
        self.listeners: dict[Address, Listener] = {}
        self.powered_off: set[str] = set()
        self.ends: set[End] = set()
        self.by_number: dict[int, End | Listener | WakeUp] = {}
        self.slow: dict[frozenset[str], float] = {}  # seconds that a link takes more
        self.break_rate = 0.0  # the share of messages with which a connection breaks
        self._cut: set[tuple[str, str]] = set()  # one direction each
        self._base: dict[frozenset[str], float] = {}
        self._numbers = iter(range(1000, 1 << 60))

    def number(self, thing: "End | Listener | WakeUp") -> int:
        """Give it a descriptor."""
        found = next(self._numbers)
        self.by_number[found] = thing
        return found

    # --- links ----------------------------------------------------------------------------------------------------

    def is_cut(self, one: str, other: str) -> bool:
        return (one, other) in self._cut or one in self.powered_off or other in self.powered_off

    def cut(self, one: str, other: str) -> None:
        """Lose everything that *one* sends to *other*."""
        self._cut.add((one, other))

    def heal(self) -> None:
        """End all cuts."""
        self._cut.clear()
        self.slow.clear()
        self._send_again()

    def power(self, host: str, *, on: bool) -> None:
        """Switch a machine, so that nobody hears of the end of its connections."""
        (self.powered_off.discard if on else self.powered_off.add)(host)
        self._send_again()

    def _send_again(self) -> None:
        for end in sorted(self.ends, key=lambda one: one.serial):
            end.send_again()

    def delay(self, one: str, other: str) -> float:
        """Return the seconds that a message takes now."""
        if one == other:
            return 0.00002
        link = frozenset((one, other))
        base = self._base.get(link)
        if base is None:
            base = self._base[link] = self.chances.choice((0.0001, 0.0003, 0.001))
        seconds = base * (1 + self.chances.random())
        if self.chances.random() < 0.01:
            seconds += self.chances.random() * 0.05
        return seconds + self.slow.get(link, 0.0)

    # --- connections ----------------------------------------------------------------------------------------------

    def pair(self, one: Process | None, other: Process | None) -> "tuple[End, End]":
        """Connect two ends, each with its process."""
        first, second = End(self, one), End(self, other)
        first.peer, second.peer = second, first
        return first, second

    def dial(self, process: Process, address: Address, done: Dialled) -> None:
        """Connect, and call *done*."""
        self.loop.call_later(
            self.delay(process.host, address[0]), self._arrive, process, address, done, context=OUTSIDE
        )

    def _arrive(self, process: Process, address: Address, done: Dialled) -> None:
        back = self.delay(address[0], process.host)
        if not process.is_alive:
            return
        if self.is_cut(process.host, address[0]) or self.is_cut(address[0], process.host):
            self.loop.call_later(SYN_SECONDS, self._arrive, process, address, done, context=OUTSIDE)
            return
        listener = self.listeners.get(address)
        if listener is None or not listener.process.is_alive:
            refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            self.loop.call_later(back, done, refused, context=OUTSIDE)
            return
        ours, theirs = self.pair(process, listener.process)
        ours.address, theirs.address = address, (process.host, 40000 + ours.serial % 20000)
        listener.take(theirs)
        self.loop.call_later(back, done, ours, context=OUTSIDE)

    async def connected(self, address: Address) -> "End":
        """Connect, in a task. Raises OSError."""
        process = PROCESS.get()
        assert process is not None
        future: asyncio.Future[End] = self.loop.create_future()

        def done(found: "End | OSError") -> None:
            if future.done():
                if isinstance(found, End):
                    found.close()
            elif isinstance(found, OSError):
                future.set_exception(found)
            else:
                future.set_result(found)

        self.dial(process, address, done)
        return await future


class End:
    """One end of a connection."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP
    peer: "End"

    def __init__(self, network: Network, process: Process | None) -> None:
        self.network = network
        self.process = process
        self.serial = network.number(self)
        self.address: Address = ("", 0)
        self.timeout: float | None = None  # None: it blocks
        self.is_closed = False  # by its process
        self.references = 1
        self.watchers: set[Callable[[], None]] = set()
        self.transport: Transport | None = None
        self._inbox = bytearray()
        self._has_ended = False  # the other side sends nothing more
        self._error: OSError | None = None
        self._unread = 0  # bytes that the peer has not read yet
        self._last_arrival = 0.0
        self._held: deque[bytes | None] = deque()  # what a cut keeps from arriving; None: the end
        self._on_room: list[Wake] = []
        self._send_timeout: float | None = None
        self._user_timeout = 0.0
        self._keepalive = False
        self._is_watched = False  # is it going to be looked at whether its link is still cut?
        network.ends.add(self)
        if process is not None:
            process.on_end.append(self._die)

    # --- what the product calls: socket.socket --------------------------------------------------------------------

    def __enter__(self) -> "End":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return -1 if self.is_closed else self.serial

    def setblocking(self, flag: bool) -> None:
        self.timeout = None if flag else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self.timeout = seconds

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if level == socket.IPPROTO_TCP and option == socket.TCP_USER_TIMEOUT:
            self._user_timeout = value / 1000
        elif level == socket.SOL_SOCKET and option == socket.SO_KEEPALIVE:
            self._keepalive = bool(value)
        elif level == socket.SOL_SOCKET and option == socket.SO_SNDTIMEO:
            self._send_timeout = float(struct.unpack("ll", value)[0])

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    def getpeername(self) -> Address:
        return self.address

    def getsockname(self) -> Address:
        return self.peer.address

    def recv(self, most: int, flags: int = 0) -> bytes:
        if not self._wait_readable(flags):
            return b""
        data = bytes(self._inbox[:most])
        self._consume(len(data))
        return data

    def recv_into(self, view: memoryview) -> int:
        if not self._wait_readable(0):
            return 0
        count = min(len(view), len(self._inbox))
        view[:count] = self._inbox[:count]
        self._consume(count)
        return count

    def _wait_readable(self, flags: int) -> bool:
        """Return whether there are bytes; False at the end. Raises OSError."""
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if not self.is_readable:
            if self.timeout == 0.0 or flags & socket.MSG_DONTWAIT:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            if not wait_for([self], self.timeout):
                raise TimeoutError("timed out")
        if not self._inbox and self._error is not None:
            raise self._error
        return bool(self._inbox)

    def send(self, data: Any, flags: int = 0) -> int:
        self._check_open()
        room = WINDOW - self._unread
        if room <= 0:
            if self.timeout == 0.0:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            if not self.network.loop.pause(self._on_room.append, self.timeout or self._send_timeout):
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            self._check_open()
            room = max(1, WINDOW - self._unread)
        taken = bytes(memoryview(data)[:room])
        self._unread += len(taken)
        self._transmit(taken)
        return len(taken)

    def sendall(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def shutdown(self, how: int) -> None:
        if self._error is not None or self.is_closed:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        self._transmit(None)
        self._has_ended = True
        self._tell()

    def close(self) -> None:
        self.references -= 1
        if self.references <= 0 and not self.is_closed:
            self.is_closed = True
            self.network.by_number.pop(self.serial, None)
            self._transmit(None)
            self._forget()

    def adopt(self, process: Process | None) -> None:
        """Have it end with *process*, and no longer with the one before."""
        if self.process is not None and self._die in self.process.on_end:
            self.process.on_end.remove(self._die)
        self.process = process
        if process is not None:
            process.on_end.append(self._die)

    # --- readiness ------------------------------------------------------------------------------------------------

    @property
    def is_readable(self) -> bool:
        return bool(self._inbox) or self._has_ended or self._error is not None

    @property
    def is_writable(self) -> bool:
        return self._unread < WINDOW or self._error is not None

    def when_writable(self, wake: Wake) -> None:
        """Call it once there is room."""
        self._on_room.append(wake)

    def _tell(self) -> None:
        for watcher in list(self.watchers):
            watcher()

    # --- the wire -------------------------------------------------------------------------------------------------

    @property
    def host(self) -> str:
        return self.process.host if self.process is not None else ""

    def _check_open(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self._error is not None:
            raise self._error

    def _consume(self, count: int) -> None:
        del self._inbox[:count]
        peer = self.peer
        peer._unread -= count
        if peer._unread < WINDOW and peer._on_room:
            waiting, peer._on_room = peer._on_room, []
            for wake in waiting:
                wake(True)

    def _transmit(self, data: bytes | None) -> None:
        network = self.network
        if (
            data
            and network.break_rate
            and network.chances.random() < network.break_rate
            and self.host != self.peer.host
        ):
            network.trace("broken", self.host, self.peer.host)
            self.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
            self.peer.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
            return
        if data and len(data) > 64 and network.chances.random() < 0.05:
            at = network.chances.randrange(1, len(data))
            self._send_piece(data[:at])
            self._send_piece(data[at:])
        else:
            self._send_piece(data)

    def _send_piece(self, data: bytes | None) -> None:
        network = self.network
        seconds = network.delay(self.host, self.peer.host) + len(data or b"") / BANDWIDTH
        when = max(network.loop.time() + seconds, self._last_arrival + 1e-9)
        self._last_arrival = when
        network.loop.call_at(when, self._arrive, data, context=OUTSIDE)

    def _arrive(self, data: bytes | None) -> None:
        peer = self.peer
        if self._held or (self.host != peer.host and self.network.is_cut(self.host, peer.host)):
            self._held.append(data)
            self._watch_cut()
            return
        if peer.is_closed or peer._error is not None:
            if data and peer.process is not None and self._error is None:
                self.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
            return
        if data is None:
            peer._has_ended = True
        else:
            peer._inbox += data
        peer._tell()

    def send_again(self) -> None:
        """What a cut has held arrives, if it is over."""
        if self._held and not self.network.is_cut(self.host, self.peer.host):
            held, self._held = self._held, deque()
            for data in held:
                self._send_piece(data)

    def _watch_cut(self) -> None:
        """Give up as TCP does, where the link stays cut."""
        for end, seconds in ((self, self._user_timeout), (self.peer, KEEPALIVE_SECONDS if self.peer._keepalive else 0)):
            if seconds and not end._is_watched:
                end._is_watched = True
                self.network.loop.call_later(seconds, end._look_at_cut, context=OUTSIDE)

    def _look_at_cut(self) -> None:
        self._is_watched = False
        if self._held or self.peer._held:
            self.fail(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))

    def fail(self, error: OSError) -> None:
        """The connection is broken, as this end sees it."""
        if self._error is None and not self.is_closed:
            self._error = error
            self._held.clear()
            waiting, self._on_room = self._on_room, []
            for wake in waiting:
                wake(True)
            self._tell()

    def _die(self) -> None:
        """Its process has been killed: the kernel closes it, unless the machine is off."""
        if self.is_closed:
            return
        self.is_closed = True
        self._forget()
        if self.host not in self.network.powered_off:
            self._send_piece(None)

    def _forget(self) -> None:
        if not self._held:
            self.network.ends.discard(self)
        if self.process is not None and self.process.is_alive:
            with contextlib.suppress(ValueError):
                self.process.on_end.remove(self._die)


class Listener:
    """A socket that listens."""

    def __init__(self, network: Network, process: Process, address: Address) -> None:
        self.network = network
        self.process = process
        self.address = address
        self.serial = network.number(self)
        self.watchers: set[Callable[[], None]] = set()
        self.on_connection: Callable[[End], None] | None = None
        self._backlog: deque[End] = deque()
        self.sockets = (self,)

    def listen(self, backlog: int = 0) -> None:
        self.network.listeners[self.address] = self

    def setblocking(self, flag: bool) -> None: ...

    def fileno(self) -> int:
        return self.serial

    def getsockname(self) -> Address:
        return self.address

    @property
    def is_readable(self) -> bool:
        return bool(self._backlog)

    def take(self, end: End) -> None:
        """A connection has come."""
        if self.on_connection is not None:
            self.network.loop.call_soon(self.on_connection, end, context=self.process.context.copy())
            return
        self._backlog.append(end)
        for watcher in list(self.watchers):
            watcher()

    def accept(self) -> tuple[End, Address]:
        if not self._backlog:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        end = self._backlog.popleft()
        end.adopt(PROCESS.get())
        return end, end.address

    def close(self) -> None:
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]

    def is_serving(self) -> bool:
        return self.network.listeners.get(self.address) is self

    async def wait_closed(self) -> None: ...


class WakeUp:
    """Stands in for an eventfd."""

    def __init__(self, network: Network) -> None:
        self.serial = network.number(self)
        self.watchers: set[Callable[[], None]] = set()
        self.is_readable = False

    def write(self) -> None:
        self.is_readable = True
        for watcher in list(self.watchers):
            watcher()


Readable: TypeAlias = "End | Listener | WakeUp"


def wait_for(things: "list[Readable]", seconds: float | None) -> bool:
    """Suspend the thread until one of them is readable. Returns whether one is."""
    if any(one.is_readable for one in things):
        return True
    if seconds is not None:
        seconds = max(seconds, LEAST_SECONDS)  # else a thread whose time is nearly over would look again for ever
    watchers: list[Callable[[], None]] = []

    def register(wake: Wake) -> None:
        watchers.append(lambda: wake(True))
        for one in things:
            one.watchers.add(watchers[0])

    try:
        running_loop().pause(register, seconds)
    finally:
        for one in things:
            one.watchers.discard(watchers[0])
    return any(one.is_readable for one in things)


class Poll:
    """Stands in for `select.poll` and `select.epoll`."""

    def __init__(self, network: Network, *, in_milliseconds: bool) -> None:
        self._network = network
        self._scale = 1000.0 if in_milliseconds else 1.0
        self._things: dict[int, Readable] = {}
        self._changed = WakeUp(network)

    def register(self, thing: Any, _: int = 0) -> None:
        number = thing if isinstance(thing, int) else thing.fileno()
        self._things[number] = self._network.by_number[number]
        self._changed.write()

    def unregister(self, thing: Any) -> None:
        self._things.pop(thing if isinstance(thing, int) else thing.fileno(), None)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        while True:
            self._changed.is_readable = False
            things = list(self._things.items())
            seconds = timeout / self._scale if timeout is not None and timeout >= 0 else None
            wait_for([*(one for _, one in things), self._changed], seconds)
            found = [(number, 1) for number, one in things if one.is_readable]
            if found or not self._changed.is_readable:
                return found

    def close(self) -> None: ...


class Transport(asyncio.Transport):
    """An asyncio transport over an end."""

    def __init__(self, end: End, protocol: Any) -> None:
        super().__init__()
        self._end = end
        end.timeout = 0.0
        self._loop = end.network.loop
        self._protocol = protocol
        self._outbox = bytearray()
        self._is_closing = self._is_lost = self._is_reading_paused = self._is_writing_paused = False
        self._is_scheduled = False
        self._ends_writing = False
        end.transport = self
        self._context = contextvars.copy_context()
        self._watcher = self._look_soon
        end.watchers.add(self._watcher)

    def begin(self) -> None:
        """Tell the protocol."""
        self._protocol.connection_made(self)
        self._look_soon()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return self._end
        if name == "peername":
            return self._end.address
        return default

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return not self._is_reading_paused

    def pause_reading(self) -> None:
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        self._is_reading_paused = False
        self._look_soon()

    def get_write_buffer_size(self) -> int:
        return len(self._outbox)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: Any) -> None:
        if self._is_lost or self._ends_writing:
            return
        self._outbox += data
        self._flush()

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._ends_writing = True
        self._flush()

    def _flush(self, _: bool = True) -> None:
        try:
            while self._outbox:
                sent = self._end.send(self._outbox)
                del self._outbox[:sent]
        except BlockingIOError:
            self._end.when_writable(lambda _: self._loop.call_soon(self._flush, context=self._context) and None)
        except OSError as error:
            self._lose(error)
            return
        if len(self._outbox) > 65536 and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()
        elif self._is_writing_paused and len(self._outbox) < 16384:
            self._is_writing_paused = False
            self._protocol.resume_writing()
        if not self._outbox and self._is_closing:
            self._lose(None)
        elif not self._outbox and self._ends_writing:
            self._end._transmit(None)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._outbox:
                self._lose(None)

    def abort(self) -> None:
        self._is_closing = True
        self._lose(None)

    def _lose(self, error: OSError | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self._end.watchers.discard(self._watcher)
            self._loop.call_soon(self._end_protocol, error, context=self._context)

    def _end_protocol(self, error: OSError | None) -> None:
        self._protocol.connection_lost(error)
        self._end.close()

    def _look_soon(self) -> None:
        if not self._is_scheduled and not self._is_lost:
            self._is_scheduled = True
            self._loop.call_soon(self._look, context=self._context)

    def _look(self) -> None:
        self._is_scheduled = False
        if self._is_lost or self._is_closing or self._is_reading_paused or not self._end.is_readable:
            return
        try:
            data = self._end.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        if not data:
            self._end.watchers.discard(self._watcher)
            if not self._protocol.eof_received():
                self.close()
            return
        self._give(data)
        if self._end.is_readable:
            self._look_soon()

    def _give(self, data: bytes) -> None:
        if isinstance(self._protocol, asyncio.BufferedProtocol):
            view = memoryview(data)
            while view:
                room = self._protocol.get_buffer(len(view))
                count = min(len(room), len(view))
                memoryview(room)[:count] = view[:count]
                self._protocol.buffer_updated(count)
                view = view[count:]
        else:
            self._protocol.data_received(data)
