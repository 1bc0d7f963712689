"""Client of the daemons' control endpoints, as an observer."""

import asyncio
import ssl
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from cachefs.errors import CachefsError
from cachefs.observe_messages import (
    MEMBERS_PATH,
    MOST_REPORT,
    OBSERVER,
    ORDER_PATH,
    REPORT_PATH,
    Members,
    NodeReport,
    Order,
    OrderDone,
)
from cachefs.pem_files import PemFiles
from cachefs_scheduler.certificates import Renewed
from cachefs_scheduler.config import ClusterSection

CONNECT_SECONDS: Final = 5.0
ASK_SECONDS: Final = 10.0
# A command may walk through a snapshot of millions of files.
ORDER_SECONDS: Final = 120.0
# Characters of a daemon's message that are repeated in errors.
_SHOWN: Final = 200
_SETTINGS: Final = ("cluster.tls_cert", "cluster.tls_key", "cluster.tls_ca")

Answer = TypeVar("Answer", bound=msgspec.Struct)


class NodeFailed(CachefsError):
    """A daemon did not answer as expected."""

    def __init__(self, text: str, status: int = 0) -> None:
        """status: HTTP status; 0: none."""
        super().__init__(text)
        self.status = status


class Asking:
    """Sends requests to daemons. Used on the event loop."""

    def __init__(self, section: ClusterSection) -> None:
        """Raises ConfigError for unusable certificates."""
        self._name = section.name
        self._certificates = _certificates(section)
        self._scheme = "https" if self._certificates is not None else "http"
        self._session: aiohttp.ClientSession | None = None

    async def members(self, host: str, port: int) -> Members:
        """Return the members that the daemon knows. Raises NodeFailed."""
        return await self._ask(("GET", host, port, MEMBERS_PATH), Members, ASK_SECONDS)

    async def report(self, host: str, port: int, known: NodeReport | None, wait: float, pause: float) -> NodeReport:
        """Return the changes since *known*; everything if *known* is None. wait: seconds to wait for changes; pause:
        least seconds between two answers. Raises NodeFailed."""
        query = {"wait": f"{wait:g}", "pause": f"{pause:g}"}
        if known is not None:
            query |= {"after": str(known.version), "instance": known.instance}
        return await self._ask(("GET", host, port, REPORT_PATH), NodeReport, wait + pause + ASK_SECONDS, params=query)

    async def order(self, host: str, port: int, order: Order) -> OrderDone:
        """Send a command. Raises NodeFailed."""
        body = msgspec.msgpack.encode(order)
        return await self._ask(("POST", host, port, ORDER_PATH), OrderDone, ORDER_SECONDS, data=body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, where: tuple[str, str, int, str], kind: type[Answer], seconds: float, **more: Any) -> Answer:
        method, host, port, path = where
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=300),
                headers={OBSERVER: self._name},
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
                    ssl=self._certificates.newest() if self._certificates is not None else True,
                    **more,
                ) as answer,
            ):
                body = await _read(answer)
                if answer.status != 200:
                    said = _shown(body.decode(errors="replace"))
                    raise NodeFailed(f"it says {answer.status}: {said}", answer.status)
                return msgspec.msgpack.decode(body, type=kind)
        except TimeoutError:
            raise NodeFailed(f"no answer within {seconds:.3g} s") from None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise NodeFailed(f"its answer cannot be understood: {_shown(str(error))}") from None
        except aiohttp.ServerDisconnectedError:  # after a TLS refusal, there is no other sign
            raise NodeFailed(f"it has closed the connection; {self._why_closed()}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NodeFailed(_shown(str(error)) or type(error).__name__) from None

    def _why_closed(self) -> str:
        if self._certificates is None:
            return "does it have certificates? Then give cluster.tls_ca, tls_cert and tls_key"
        return "its log may say why: perhaps it does not believe the certificate cluster.tls_cert"


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > MOST_REPORT:
            raise NodeFailed(f"an answer of more than {MOST_REPORT:,} bytes")
        parts.append(part)
    return b"".join(parts)


def _certificates(section: ClusterSection) -> Renewed | None:
    """Return the client's certificates, or None. Raises ConfigError."""
    if section.tls_ca is None:
        return None
    return Renewed(PemFiles(section.tls_cert, section.tls_key, section.tls_ca, _SETTINGS), _context)


def _context(files: PemFiles) -> ssl.SSLContext:
    """Return a context without host name checks, as between nodes: a certificate of the cluster's CA suffices."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    return files.load(context)


def _shown(text: str) -> str:
    words = " ".join(text.split())[:_SHOWN]
    return "".join(letter if letter.isprintable() else "?" for letter in words)
