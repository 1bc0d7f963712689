"""Client of cachefs-scheduler: JSON over HTTP, on its Unix socket or on TCP with certificates."""

import http.client
import os
import socket
import ssl
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from cachefs.errors import AccessDenied, CachefsError, ConfigError, DaemonUnavailable, NotFound
from cachefs.pem_files import PemFiles

DEFAULT_SOCKET: Final = Path("/run/cachefs-scheduler/cachefs-scheduler.sock")
# Environment variable with an address, as for --scheduler.
ADDRESS_VARIABLE: Final = "CACHEFS_SCHEDULER"
CALL_SECONDS: Final = 30.0
MAX_RESPONSE: Final = 256 << 20

Reply = TypeVar("Reply", bound=msgspec.Struct)
_ERRORS: Final = {400: ConfigError, 403: AccessDenied, 404: NotFound}


class SchedulerClient:
    """Blocking client with a connection for each call."""

    def __init__(self, address: str = "", certificates: tuple[str, str, str] | None = None) -> None:
        """Create a client. Raises ConfigError.

        Args:
            address: path of the socket, unix:PATH, or http(s)://HOST:PORT; "": from the environment, or the default.
            certificates: files of the CA, the certificate and its key.
        """
        self.address = address or os.environ.get(ADDRESS_VARIABLE, "") or str(DEFAULT_SOCKET)
        # The form of cachefs-slurm-hint's configuration.
        self.address = self.address.removeprefix("unix:")
        self._url = urlsplit(self.address) if "://" in self.address else None
        if self._url is not None and (self._url.scheme not in ("http", "https") or not self._url.hostname):
            raise ConfigError(f"scheduler {self.address!r}: expected the path of a socket, or https://HOST:PORT")
        self._certificates = certificates

    def get(self, path: str, kind: type[Reply], **query: str) -> Reply:
        """Send a GET. Raises CachefsError."""
        given = {name: value for name, value in query.items() if value}
        return self._request("GET", f"{path}?{urlencode(given, quote_via=quote)}" if given else path, None, kind)

    def post(self, path: str, body: msgspec.Struct, kind: type[Reply]) -> Reply:
        """Send a POST. Raises CachefsError."""
        return self._request("POST", path, msgspec.json.encode(body), kind)

    def _request(self, method: str, path: str, body: bytes | None, kind: type[Reply]) -> Reply:
        connection = self._connection()
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read(MAX_RESPONSE)
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from None
        finally:
            connection.close()
        if answer.status != 200:
            raise _ERRORS.get(answer.status, CachefsError)(
                _error_text(said) or f"cachefs-scheduler answers with status {answer.status}"
            )
        try:
            return msgspec.json.decode(said, type=kind)
        except msgspec.MsgspecError as error:
            raise CachefsError(f"{self.address} sent no valid response of cachefs-scheduler: {error}") from None

    def _connection(self) -> http.client.HTTPConnection:
        if self._url is None:
            return _UnixConnection(self.address)
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=CALL_SECONDS)
        return http.client.HTTPSConnection(host, port, timeout=CALL_SECONDS, context=self._context())

    def _context(self) -> ssl.SSLContext:
        if self._certificates is None:
            return ssl.create_default_context()
        ca, cert, key = map(Path, self._certificates)
        return PemFiles(cert, key, ca, ("--tls: CERT", "KEY", "--tls: CA")).client_context()

    def _unavailable(self, error: Exception) -> CachefsError:
        if isinstance(error, PermissionError):
            return AccessDenied(
                f"you may not use {self.address}: be root, or in the group of service.socket_group of cachefs-scheduler"
            )
        why = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        return DaemonUnavailable(
            f"no cachefs-scheduler answers at {self.address}: {why}; start it, or name another with --scheduler"
        )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CALL_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CALL_SECONDS)
        self.sock.connect(self._path)


class _ErrorBody(msgspec.Struct):
    error: str = ""


def _error_text(said: bytes) -> str:
    try:
        return " ".join(msgspec.json.decode(said, type=_ErrorBody).error.split())
    except msgspec.MsgspecError:
        return ""
