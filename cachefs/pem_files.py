"""Files of certificates: how they are loaded, what is wrong with one, and whether others have taken its place."""

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cachefs.errors import ConfigError

# Of each file its mtime, inode and size; None for one that is not there.
FilesState = tuple[tuple[int, int, int] | None, ...]


def why_unusable(error: Exception) -> str:
    """In words, what loading the files into an SSLContext has raised."""
    if isinstance(error, ssl.SSLError):
        return f"not what PEM files of TLS have in them, or they do not belong together ({error.reason or error})"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def files_state(paths: Sequence[Path | None]) -> FilesState:
    """What changes when one of the files does. None in the place of a path: no file is meant."""
    return tuple(_state(path) if path is not None else None for path in paths)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_ino, seen.st_size


@dataclass(frozen=True, slots=True)
class PemFiles:
    """What one side of TLS is made of, and how its settings are called, for messages."""

    # Its certificate, with those between it and the authority, and its key, without a password. None: it shows none.
    cert: Path | None = None
    key: Path | None = None
    # Authorities of the other side. None: those of the system for a client; a server asks for no certificate.
    ca: Path | None = None
    # Settings of cert, key and ca.
    names: tuple[str, str, str] = ("tls_cert", "tls_key", "tls_ca")

    @property
    def state(self) -> FilesState:
        return files_state((self.cert, self.key, self.ca))

    def load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Put them into a context, which is returned. Raises ConfigError naming the setting and the file."""
        cert, key, ca = self.names
        if self.ca is not None:
            try:
                context.load_verify_locations(cafile=self.ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{ca} = {str(self.ca)!r}: {why_unusable(error)}") from None
        if self.cert is not None and self.key is not None:
            try:
                # A key with a password would ask for it on the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
            except (OSError, ssl.SSLError, ValueError) as error:
                raise ConfigError(
                    f"{cert} = {str(self.cert)!r}, {key} = {str(self.key)!r}: {why_unusable(error)}"
                ) from None
        return context

    def client_context(self) -> ssl.SSLContext:
        """For a client that checks the name of whom it asks. Raises ConfigError."""
        if self.ca is None:
            return self.load(ssl.create_default_context())
        return self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
