"""TLS of the service, as a server and as a client: contexts that follow their files.

Whoever replaces the files, as cert-manager and the kubelet do, need not restart anything: connections that are made
from then on use the new ones. While the files cannot be used, such as when only one is replaced yet, the former ones
stay.
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

# Seconds between two looks whether the files have changed.
LOOK_SECONDS: Final = 1.0


class Renewed:
    """A context that is made anew when its files change. Thread-safe."""

    def __init__(self, files: PemFiles, make: Callable[[PemFiles], ssl.SSLContext]) -> None:
        """make: the context from the files; raises ConfigError. Raises ConfigError."""
        self._files = files
        self._make = make
        self._lock = threading.Lock()
        self._state = files.state
        self._looked = time.monotonic()
        self._newest = make(files)

    def newest(self) -> ssl.SSLContext:
        """For the next connection."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < LOOK_SECONDS:
                return self._newest
            self._looked = now
            state = self._files.state
            if state != self._state:
                self._state = state
                self._follow()
            return self._newest

    def _follow(self) -> None:
        try:
            self._newest = self._make(self._files)
        except ConfigError as error:
            log.warning("new certificates cannot be used yet, the former ones stay in use: %s", error)
            return
        log.info("using the new certificates in %s", self._files.cert or self._files.ca)


class ServerCertificates:
    """Of a server: `context` is what it keeps."""

    def __init__(self, files: PemFiles, minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
        """Where the files have authorities, clients must show a certificate of theirs. Raises ConfigError."""

        def make(files: PemFiles) -> ssl.SSLContext:
            return _server_context(files, minimum)

        self._renewed = Renewed(files, make)
        # Python calls back for every ClientHello, so each handshake takes the newest one.
        self.context = make(files)
        self.context.sni_callback = self._use_newest

    def _use_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._renewed.newest()


def _server_context(files: PemFiles, minimum: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = minimum
    # A resumed session would not be checked against certificates that have changed since.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return files.load(context)
