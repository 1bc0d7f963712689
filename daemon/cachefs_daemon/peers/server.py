"""A peer server: a process that serves this node's blocks to other nodes, with a thread per connection.

It has the index and the segments open for reading, like a mount's worker, and asks the daemon for blocks that are not
there. The daemon tells it the state of the cluster; it ends with the daemon.
"""

import os
import select
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cachefs.errors import ConfigError
from cachefs.fetch_frames import BadFrame, Frames, decoder, frame
from cachefs_daemon.cluster.secret import ClusterSecret
from cachefs_daemon.cluster.view import ClusterView
from cachefs_daemon.peers.answering import MOST_FETCHES, Answering, Caller, Given
from cachefs_daemon.peers.daemon_fetches import DaemonFetches
from cachefs_daemon.peers.outlet import Outlet
from cachefs_daemon.peers.server_messages import (
    HANDED_SECONDS,
    MOST_COMPLAINTS,
    MOST_HANDED,
    MOST_TOLD,
    SAY_SECONDS,
    Complaint,
    Said,
    Served,
    Told,
)  # fmt: skip
from cachefs_daemon.peers.signs import Signs
from cachefs_daemon.peers.tls import Certificates, names_of
from cachefs_daemon.peers.wire import Gone, PlainWire, TlsWire, Wire, prepare
from cachefs_daemon.runtime.connection_limits import Bounds, ConnectionLimits

# Limits of connections of one server process. Each connection has a thread.
BOUNDS: Final = Bounds(total=2048, unknown=256, unknown_of_address=64, of_member=64)
# Timeout of a TLS handshake.
HANDSHAKE_SECONDS: Final = 5.0
# Nodes whose counters are kept: those that asked last.
_MOST_GIVEN: Final = 4096
# Stack size of a thread in bytes: there may be thousands of threads.
_STACK: Final = 512 << 10
_AT_ONCE: Final = 64 << 10
# Seconds to wait after accept fails, for lack of descriptors or memory.
_PAUSE: Final = 0.1

_told = decoder(Told)


