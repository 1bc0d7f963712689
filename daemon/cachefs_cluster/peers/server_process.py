"""Runs the daemon's peer servers: starts and restarts them, sends them the cluster's state, reads their messages."""

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cachefs.backoff import Backoff
from cachefs.block import KEY_SIZE
from cachefs.errors import ConfigError
from cachefs.fetch_frames import FrameSplitter, InvalidFrame, body_decoder, encode_frame
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.peers.server_messages import MAX_REPORT_BYTES, ServedTotals, ServerReport, ServerStateMessage
from cachefs_cluster.peers.tls import TlsFiles
from cachefs_daemon.runtime.error_log import ErrorLog

log = logging.getLogger(__name__)

# Connections that wait to be accepted.
_BACKLOG: Final = 512
# Number of processors from which on there are two servers.
_MANY_PROCESSORS: Final = 8
# Seconds from the end of a server to its next start: at first, and at most. The backoff starts anew after a server that
# outlived it.
_MIN_PAUSE: Final = 0.1
_MAX_PAUSE: Final = 30.0
_SUCCESS_SECONDS: Final = 5.0
# Seconds of silence after which a server is replaced. A live one sends something every second.
_SILENT_SECONDS: Final = 20.0
_TICK: Final = 0.5
_END_SECONDS: Final = 2.0
_END_TICK: Final = 0.005
# Level and number of the option to bind an address that no card has, of IPv4 (IP_FREEBIND) and IPv6 (IPV6_FREEBIND).
_FREE_BIND: Final = ((socket.IPPROTO_IP, 15), (socket.IPPROTO_IPV6, 78))

