"""The server's side of TLS: a context that follows its files."""

import logging
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachefs.errors import ConfigError
from cachefs.pem_files import files_state, why_unusable

log = logging.getLogger(__name__)

# Seconds between two looks whether the files have changed.
LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """PEM files. cert has those between it and the authority too; the key has no password."""

    cert: Path
    key: Path
    # Authorities of clients, who are then asked for a certificate. None: anybody may ask.
    client_ca: Path | None = None


class ServerCertificates:
    """Whoever replaces the files, as cert-manager and the kubelet do, need not restart anything: connections that are
    made from then on use the new ones. While the files cannot be used, the former ones stay. Thread-safe."""

    def __init__(self, files: ServerFiles) -> None:
        """Raises ConfigError."""
        self._files = files
        self._lock = threading.Lock()
        self._state = files_state((files.cert, files.key, files.client_ca))
        self._looked = time.monotonic()
        self._newest = _context(files)
        # What the server keeps. Python calls back for every ClientHello, so each handshake takes the newest one.
        self.context = _context(files)
        self.context.sni_callback = self._use_newest

    def _use_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        with self._lock:
            self._follow()
            connection.context = self._newest

    def _follow(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        state = files_state((self._files.cert, self._files.key, self._files.client_ca))
        if state == self._state:
            return
        self._state = state
        try:
            self._newest = _context(self._files)
        except ConfigError as error:
            log.warning("new certificates cannot be used yet, the former ones stay in use: %s", error)
            return
        log.info("using the new certificate in %s", self._files.cert)


def _context(files: ServerFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # kube-scheduler 1.20 (Go 1.15) and later speak 1.3; older proxies between them may not.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A resumed session would not be checked against certificates that have changed since.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    try:
        # A key with a password would ask for it on the terminal.
        context.load_cert_chain(files.cert, files.key, password=lambda: "")
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"kube.tls_cert = {str(files.cert)!r}, kube.tls_key = {str(files.key)!r}: {why_unusable(error)}"
        ) from None
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cafile=files.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"kube.client_ca = {str(files.client_ca)!r}: {why_unusable(error)}") from None
    return context
