"""Opens connections to peers. Handshakes and probes run in threads, since they take milliseconds."""

import asyncio
import contextlib
import os
import socket
import ssl
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final

from cachefs_cluster.membership.handshake import Greeting
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.peers.protocol import (
    NO_DAEMON,
    InvalidResponse,
    PeerRefusal,
    RespondingNode,
    ResponseParser,
    SenderCheck,
    encode_probe,
)
from cachefs_cluster.peers.tls import Certificates, names_of
from cachefs_cluster.peers.wire import set_socket_options

# Timeouts in seconds: of connecting, of the TLS handshake, and of a probe.
CONNECT_SECONDS: Final = 2.0
HANDSHAKE_SECONDS: Final = 4.0
PROBE_SECONDS: Final = 3.0
# Bytes of the kernel's send buffer: enough for the largest request.
_SEND_BUFFER: Final = 128 << 10
_MAX_PROBE_BYTES: Final = 16 << 10
_RECORD: Final = 16 << 10


class CannotConnect(Exception):
    """No usable connection to a peer. The text gives the reason and names the peer."""

    def __init__(self, text: str, *, is_stranger: bool = False) -> None:
        super().__init__(text)
        self.is_wrong_node = is_stranger  # another node than the intended one answers


@dataclass(slots=True, eq=False)
class PeerTls:
    """The TLS state of a connection whose encrypted bytes the caller moves."""

    session: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO


async def connect(record: NodeRecord, lookups: Executor) -> socket.socket:
    """Return a connected, non-blocking socket. lookups: threads that look names up. A host that drops all packets
    occupies no thread meanwhile, as many of them may: rails that a whole cluster cannot reach. Raises CannotConnect."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            connection = await _open_socket(record.host, record.data_port, lookups)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "timed out"
        raise CannotConnect(f"{_node_description(record)} cannot be reached: {reason}") from None
    try:
        set_socket_options(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    except BaseException:
        connection.close()
        raise
    return connection


async def _open_socket(host: str, port: int, lookups: Executor) -> socket.socket:
    """Connect to the first address of *host* that accepts. Raises OSError, UnicodeError."""
    loop = asyncio.get_running_loop()
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = look_up(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name
        found = await loop.run_in_executor(lookups, look_up)
    failed: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            connection = socket.socket(family, kind, protocol)
        except OSError as error:
            failed = error
            continue
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
        except OSError as error:
            connection.close()
            # asyncio puts a text of its own in place of that of the system
            failed = OSError(error.errno, os.strerror(error.errno)) if error.errno else error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failed or OSError("the name has no address")


def start_tls(connection: socket.socket, record: NodeRecord, certificates: Certificates) -> PeerTls:
    """Shake hands, in a thread, and check that the other side has the node's certificate. Raises CannotConnect; the
    connection is then closed."""
    try:
        tls = _shake_hands(connection, record, certificates)
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return tls


def _shake_hands(connection: socket.socket, record: NodeRecord, certificates: Certificates) -> PeerTls:
    until = time.monotonic() + HANDSHAKE_SECONDS
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = certificates.client_context().wrap_bio(incoming, outgoing, server_side=False)
    try:
        while True:
            try:
                session.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
            _exchange_handshake(connection, incoming, outgoing, until)
        if outgoing.pending:
            connection.sendall(outgoing.read())
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        raise CannotConnect(f"TLS with {_node_description(record)} fails: {reason}", is_stranger=True) from None
    except (OSError, EOFError) as error:
        raise CannotConnect(f"TLS with {_node_description(record)} fails: {error or type(error).__name__}") from None
    names = names_of(session.getpeercert())
    if record.name.lower() not in names:
        named = ", ".join(sorted(names)[:3])[:200] or "no name"
        text = f"the certificate at {record.address} names {named}, and not {record.name}"
        raise CannotConnect(text, is_stranger=True)
    return PeerTls(session, incoming, outgoing)


def _exchange_handshake(
    connection: socket.socket, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, until: float
) -> None:
    """Send pending handshake bytes, and wait for more from the peer. Raises OSError, EOFError."""
    if outgoing.pending:
        connection.sendall(outgoing.read())
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the handshake took more than {HANDSHAKE_SECONDS:.0f} s")
    connection.settimeout(left)
    data = connection.recv(_RECORD)
    if not data:
        raise EOFError("the connection was closed during the handshake")
    incoming.write(data)


def probe(
    connection: socket.socket,
    record: NodeRecord,
    certificates: Certificates | None,
    greeting: Greeting,
    check: SenderCheck,
) -> tuple[RespondingNode, bool]:
    """Return which node answers on a new connection, in a thread, and whether the daemon behind its server is alive.
    Closes the connection. Raises CannotConnect if no node answers, or another one."""
    tls = start_tls(connection, record, certificates) if certificates is not None else None
    until = time.monotonic() + PROBE_SECONDS
    try:
        sender, refused = _send_probe(connection, tls, encode_probe(greeting), until, check)
    except (OSError, InvalidResponse, EOFError) as error:
        reason = str(error) or type(error).__name__
        raise CannotConnect(f"{_node_description(record)} sent an invalid response: {reason}") from None
    finally:
        with contextlib.suppress(OSError):
            connection.close()
    if sender.node != record.id:
        raise CannotConnect(
            f"at {record.address} is node {sender.node}, and not {_node_description(record)}", is_stranger=True
        )
    if refused.status != 200 and refused.verdict not in ("old-epoch", "other-incarnation"):
        raise CannotConnect(f"{_node_description(record)} refuses this node: {refused.text}", is_stranger=True)
    return sender, refused.verdict != NO_DAEMON


def _send_probe(
    connection: socket.socket, tls: PeerTls | None, request: bytes, until: float, check: SenderCheck
) -> tuple[RespondingNode, PeerRefusal]:
    """Send the probe and parse its response. Raises OSError, InvalidResponse, EOFError."""
    parser, room, filled = ResponseParser([], check), memoryview(bytearray(_MAX_PROBE_BYTES)), 0
    if tls is not None:
        tls.session.write(request)
        request = tls.outgoing.read()
    connection.settimeout(PROBE_SECONDS)
    connection.sendall(request)
    while filled < _MAX_PROBE_BYTES:
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(_MAX_PROBE_BYTES - filled)
        if not data:
            raise EOFError("the connection was closed before a response")
        if tls is not None:
            tls.incoming.write(data)
            try:
                data = tls.session.read(_MAX_PROBE_BYTES - filled)
            except ssl.SSLWantReadError:
                continue
        room[filled : filled + len(data)] = data
        filled += len(data)
        for item in parser.parse(room[:filled]):
            if isinstance(item, PeerRefusal) and parser.sender is not None:
                return parser.sender, item
    raise InvalidResponse("the response to the probe is too long")


def _node_description(record: NodeRecord) -> str:
    return f"node {record.name} at {record.address}"