_decode_report = body_decoder(ServerReport)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The files that a peer server reads, and the address that it listens on."""

    # Hosts and port; port 0 for any free one, the same on all hosts.
    listen: Sequence[tuple[str, int]]
    index: Path
    # Directory by name of the tier.
    tiers: dict[str, Path]
    # None: connections are not encrypted.
    tls: TlsFiles | None = None
    # Number of servers; 0 for as many as suit the machine.
    count: int = 0
    # None: nodes prove nothing to each other.
    secret: ClusterSecret | None = None


@dataclass(slots=True, eq=False)
class _ServerProcess:
    """One server process."""

    process: subprocess.Popen[bytes]
    pipe: socket.socket
    started: float
    last_message: float
    frames: FrameSplitter = field(default_factory=lambda: FrameSplitter(MAX_REPORT_BYTES))
    unsent: bytearray = field(default_factory=bytearray)
    is_outdated: bool = False  # the view has changed since the one in `unsent`
    is_ready: bool = False
    served: tuple[ServedTotals, ...] = ()
    connections: int = 0


# Called with a node's id and the keys of the blocks that it received from this node.
ServedListener = Callable[[str, Sequence[bytes]], None]


class PeerServers:
    """All peer servers of the daemon. Used on the event loop."""

    def __init__(
        self,
        cluster: str,
        membership: Membership,
        settings: ServerSettings,
        adopt: Callable[[socket.socket], Awaitable[None]],
        errors: ErrorLog,
        on_served: ServedListener = lambda node, keys: None,
    ) -> None:
        """adopt: serves a connection of a peer server's fetch channel. on_served: called within some 0.1 s. Raises
        ConfigError if the port cannot be bound."""
        self._on_served = on_served
        self._cluster = cluster
        self._membership = membership
        self._settings = settings
        self._adopt = adopt
        self._errors = errors
        self._listening = _bind_sockets(settings.listen, errors)
        self._servers: list[_ServerProcess | None] = [None] * (
            settings.count or 1 + (_processors() >= _MANY_PROCESSORS)
        )
        self._supervisors: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended_totals: dict[str, ServedTotals] = {}  # counts of servers that have ended
        self._ready = asyncio.Event()
        membership.add_listener(lambda _: self._send_state_to_all())

    @property
    def port(self) -> int:
        """The port that the servers listen on."""
        port: int = self._listening[0].getsockname()[1]
        return port

    @property
    def pids(self) -> list[int]:
        """Process ids of the running servers."""
        return [server.process.pid for server in self._servers if server is not None]

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return sum(server.connections for server in self._servers if server is not None)

    def served_totals(self) -> dict[str, ServedTotals]:
        """Return what other nodes were served since the daemon started, by node id."""
        total = dict(self._ended_totals)
        for server in self._servers:
            for one in server.served if server is not None else ():
                total[one.node] = _add_totals(total.get(one.node), one)
        return total

    async def start(self) -> None:
        """Start the servers, and wait up to 10 s until one is ready."""
        for listening in self._listening:
            listening.listen(_BACKLOG)
        self._supervisors = [asyncio.create_task(self._supervise(number)) for number in range(len(self._servers))]
        try:
            async with asyncio.timeout(10):
                await self._ready.wait()
        except TimeoutError:
            self._errors.add("peers", "the peer server does not start; other nodes fetch for themselves until it does")

    async def stop(self) -> None:
        """End the servers. May be called again."""
        for listening in self._listening:
            listening.close()
        for keeper in self._supervisors:
            keeper.cancel()
        await asyncio.gather(*self._supervisors, *self._tasks, return_exceptions=True)
        self._supervisors = []
        for number, server in enumerate(self._servers):
            if server is not None:
                await self._end_server(number, server)

    # --- one server -----------------------------------------------------------------------------------------------

    async def _supervise(self, number: int) -> None:
        """Keep server *number* running."""
        loop, backoff = asyncio.get_running_loop(), Backoff(_MIN_PAUSE, _MAX_PAUSE)
        while True:
            began = loop.time()
            try:
                server = await self._start(number)
            except OSError as error:
                self._errors.add("peers", f"the peer server cannot be started: {error}")
            else:
                await self._wait_until_ended(server)
                await self._end_server(number, server)
                status = server.process.returncode
                self._errors.add("peers", f"a peer server has ended (status {status}), and is started again")
            if loop.time() - began > max(_SUCCESS_SECONDS, backoff.pause):
                backoff.reset()
            await asyncio.sleep(backoff.note_failure(loop.time()))

    async def _wait_until_ended(self, server: _ServerProcess) -> None:
        """Wait until the server has ended or is silent for too long."""
        loop = asyncio.get_running_loop()
        looked = loop.time()
        while server.process.poll() is None:
            # If this daemon stood still, messages are unread: that time is no silence of the server.
            server.last_message += max(0.0, loop.time() - looked - 2 * _TICK)
            if loop.time() - server.last_message > _SILENT_SECONDS:
                log.warning("a peer server has sent no report for %.0f s; restarting it", _SILENT_SECONDS)
                return
            looked = loop.time()
            await asyncio.sleep(_TICK)

    async def _start(self, number: int) -> _ServerProcess:
        """Start server *number*. Raises OSError."""
        server, link = self._spawn()
        self._servers[number] = server
        await self._adopt(link)
        asyncio.get_running_loop().add_reader(server.pipe, self._read_messages, server)
        self._send_state(server)
        return server

    def _spawn(self) -> tuple[_ServerProcess, socket.socket]:
        """Start a process, and return it with the daemon's end of its fetch-channel connection. Runs on this thread, as
        the process ends with the thread that started it. Raises OSError."""
        pipe, their_pipe = socket.socketpair()
        link, their_link = socket.socketpair()
        with their_pipe, their_link:
            command = self._command(their_pipe.fileno(), their_link.fileno())
            listening = [each.fileno() for each in self._listening]
            passed = (*listening, their_pipe.fileno(), their_link.fileno())
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=passed)
        pipe.setblocking(False)
        link.setblocking(False)
        now = asyncio.get_running_loop().time()
        return _ServerProcess(process, pipe, now, now), link

    def _command(self, pipe: int, link: int) -> list[str]:
        settings = self._settings
        tiers = [f"--tier={name}={path}" for name, path in settings.tiers.items()]
        listening = [word for each in self._listening for word in ("--listening", str(each.fileno()))]
        tls = settings.tls
        files = ["--tls", str(tls.ca), str(tls.cert), str(tls.key)] if tls is not None else []
        return [
            sys.executable, "-P", "-m", "cachefs_cluster.peers",
            *listening, "--pipe", str(pipe), "--fetch", str(link), "--parent", str(os.getpid()),
            "--index", str(settings.index), *tiers, *files,
        ]  # fmt: skip

    def _read_messages(self, server: _ServerProcess) -> None:
        try:
            data = server.pipe.recv(1 << 16)
            for body in server.frames.split_frames(data):
                self._handle_report(server, _decode_report(bytes(body)))
        except BlockingIOError:
            return
        except (OSError, InvalidFrame) as error:
            self._errors.add("peers", f"restarting a peer server that sent an invalid message: {error}")
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(server.pipe)
            server.process.kill()

    def _handle_report(self, server: _ServerProcess, report: ServerReport) -> None:
        server.last_message = asyncio.get_running_loop().time()
        for node, keys in report.handed.items():
            self._on_served(node, [keys[at : at + KEY_SIZE] for at in range(0, len(keys), KEY_SIZE)])
        if report.asks and not server.unsent:  # else other bytes on their way show that this daemon is alive
            server.unsent += encode_frame(ServerStateMessage(cluster=self._cluster))
            self._send_pending(server)
        if report.brief:
            return
        server.served, server.connections = report.served, report.connections
        if not server.is_ready:
            server.is_ready = True
            self._ready.set()
        for one in report.complaints:
            self._errors.add(one.subject, one.text)
        if report.more:
            self._errors.add("peers", f"{report.more} more faults of other nodes within a second")
        if report.is_behind:
            task = asyncio.create_task(self._membership.refresh())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _end_server(self, number: int, server: _ServerProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(server.pipe)
        loop.remove_writer(server.pipe)
        server.pipe.close()
        server.process.kill()
        until = loop.time() + _END_SECONDS
        # Waiting for the process would block the event loop.
        while server.process.poll() is None and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(_END_TICK)
        if server.process.poll() is None:
            log.warning("peer server %d does not end; is a disk hanging?", server.process.pid)
        for one in server.served:
            self._ended_totals[one.node] = _add_totals(self._ended_totals.get(one.node), one)
        self._servers[number] = None

    # --- messages to servers --------------------------------------------------------------------------------------

    def _send_state_to_all(self) -> None:
        for server in self._servers:
            if server is not None:
                self._send_state(server)

    def _send_state(self, server: _ServerProcess) -> None:
        server.is_outdated = bool(server.unsent)  # while it reads slowly it needs only the last view
        if not server.is_outdated:
            secret = self._settings.secret
            key = secret.key if secret is not None else b""
            server.unsent += encode_frame(
                ServerStateMessage(cluster=self._cluster, view=self._membership.view, secret=key)
            )
            self._send_pending(server)

    def _send_pending(self, server: _ServerProcess) -> None:
        loop = asyncio.get_running_loop()
        try:
            sent = server.pipe.send(server.unsent)
            del server.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            server.unsent.clear()
        if server.unsent:
            loop.add_writer(server.pipe, self._send_pending, server)
            return
        loop.remove_writer(server.pipe)
        if server.is_outdated:
            self._send_state(server)


def _bind_sockets(addresses: Sequence[tuple[str, int]], errors: ErrorLog) -> list[socket.socket]:
    """Return a bound socket for each address, which does not listen yet. An address after the first that no network
    card has now is bound all the same, for when one has it. Raises ConfigError."""
    bound: list[socket.socket] = []
    try:
        for host, port in addresses:
            if not bound:
                bound.append(_bind_socket((host, port)))
                continue
            try:
                bound.append(_bind_socket((host, port or bound[0].getsockname()[1])))
            except _AddressMissing as error:
                bound.append(_bind_socket((host, port or bound[0].getsockname()[1]), is_free=True))
                errors.add("peers", f"{error}; other nodes use the other addresses of this node until then")
    except BaseException:
        for each in bound:
            each.close()
        raise
    return bound


class _AddressMissing(ConfigError):
    """No network card of this machine has the address."""


def _bind_socket(address: tuple[str, int], *, is_free: bool = False) -> socket.socket:
    """Return a bound socket that does not listen yet. is_free: no network card needs to have the address. Raises
    ConfigError."""
    host, port = address
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cluster.listen = {host}:{port}: {error.strerror or error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_free:
            level, option = _FREE_BIND[family == socket.AF_INET6]
            listening.setsockopt(level, option, 1)
        listening.bind(socket_address)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _AddressMissing(
                f"cluster.listen = {host}:{port}: no network card of this machine has the address"
            ) from None
        raise ConfigError(
            f"cluster.listen = {host}:{port}: {error.strerror}; is another daemon running, or the address another "
            "machine's?"
        ) from None
    return listening


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _add_totals(first: ServedTotals | None, second: ServedTotals) -> ServedTotals:
    if first is None:
        return second
    return ServedTotals(
        node=second.node,
        blocks=first.blocks + second.blocks,
        bytes=first.bytes + second.bytes,
        fetched=first.fetched + second.fetched,
        refused=first.refused + second.refused,
    )
