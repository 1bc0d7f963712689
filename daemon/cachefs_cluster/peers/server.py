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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cachefs.errors import ConfigError
from cachefs.fetch_frames import FrameSplitter, InvalidFrame, body_decoder, encode_frame
from cachefs_cluster.membership.secret import ClusterSecret
from cachefs_cluster.membership.view import ClusterView
from cachefs_cluster.peers.block_sender import BlockSender
from cachefs_cluster.peers.daemon_fetch_client import DaemonFetchClient
from cachefs_cluster.peers.heartbeats import Heartbeats
from cachefs_cluster.peers.request_server import MAX_FETCHES, RequestServer, ServedConnection, ServedCounters
from cachefs_cluster.peers.server_messages import (
    MAX_FAULTS,
    MAX_SERVED_KEYS,
    MAX_STATE_BYTES,
    REPORT_SECONDS,
    SERVED_REPORT_SECONDS,
    ServedTotals,
    ServerFault,
    ServerReport,
    ServerStateMessage,
)  # fmt: skip
from cachefs_cluster.peers.tls import Certificates, names_of
from cachefs_cluster.peers.wire import ConnectionLost, PlainWire, TlsWire, Wire, set_socket_options
from cachefs_daemon.runtime.connection_limits import ConnectionBounds, ConnectionLimits

# Limits of connections of one server process. Each connection has a thread.
CONNECTION_BOUNDS: Final = ConnectionBounds(total=2048, unknown=256, unknown_of_address=64, of_member=64)
# Timeout of a TLS handshake.
HANDSHAKE_SECONDS: Final = 5.0
# Nodes whose counters are kept: those that asked last.
_MAX_COUNTED_NODES: Final = 4096
# Stack size of a thread in bytes: there may be thousands of threads.
_STACK: Final = 512 << 10
_RECEIVE_BYTES: Final = 64 << 10
# Seconds to wait after accept fails, for lack of descriptors or memory.
_ACCEPT_PAUSE: Final = 0.1

_decode_state = body_decoder(ServerStateMessage)