class PeerServer:
    """The server of one process. Its attributes are shared by its threads."""

    def __init__(
        self, listening: socket.socket, pipe: socket.socket, fetches: DaemonFetches, outlet: Outlet, told: Told
    ) -> None:
        """listening: other servers of this daemon may accept from it too. told: the first message of the daemon."""
        self.outlet = outlet
        self.fetches = fetches
        self.cluster = told.cluster
        self.view = told.view or ClusterView()
        self.secret = ClusterSecret(told.secret) if told.secret else None
        self.signs = Signs(lambda: self._send(Said(brief=True, asks=True)))
        fetches.on_answer = self.signs.heard
        self._listening = listening
        self._pipe = pipe
        self._frames = Frames(MOST_TOLD)
        self._certificates: Certificates | None = None
        self._limits: ConnectionLimits[Caller] = ConnectionLimits(BOUNDS)
        self._lock = threading.Lock()  # guards the attributes below
        self._given: OrderedDict[str, Given] = OrderedDict()
        self._complaints: list[Complaint] = []
        self._more = 0
        self._is_behind = False
        self._fetching = 0
        self._handed: dict[str, bytearray] = {}  # by id of the node: keys of blocks, concatenated
        self._handed_count = 0
        self._news = threading.Event()  # set while `_handed` has something
        self._telling = threading.Lock()  # guards writes to the pipe

    def use(self, certificates: Certificates | None) -> None:
        """Set the certificates; None serves without encryption."""
        self._certificates = certificates

    def run(self) -> None:
        """Serve until the daemon ends."""
        threading.stack_size(_STACK)
        self._listening.setblocking(False)
        poll = select.poll()
        poll.register(self._listening, select.POLLIN)
        poll.register(self._pipe, select.POLLIN)
        self._say()
        threading.Thread(target=self._tell_handed, daemon=True).start()
        last = time.monotonic()
        while True:
            for descriptor, _ in poll.poll(max(0, (last + SAY_SECONDS - time.monotonic()) * 1000)):
                if descriptor == self._listening.fileno():
                    self._accept()
                elif not self._listen_to_daemon():
                    return
            if time.monotonic() - last >= SAY_SECONDS:
                last = time.monotonic()
                self.outlet.segments.forget_unlinked()
                self._say()

    # --- services for connections (see answering.Host) ------------------------------------------------------------

    def recognise(self, caller: Caller, node: str) -> str:
        if self._limits.recognise(caller, node):
            return ""
        return f"node {node} has {BOUNDS.of_member} connections already"

    def note_used(self, caller: Caller) -> None:
        self._limits.use(caller)

    def note_idle(self, caller: Caller) -> None:
        self._limits.rest(caller)

    def complain(self, address: str, kind: str, text: str) -> None:
        # Each kind is a separate subject, as the log has one line a minute per subject.
        with self._lock:
            if len(self._complaints) < MOST_COMPLAINTS:
                self._complaints.append(Complaint(subject=f"peers at {address}, {kind}", text=text[:500]))
            else:
                self._more += 1

    def behind(self) -> None:
        self._is_behind = True

    def given(self, node: str) -> Given:
        with self._lock:
            given = self._given.setdefault(node, Given())
            self._given.move_to_end(node)
            if len(self._given) > _MOST_GIVEN:
                self._given.popitem(last=False)
            return given

    def handed_over(self, node: str, key: bytes) -> None:
        with self._lock:
            if self._handed_count < MOST_HANDED:
                self._handed.setdefault(node, bytearray()).extend(key)
                self._handed_count += 1
        self._news.set()

    def may_fetch(self, count: int) -> bool:
        with self._lock:
            if count > 0 and self._fetching + count > MOST_FETCHES:
                return False
            self._fetching += count
            return True

    # --- connections ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, peer = self._listening.accept()
        except BlockingIOError:  # another process was quicker
            return
        except OSError as error:
            self.complain("any address", "connections", f"no connection can be taken: {error.strerror}")
            time.sleep(_PAUSE)
            return
        address = str(peer[0])
        caller = Caller(address, connection)
        was_full = len(self._limits) >= BOUNDS.total
        leaves = self._limits.enter(caller)
        if leaves is caller:
            connection.close()
            text = f"there are {BOUNDS.total} connections already, all of them in use: no more are taken"
            self.complain(address, "connections", text)
            return
        if leaves is not None:
            leaves.dismiss()
            text = "too many connections have not said who they are, most of them from there: the oldest one goes"
            if was_full:
                text = f"there are {BOUNDS.total} connections: the one that has been idle for longest goes"
            self.complain(leaves.address, "connections", text)
        try:
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()
        except RuntimeError as error:
            connection.close()
            self._limits.leave(caller)
            self.complain("any address", "connections", f"no connection can be taken: {error}")

    def _serve(self, caller: Caller) -> None:
        address = caller.address
        try:
            wire, proven = self._open(caller)
            try:
                Answering(self, wire, caller, proven).run()
            finally:
                wire.close()
        except Gone as gone:
            self.complain(address, gone.kind, str(gone))
        except OSError:
            pass  # the peer left before it was identified
        except Exception as error:
            self.complain(address, "bug", f"internal error of the peer server ({error!r})")
        finally:
            caller.connection.close()
            self._limits.leave(caller)

    def _open(self, caller: Caller) -> tuple[Wire, frozenset[str] | None]:
        """Set up the wire, and return it with the ids that the certificate proves. Raises Gone with the reason if the
        peer may not ask; OSError."""
        connection = caller.connection
        prepare(connection)
        if self._certificates is None:
            return PlainWire(connection), None
        connection.settimeout(HANDSHAKE_SECONDS)
        try:
            tls = self._certificates.server.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
            caller.connection = tls
            tls.do_handshake()
        except ssl.SSLError as error:
            raise Gone("refused, as TLS has failed", _reason(error)) from None
        except TimeoutError:
            raise Gone(f"refused, as TLS takes more than {HANDSHAKE_SECONDS:.0f} s", "slow handshakes") from None
        names = names_of(tls.getpeercert())
        proven = frozenset(record.id for record in self.view.others if record.name.lower() in names)
        if not proven:
            tls.close()
            shown = ", ".join(sorted(names)[:3])[:200].encode("ascii", "backslashreplace").decode() or "no name"
            text = f"refused, as its certificate names {shown}, which is no member of cluster {self.cluster}"
            raise Gone(text, "certificates")
        return TlsWire(tls), proven

    # --- the daemon -----------------------------------------------------------------------------------------------

    def _listen_to_daemon(self) -> bool:
        """Read messages of the daemon. Return False if it has ended."""
        try:
            data = self._pipe.recv(_AT_ONCE)
            if not data:
                return False
            for body in self._frames.feed(data):
                told = _told(bytes(body))
                self.cluster, self.view = told.cluster, told.view or self.view
                self.signs.heard()
        except BlockingIOError:
            pass
        except (OSError, BadFrame):
            return False
        return True

    def _say(self) -> None:
        with self._lock:
            served = tuple(
                Served(node=node, blocks=one.blocks, bytes=one.bytes, fetched=one.fetched, refused=one.refused)
                for node, one in self._given.items()
            )
            said = Said(
                served=served,
                complaints=tuple(self._complaints),
                more=self._more,
                is_behind=self._is_behind,
                connections=len(self._limits),
            )
            self._complaints, self._more, self._is_behind = [], 0, False
        self._send(said)

    def _tell_handed(self) -> None:
        """Report served blocks to the daemon, for as long as the server runs."""
        while True:
            self._news.wait()
            time.sleep(HANDED_SECONDS)
            self._news.clear()
            with self._lock:
                handed = {node: bytes(keys) for node, keys in self._handed.items()}
                self._handed, self._handed_count = {}, 0
            self._send(Said(brief=True, handed=handed))

    def _send(self, said: Said) -> None:
        try:
            with self._telling:
                self._pipe.sendall(frame(said))
        except OSError:
            os._exit(0)  # the daemon has ended, or has stopped reading


def open_server(
    listening: socket.socket,
    pipe: socket.socket,
    link: socket.socket,
    places: tuple[Path, dict[int, Path]],
    certificates: Callable[[], Certificates | None],
) -> PeerServer:
    """Return a server that has received its state from the daemon. link: to the daemon's fetch channel. places: path of
    the index, and tier directories by number. Raises CachefsError, OSError."""
    frames = Frames(MOST_TOLD)
    bodies: list[bytes | memoryview] = []
    while not bodies:
        data = pipe.recv(_AT_ONCE)
        if not data:
            raise ConfigError("the daemon has ended")
        bodies = frames.feed(data)
    told = _told(bytes(bodies[-1]))
    fetches = DaemonFetches(link, lambda: os._exit(0))
    server = PeerServer(listening, pipe, fetches, Outlet(*places), told)
    server.use(certificates())
    return server


def _reason(error: ssl.SSLError) -> str:
    text = getattr(error, "verify_message", "") or error.reason or str(error)
    return " ".join(str(text).replace("_", " ").lower().split())
