"""Client of the daemons' control endpoints, as an observer."""

import asyncio
import ssl
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from cachefs.errors import CachefsError
from cachefs.observe_messages import (
    COMMAND_PATH,
    MAX_REPORT_BYTES,
    MEMBERS_PATH,
    OBSERVER_HEADER,
    REPORT_PATH,
    ClusterMembers,
    NodeCommand,
    NodeCommandResult,
    NodeReport,
)
from cachefs.pem_files import PemFiles
from cachefs_scheduler.certificates import ReloadedTlsContext
from cachefs_scheduler.config import ObservedClusterSection

CONNECT_SECONDS: Final = 5.0
REQUEST_SECONDS: Final = 10.0
# A command may walk through a snapshot of millions of files.
COMMAND_SECONDS: Final = 120.0
# Characters of a daemon's message that are repeated in errors.
_MAX_MESSAGE: Final = 200
_SETTINGS: Final = ("cluster.tls_cert", "cluster.tls_key", "cluster.tls_ca")

ResponseT = TypeVar("ResponseT", bound=msgspec.Struct)


class NodeRequestFailed(CachefsError):
    """A daemon did not answer as expected."""

    def __init__(self, text: str, status: int = 0) -> None:
        """status: HTTP status; 0: none."""
        super().__init__(text)
        self.status = status


class ObserverClient:
    """Sends requests to daemons. Used on the event loop."""

    def __init__(self, section: ObservedClusterSection) -> None:
        """Raises ConfigError for unusable certificates."""
        self._name = section.name
        self._certificates = _certificates(section)
        self._scheme = "https" if self._certificates is not None else "http"
        self._session: aiohttp.ClientSession | None = None

    async def fetch_members(self, host: str, port: int) -> ClusterMembers:
        """Return the members that the daemon knows. Raises NodeRequestFailed."""
        return await self._request(("GET", host, port, MEMBERS_PATH), ClusterMembers, REQUEST_SECONDS)

    async def fetch_report(
        self, host: str, port: int, known: NodeReport | None, wait: float, pause: float
    ) -> NodeReport:
        """Return the changes since *known*; everything if *known* is None. wait: seconds to wait for changes; pause:
        least seconds between two answers. Raises NodeRequestFailed."""
        query = {"wait": f"{wait:g}", "pause": f"{pause:g}"}
        if known is not None:
            query |= {"after": str(known.version), "instance": known.instance}
        return await self._request(
            ("GET", host, port, REPORT_PATH), NodeReport, wait + pause + REQUEST_SECONDS, params=query
        )

    async def send_command(self, host: str, port: int, order: NodeCommand) -> NodeCommandResult:
        """Send a command. Raises NodeRequestFailed."""
        body = msgspec.msgpack.encode(order)
        return await self._request(("POST", host, port, COMMAND_PATH), NodeCommandResult, COMMAND_SECONDS, data=body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _request(
        self, where: tuple[str, str, int, str], kind: type[ResponseT], seconds: float, **more: Any
    ) -> ResponseT:
        method, host, port, path = where
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=300),
                headers={OBSERVER_HEADER: self._name},
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            )
        bare = f"[{host}]" if ":" in host else host
        url = f"{self._scheme}://{bare}:{port}{path}"
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(
                    method,
                    url,
                    allow_redirects=False,
                    ssl=self._certificates.current_context() if self._certificates is not None else True,
                    **more,
                ) as response,
            ):
                body = await _read_body(response)
                if response.status != 200:
                    text = _printable(body.decode(errors="replace"))
                    raise NodeRequestFailed(f"the daemon answers {response.status}: {text}", response.status)
                return msgspec.msgpack.decode(body, type=kind)
        except TimeoutError:
            raise NodeRequestFailed(f"no answer within {seconds:.3g} s") from None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise NodeRequestFailed(f"the daemon sent an invalid response: {_printable(str(error))}") from None
        except aiohttp.ServerDisconnectedError:  # after a TLS refusal, there is no other sign
            raise NodeRequestFailed(f"the daemon closed the connection; {self._why_closed()}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NodeRequestFailed(_printable(str(error)) or type(error).__name__) from None

    def _why_closed(self) -> str:
        if self._certificates is None:
            return "if the daemon uses TLS, set cluster.tls_ca, tls_cert and tls_key"
        return "see the daemon's log: the daemon may not trust the certificate cluster.tls_cert"


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_REPORT_BYTES:
            raise NodeRequestFailed(f"an answer of more than {MAX_REPORT_BYTES:,} bytes")
        parts.append(part)
    return b"".join(parts)


def _certificates(section: ObservedClusterSection) -> ReloadedTlsContext | None:
    """Return the client's certificates, or None. Raises ConfigError."""
    if section.tls_ca is None:
        return None
    return ReloadedTlsContext(PemFiles(section.tls_cert, section.tls_key, section.tls_ca, _SETTINGS), _context)


def _context(files: PemFiles) -> ssl.SSLContext:
    """Return a context without host name checks, as between nodes: a certificate of the cluster's CA suffices."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    return files.load(context)


def _printable(text: str) -> str:
    words = " ".join(text.split())[:_MAX_MESSAGE]
    return "".join(letter if letter.isprintable() else "?" for letter in words)