class PeerServer:
    """The server of one process. Its attributes are shared by its threads."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        pipe: socket.socket,
        fetches: DaemonFetchClient,
        outlet: BlockSender,
        state: ServerStateMessage,
    ) -> None:
        """listening: other servers of this daemon may accept from them too. state: the first message of the daemon."""
        self.block_sender = outlet
        self.fetch_client = fetches
        self.cluster = state.cluster
        self.view = state.view or ClusterView()
        self.secret = ClusterSecret(state.secret) if state.secret else None
        self.heartbeats = Heartbeats(lambda: self._send(ServerReport(brief=True, asks=True)))
        fetches.add_message_listener(self.heartbeats.note_message)
        self._listening = listening
        self._pipe = pipe
        self._frames = FrameSplitter(MAX_STATE_BYTES)
        self._certificates: Certificates | None = None
        self._limits: ConnectionLimits[ServedConnection] = ConnectionLimits(CONNECTION_BOUNDS)
        self._lock = threading.Lock()  # guards the attributes below
        self._counters: OrderedDict[str, ServedCounters] = OrderedDict()
        self._faults: list[ServerFault] = []
        self._dropped_faults = 0
        self._is_behind = False
        self._fetch_count = 0
        self._served_keys: dict[str, bytearray] = {}  # by id of the node: keys of blocks, concatenated
        self._served_count = 0
        self._has_served = threading.Event()  # set while `_served_keys` has something
        self._pipe_lock = threading.Lock()  # guards writes to the pipe

    def set_certificates(self, certificates: Certificates | None) -> None:
        """Set the certificates; None serves without encryption."""
        self._certificates = certificates

    def serve(self) -> None:
        """Serve until the daemon ends."""
        threading.stack_size(_STACK)
        poll, listening = select.poll(), {each.fileno(): each for each in self._listening}
        for each in self._listening:
            each.setblocking(False)
            poll.register(each, select.POLLIN)
        poll.register(self._pipe, select.POLLIN)
        self._send_report()
        threading.Thread(target=self._report_served, daemon=True).start()
        last = time.monotonic()
        while True:
            for descriptor, _ in poll.poll(max(0, (last + REPORT_SECONDS - time.monotonic()) * 1000)):
                if descriptor in listening:
                    self._accept(listening[descriptor])
                elif not self._read_daemon_messages():
                    return
            if time.monotonic() - last >= REPORT_SECONDS:
                last = time.monotonic()
                self.block_sender.segments.forget_unlinked()
                self._send_report()

    # --- services for connections (see request_server.ServerServices) -------------------------------------------------

    def register_member(self, caller: ServedConnection, node: str) -> str:
        if self._limits.identify(caller, node):
            return ""
        return f"node {node} has {CONNECTION_BOUNDS.of_member} connections already"

    def note_used(self, caller: ServedConnection) -> None:
        self._limits.mark_busy(caller)

    def note_idle(self, caller: ServedConnection) -> None:
        self._limits.mark_idle(caller)

    def report_fault(self, address: str, kind: str, text: str) -> None:
        # Each kind is a separate subject, as the log has one line a minute per subject.
        with self._lock:
            if len(self._faults) < MAX_FAULTS:
                self._faults.append(ServerFault(subject=f"peers at {address}, {kind}", text=text[:500]))
            else:
                self._dropped_faults += 1

    def note_newer_epoch(self) -> None:
        self._is_behind = True

    def counters_of(self, node: str) -> ServedCounters:
        with self._lock:
            counters = self._counters.setdefault(node, ServedCounters())
            self._counters.move_to_end(node)
            if len(self._counters) > _MAX_COUNTED_NODES:
                self._counters.popitem(last=False)
            return counters

    def note_served(self, node: str, key: bytes) -> None:
        with self._lock:
            if self._served_count < MAX_SERVED_KEYS:
                self._served_keys.setdefault(node, bytearray()).extend(key)
                self._served_count += 1
        self._has_served.set()

    def reserve_fetches(self, count: int) -> bool:
        with self._lock:
            if count > 0 and self._fetch_count + count > MAX_FETCHES:
                return False
            self._fetch_count += count
            return True

    # --- connections ----------------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, peer = listening.accept()
            rail = str(connection.getsockname()[0])
        except BlockingIOError:  # another process was quicker
            return
        except OSError as error:
            self.report_fault("any address", "connections", f"no connection can be taken: {error.strerror}")
            time.sleep(_ACCEPT_PAUSE)
            return
        address = str(peer[0])
        caller = ServedConnection(address, rail, connection)
        was_full = len(self._limits) >= CONNECTION_BOUNDS.total
        leaves = self._limits.add(caller)
        if leaves is caller:
            connection.close()
            text = f"there are {CONNECTION_BOUNDS.total} connections already, all of them in use: refusing new ones"
            self.report_fault(address, "connections", text)
            return
        if leaves is not None:
            leaves.shut_down()
            text = "too many unidentified connections, most of them from this address: closing the oldest"
            if was_full:
                text = f"there are {CONNECTION_BOUNDS.total} connections: closing the one that has been idle longest"
            self.report_fault(leaves.address, "connections", text)
        try:
            threading.Thread(target=self._serve_connection, args=(caller,), daemon=True).start()
        except RuntimeError as error:
            connection.close()
            self._limits.remove(caller)
            self.report_fault("any address", "connections", f"no connection can be taken: {error}")

    def _serve_connection(self, caller: ServedConnection) -> None:
        address = caller.address
        try:
            wire, proven = self._open_wire(caller)
            try:
                RequestServer(self, wire, caller, proven).serve()
            finally:
                wire.close()
        except ConnectionLost as gone:
            self.report_fault(address, gone.kind, str(gone))
        except OSError:
            pass  # the peer left before it was identified
        except Exception as error:
            self.report_fault(address, "bug", f"internal error of the peer server ({error!r})")
        finally:
            caller.connection.close()
            self._limits.remove(caller)

    def _open_wire(self, caller: ServedConnection) -> tuple[Wire, frozenset[str] | None]:
        """Set up the wire, and return it with the ids that the certificate proves. Raises ConnectionLost with the
        reason if the peer may not ask; OSError."""
        connection = caller.connection
        set_socket_options(connection)
        if self._certificates is None:
            return PlainWire(connection), None
        connection.settimeout(HANDSHAKE_SECONDS)
        try:
            tls = self._certificates.server_context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
            caller.connection = tls
            tls.do_handshake()
        except ssl.SSLError as error:
            raise ConnectionLost("refused, as TLS has failed", _tls_reason(error)) from None
        except TimeoutError:
            raise ConnectionLost(
                f"refused, as TLS takes more than {HANDSHAKE_SECONDS:.0f} s", "slow handshakes"
            ) from None
        names = names_of(tls.getpeercert())
        proven = frozenset(record.id for record in self.view.others if record.name.lower() in names)
        if not proven:
            tls.close()
            shown = ", ".join(sorted(names)[:3])[:200].encode("ascii", "backslashreplace").decode() or "no name"
            text = f"refused, as its certificate names {shown}, which is no member of cluster {self.cluster}"
            raise ConnectionLost(text, "certificates")
        return TlsWire(tls), proven

    # --- the daemon -----------------------------------------------------------------------------------------------

    def _read_daemon_messages(self) -> bool:
        """Read messages of the daemon. Return False if it has ended."""
        try:
            data = self._pipe.recv(_RECEIVE_BYTES)
            if not data:
                return False
            for body in self._frames.split_frames(data):
                state = _decode_state(bytes(body))
                self.cluster, self.view = state.cluster, state.view or self.view
                self.heartbeats.note_message()
        except BlockingIOError:
            pass
        except (OSError, InvalidFrame):
            return False
        return True

    def _send_report(self) -> None:
        with self._lock:
            served = tuple(
                ServedTotals(node=node, blocks=one.blocks, bytes=one.bytes, fetched=one.fetched, refused=one.refused)
                for node, one in self._counters.items()
            )
            report = ServerReport(
                served=served,
                complaints=tuple(self._faults),
                more=self._dropped_faults,
                is_behind=self._is_behind,
                connections=len(self._limits),
            )
            self._faults, self._dropped_faults, self._is_behind = [], 0, False
        self._send(report)

    def _report_served(self) -> None:
        """Report served blocks to the daemon, for as long as the server runs."""
        while True:
            self._has_served.wait()
            time.sleep(SERVED_REPORT_SECONDS)
            self._has_served.clear()
            with self._lock:
                handed = {node: bytes(keys) for node, keys in self._served_keys.items()}
                self._served_keys, self._served_count = {}, 0
            self._send(ServerReport(brief=True, handed=handed))

    def _send(self, report: ServerReport) -> None:
        try:
            with self._pipe_lock:
                self._pipe.sendall(encode_frame(report))
        except OSError:
            os._exit(0)  # the daemon has ended, or has stopped reading


def open_server(
    listening: Sequence[socket.socket],
    pipe: socket.socket,
    link: socket.socket,
    directories: tuple[Path, dict[int, Path]],
    certificates: Callable[[], Certificates | None],
) -> PeerServer:
    """Return a server that has received its state from the daemon. link: to the daemon's fetch channel. directories:
    path of the index, and tier directories by number. Raises CachefsError, OSError."""
    frames = FrameSplitter(MAX_STATE_BYTES)
    bodies: list[bytes | memoryview] = []
    while not bodies:
        data = pipe.recv(_RECEIVE_BYTES)
        if not data:
            raise ConfigError("the daemon has ended")
        bodies = frames.split_frames(data)
    state = _decode_state(bytes(bodies[-1]))
    fetches = DaemonFetchClient(link, lambda: os._exit(0))
    server = PeerServer(listening, pipe, fetches, BlockSender(*directories), state)
    server.set_certificates(certificates())
    return server


def _tls_reason(error: ssl.SSLError) -> str:
    text = getattr(error, "verify_message", "") or error.reason or str(error)
    return " ".join(str(text).replace("_", " ").lower().split())
