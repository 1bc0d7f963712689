"""Loads files of certificates, explains their errors, and detects their replacement."""

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cachefs.errors import ConfigError

# Mtime, inode and size of each file; None for a missing file.
FileStamps = tuple[tuple[int, int, int] | None, ...]


def describe_load_error(error: Exception) -> str:
    """Return a text for users about an error of loading the files into an SSLContext."""
    if isinstance(error, ssl.SSLError):
        return f"not valid PEM files, or the certificate and the key do not match ({error.reason or error})"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def file_stamps(paths: Sequence[Path | None]) -> FileStamps:
    """Return a value that changes when one of the files does. A None among the paths stands for an unset file."""
    return tuple(_stamp(path) if path is not None else None for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_ino, seen.st_size


@dataclass(frozen=True, slots=True)
class PemFiles:
    """The files of one side of TLS, and the names of their settings, for messages."""

    # Certificate with its chain up to the authority, and its key without a password. None: no certificate.
    cert: Path | None = None
    key: Path | None = None
    # Authorities of the other side. None: a client uses the system's; a server asks for no certificate.
    ca: Path | None = None
    # Names of the settings of cert, key and ca.
    names: tuple[str, str, str] = ("tls_cert", "tls_key", "tls_ca")

    @property
    def stamps(self) -> FileStamps:
        return file_stamps((self.cert, self.key, self.ca))

    def load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Load the files into a context, and return it. Raises ConfigError with the setting and the file."""
        cert, key, ca = self.names
        if self.ca is not None:
            try:
                context.load_verify_locations(cafile=self.ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{ca} = {str(self.ca)!r}: {describe_load_error(error)}") from None
        if self.cert is not None and self.key is not None:
            try:
                # Without this, OpenSSL would ask for the key's password on the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
            except (OSError, ssl.SSLError, ValueError) as error:
                raise ConfigError(
                    f"{cert} = {str(self.cert)!r}, {key} = {str(self.key)!r}: {describe_load_error(error)}"
                ) from None
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return a context for a client that checks the name of the server. Raises ConfigError."""
        if self.ca is None:
            return self.load(ssl.create_default_context())
        return self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
