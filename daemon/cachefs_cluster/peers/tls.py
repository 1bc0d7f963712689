"""Mutual TLS between nodes: contexts that follow their files, and the identity of the other side.

A node's certificate names it: a DNS name in subjectAltName, or the common name without one, is the `name` of a member.
Addresses are not checked, so certificates stay valid when a node moves. Both sides have the same three files, and both
require a certificate signed by the authority; so a certificate must be valid for servers and for clients.
"""

import logging
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachefs.errors import ConfigError
from cachefs.pem_files import PemFiles, file_stamps
from cachefs_cluster.membership.view import NodeRecord

if TYPE_CHECKING:  # processes that serve peers would import pydantic for it
    from cachefs_cluster.section import ClusterSection

log = logging.getLogger(__name__)

# Seconds between two checks whether the files have changed.
CHECK_SECONDS: Final = 1.0
# Turns that each side needs to finish a handshake of TLS 1.3.
_HANDSHAKE_STEPS: Final = 3
_SETTINGS: Final = ("cluster.tls_cert", "cluster.tls_key", "cluster.tls_ca")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files for TLS between nodes, in PEM."""

    # Certificates of the authorities that sign nodes' certificates, and no others.
    ca: Path
    # This node's certificate with its intermediates; and its key, without a password.
    cert: Path
    key: Path


class Certificates:
    """TLS contexts for both directions. Thread-safe.

    Replacing the files needs no restart: connections made from then on use the new ones. While the files cannot be
    used, such as when only one is replaced yet, the former contexts stay in use.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError."""
        self._files = files
        self._lock = threading.Lock()
        self._state = file_stamps((files.ca, files.cert, files.key))
        self._checked_at = time.monotonic()
        self._newest_server, self._newest_client = _contexts(files)
        # Servers keep this context. Python calls the callback for every ClientHello, which selects the newest one.
        self.server_context: ssl.SSLContext = _server_context(files)
        self.server_context.sni_callback = self._use_newest

    def client_context(self) -> ssl.SSLContext:
        """Return the context for a connection to a peer. It checks no name: compare `member_of` after the handshake."""
        self._reload_if_changed()
        return self._newest_client

    def _use_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        self._reload_if_changed()
        connection.context = self._newest_server

    def _reload_if_changed(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._checked_at < CHECK_SECONDS:
                return
            self._checked_at = now
            state = file_stamps((self._files.ca, self._files.cert, self._files.key))
            if state == self._state:
                return
            try:
                self._newest_server, self._newest_client = _contexts(self._files)
            except ConfigError as error:
                log.warning("new certificates cannot be used yet, the former ones stay in use: %s", error)
                self._state = state
                return
            self._state = state
            log.info("using the new certificates in %s", self._files.cert)


def names_of(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names in a certificate (as `getpeercert` returns it), in lower case."""
    if not certificate:
        return frozenset()
    names = [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    if not names:
        subject = (pair for part in certificate.get("subject", ()) for pair in part)
        names = [str(value) for kind, value in subject if kind == "commonName"]
    return frozenset(name.lower() for name in names)


def member_of(names: frozenset[str], members: Iterable[NodeRecord]) -> NodeRecord | None:
    """Return the member that has one of these names, or None."""
    return next((record for record in members if record.name.lower() in names), None)


def certificate_problem(files: TlsFiles, name: str) -> str:
    """Return why the other nodes would refuse this node, whose name in its cluster is *name*; "" if they would not.
    Plays their side of a handshake with the same authorities. Raises ConfigError if the files cannot be used at all."""
    server, client = _server_context(files), _with_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    client_side = client.wrap_bio(to_client, to_server)
    for side in (client_side, server_side) * _HANDSHAKE_STEPS:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or str(error)
            return f"cluster.tls_cert = {str(files.cert)!r}: other nodes will refuse it: {why}; see cluster.tls_ca"
    names = names_of(server_side.getpeercert())
    if name.lower() in names:
        return ""
    shown = ", ".join(sorted(names))[:200] or "no name"
    return f"cluster.tls_cert = {str(files.cert)!r}: other nodes will refuse it: it names {shown}, and not {name}"


def _contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of this node as a server and as a client. Raises ConfigError."""
    client = _with_files(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)
    return _server_context(files), client


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = _with_files(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    # A resumed session would not be checked against certificates that changed since.
    context.num_tickets = 0
    return context


def _with_files(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return PemFiles(files.cert, files.key, files.ca, _SETTINGS).load(context)


def own_certificate_problem(section: "ClusterSection") -> str:
    """Return why other nodes would refuse this node's certificate; "" if they would not, or without TLS. Raises
    ConfigError if the certificate cannot be used at all."""
    files = tls_files(section) if section.enabled else None
    return certificate_problem(files, section.own_name) if files is not None else ""


def tls_files(section: "ClusterSection") -> TlsFiles | None:
    """Return the configured TLS files; None without TLS."""
    if section.tls_ca is None or section.tls_cert is None or section.tls_key is None:
        return None
    return TlsFiles(section.tls_ca, section.tls_cert, section.tls_key)
