"""TLS contexts of the service, as server and client, which follow changes of their files.

Replaced certificates (cert-manager, the kubelet) take effect with the next connection, without a restart. While the
files are unusable, for instance half replaced, the previous context stays in use.
"""

import logging
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final

from cachefs.errors import ConfigError
from cachefs.pem_files import PemFiles

log = logging.getLogger(__name__)

# Seconds between checks whether the files have changed.
CHECK_SECONDS: Final = 1.0


class ReloadedTlsContext:
    """A TLS context that is rebuilt when its files change. Thread-safe."""

    def __init__(self, files: PemFiles, make: Callable[[PemFiles], ssl.SSLContext]) -> None:
        """make: builds a context from the files; raises ConfigError. The constructor raises ConfigError too."""
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._state = files.stamps
        self._checked_at = time.monotonic()
        self._context = make(files)

    def current_context(self) -> ssl.SSLContext:
        """Return the context for the next connection."""
        with self._lock:
            now = time.monotonic()
            if now - self._checked_at < CHECK_SECONDS:
                return self._context
            self._checked_at = now
            state = self._files.stamps
            if state != self._state:
                self._state = state
                self._reload()
            return self._context

    def _reload(self) -> None:
        try:
            self._context = self._make(self._files)
        except ConfigError as error:
            log.warning("new certificates cannot be used yet, the former ones stay in use: %s", error)
            return
        log.info("using the new certificates in %s", self._files.cert or self._files.ca)


class ServerCertificates:
    """A server's TLS context: `context` uses the newest certificates for each handshake."""

    def __init__(self, files: PemFiles, minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
        """If the files include a CA, clients must present a certificate signed by it. Raises ConfigError."""

        def make(files: PemFiles) -> ssl.SSLContext:
            return _server_context(files, minimum)

        self._reloaded = ReloadedTlsContext(files, make)
        # Python calls sni_callback for every ClientHello, so each handshake uses the newest context.
        self.context = make(files)
        self.context.sni_callback = self._use_newest

    def _use_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._reloaded.current_context()


def _server_context(files: PemFiles, minimum: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = minimum
    # A resumed session would not be checked against replaced certificates.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return files.load(context)
