"""Opens connections to peers. Runs in threads, since it looks names up and handshakes take milliseconds."""

import contextlib
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Final

from cachefs_daemon.cluster.handshake import Greeting
from cachefs_daemon.cluster.view import NodeRecord
from cachefs_daemon.peers.protocol import NO_DAEMON, AnswerParser, BadAnswer, Refused, Sender, SenderCheck, encode_probe
from cachefs_daemon.peers.tls import Certificates, names_of
from cachefs_daemon.peers.wire import prepare

# Timeouts in seconds: of connecting, of the TLS handshake, and of a probe.
CONNECT_SECONDS: Final = 2.0
HANDSHAKE_SECONDS: Final = 4.0
PROBE_SECONDS: Final = 3.0
# Bytes of the kernel's send buffer: enough for the largest request.
_SEND_ROOM: Final = 128 << 10
_MOST_PROBED: Final = 16 << 10
_RECORD: Final = 16 << 10


class CannotConnect(Exception):
    """No usable connection to a peer. The text gives the reason and names the peer."""

    def __init__(self, text: str, *, is_stranger: bool = False) -> None:
        super().__init__(text)
        self.is_stranger = is_stranger  # another node than the intended one answers


@dataclass(slots=True, eq=False)
class Tls:
    """The TLS state of a connection whose encrypted bytes the caller moves."""

    session: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO


def connect(record: NodeRecord, certificates: Certificates | None) -> tuple[socket.socket, Tls | None]:
    """Return a connected, non-blocking socket, with its TLS state. Raises CannotConnect."""
    try:
        connection = socket.create_connection((record.host, record.data_port), CONNECT_SECONDS)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CannotConnect(f"{_shown(record)} cannot be reached: {reason}") from None
    try:
        prepare(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_ROOM)
        tls = _shake_hands(connection, record, certificates) if certificates is not None else None
        connection.setblocking(False)
    except BaseException:
        connection.close()
        raise
    return connection, tls


def _shake_hands(connection: socket.socket, record: NodeRecord, certificates: Certificates) -> Tls:
    until = time.monotonic() + HANDSHAKE_SECONDS
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = certificates.client().wrap_bio(incoming, outgoing, server_side=False)
    try:
        while True:
            try:
                session.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
            _exchange(connection, incoming, outgoing, until)
        if outgoing.pending:
            connection.sendall(outgoing.read())
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        raise CannotConnect(f"TLS with {_shown(record)} fails: {reason}", is_stranger=True) from None
    except (OSError, EOFError) as error:
        raise CannotConnect(f"TLS with {_shown(record)} fails: {error or type(error).__name__}") from None
    names = names_of(session.getpeercert())
    if record.name.lower() not in names:
        named = ", ".join(sorted(names)[:3])[:200] or "no name"
        text = f"the certificate at {record.address} names {named}, and not {record.name}"
        raise CannotConnect(text, is_stranger=True)
    return Tls(session, incoming, outgoing)


def _exchange(connection: socket.socket, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, until: float) -> None:
    """Send pending handshake bytes, and wait for more from the peer. Raises OSError, EOFError."""
    if outgoing.pending:
        connection.sendall(outgoing.read())
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"it took more than {HANDSHAKE_SECONDS:.0f} s")
    connection.settimeout(left)
    data = connection.recv(_RECORD)
    if not data:
        raise EOFError("the connection was closed within the handshake")
    incoming.write(data)


def probe(
    record: NodeRecord, certificates: Certificates | None, greeting: Greeting, check: SenderCheck
) -> tuple[Sender, bool]:
    """Return which node answers at the address, and whether the daemon behind its server is alive. Raises CannotConnect
    if no node answers, or another one."""
    connection, tls = connect(record, certificates)
    until = time.monotonic() + PROBE_SECONDS
    try:
        sender, refused = _ask(connection, tls, encode_probe(greeting), until, check)
    except (OSError, BadAnswer, EOFError) as error:
        reason = str(error) or type(error).__name__
        raise CannotConnect(f"{_shown(record)} does not answer as it should: {reason}") from None
    finally:
        with contextlib.suppress(OSError):
            connection.close()
    if sender.node != record.id:
        raise CannotConnect(f"at {record.address} is node {sender.node}, and not {_shown(record)}", is_stranger=True)
    if refused.status != 200 and refused.verdict not in ("old-epoch", "other-incarnation"):
        raise CannotConnect(f"{_shown(record)} refuses us: {refused.text}", is_stranger=True)
    return sender, refused.verdict != NO_DAEMON


def _ask(
    connection: socket.socket, tls: Tls | None, request: bytes, until: float, check: SenderCheck
) -> tuple[Sender, Refused]:
    """Send the probe and parse its response. Raises OSError, BadAnswer, EOFError."""
    parser, room, filled = AnswerParser([], check), memoryview(bytearray(_MOST_PROBED)), 0
    if tls is not None:
        tls.session.write(request)
        request = tls.outgoing.read()
    connection.settimeout(PROBE_SECONDS)
    connection.sendall(request)
    while filled < _MOST_PROBED:
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(_MOST_PROBED - filled)
        if not data:
            raise EOFError("the connection was closed before an answer")
        if tls is not None:
            tls.incoming.write(data)
            try:
                data = tls.session.read(_MOST_PROBED - filled)
            except ssl.SSLWantReadError:
                continue
        room[filled : filled + len(data)] = data
        filled += len(data)
        for item in parser.parse(room[:filled]):
            if isinstance(item, Refused) and parser.sender is not None:
                return parser.sender, item
    raise BadAnswer("it says too much")


def _shown(record: NodeRecord) -> str:
    return f"node {record.name} at {record.address}"
