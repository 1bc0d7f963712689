"""GETs over HTTP(S) for the origins `gs://`, `az://`, `http(s)://` and `hf://`.

Redirects are followed here, since credentials must not go to another server, and since some stores give the version of
an object in the redirect.
"""

import asyncio
import contextlib
import functools
import os
import re
import tempfile
import urllib.request
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import BinaryIO, Final, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import aiohttp
import yarl
from multidict import CIMultiDict, CIMultiDictProxy

from cachefs.errors import CachefsError, ConfigError
from cachefs.sizes import format_size
from cachefs_daemon.origin.base import ObjectRange, OriginSettings
from cachefs_daemon.origin.http.tls import ClientTls
from cachefs_daemon.origin.refusals import MAX_ERROR_BODY, Refusal, parse_error_body
from cachefs_daemon.origin.request_counters import CountedRequest, RequestCounters, RequestOutcome

_MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))
# Most bytes of one page of a listing. Azure's longest have about 8 MiB.
_MAX_PAGE_BYTES: Final = 64 << 20
_CHUNK: Final = 1 << 20
# Timeout of a refusal's body in seconds.
_BODY_SECONDS: Final = 2.0
# A name or an address, and a port; no user.
_SERVER: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?")
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

Headers = Mapping[str, str]


class BrokenWebResponse(Exception):
    """The response is not what the server promised, for instance cut short; a retry may succeed."""


@dataclass(frozen=True, slots=True)
class WebRequest:
    """A GET."""

    # Percent-encoded.
    url: str
    headers: Headers = field(default_factory=dict)
    # Headers with credentials, which are sent to this server only, and only with TLS.
    secrets: Headers = field(default_factory=dict)
    # Credentials in the query, such as a shared access signature, which are added to the URL.
    secret_query: str = ""


class WebResponse(NamedTuple):
    """The head of a response."""

    status: int
    headers: CIMultiDictProxy[str]
    # Headers of the last response of the requested server, which may have redirected to another one.
    own_headers: CIMultiDictProxy[str]


class RequestRefused(Exception):
    """A response with another status than 200 or 206."""

    def __init__(self, refusal: Refusal, request: WebRequest) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
        self.request = request


class ResponseBody:
    """The body of a response, whose bytes are counted as they arrive."""

    def __init__(self, content: aiohttp.StreamReader, exchange: CountedRequest) -> None:
        self._content = content
        self._exchange = exchange
        self.received = 0  # bytes

    async def read(self, most: int) -> bytes:
        chunk = await self._content.read(most)
        self.received += len(chunk)
        self._exchange.count_received(len(chunk))
        return chunk


class _Redirect(Exception):
    """The server redirects the request."""


def _request_trace() -> aiohttp.TraceConfig:
    """Make a trace that begins each exchange when its request is sent, not while it waits for a connection."""
    config = aiohttp.TraceConfig()

    async def sent(_: object, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.count_begin()

    config.on_request_headers_sent.append(sent)
    return config


def _outcome_of(error: BaseException) -> RequestOutcome:
    match error:
        case asyncio.CancelledError() | GeneratorExit():
            return RequestOutcome.CANCELLED
        case RequestRefused() | _Redirect():
            return RequestOutcome.REFUSED
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return RequestOutcome.UNREACHABLE
        case aiohttp.ServerDisconnectedError():
            return RequestOutcome.UNANSWERED
    return RequestOutcome.BROKEN


class WebClient:
    """Connections for one origin, opened on demand. Belongs to the event loop that first uses it."""

    def __init__(self, settings: OriginSettings, listed: RequestCounters) -> None:
        """listed: counts requests for pages of listings."""
        self._settings = settings
        self._list_counters = listed
        self._opening: asyncio.Task[aiohttp.ClientSession] | None = None

    async def fetch_page(
        self, request: WebRequest, most: int, into: BinaryIO | None = None
    ) -> tuple[bytes, WebResponse]:
        """Return a whole response: a page of a listing. most: its most bytes. into: a file that is overwritten with a
        long response; no bytes are returned then.

        Raises RequestRefused, BrokenWebResponse, what aiohttp raises; ConfigError for a response of more bytes.
        """
        async with self.open_response(request, self._list_counters) as (web_response, content):
            if web_response.status == 206:
                raise BrokenWebResponse("the server sent a part of the listing, although the whole was requested")
            if into is not None:
                into.seek(0)
                into.truncate()
                while chunk := await content.read(_CHUNK):
                    if into.tell() + len(chunk) > most:
                        raise listing_too_long_error(request.url, self._settings.max_listing)
                    self._write(into, chunk)
                return b"", web_response
            body = await _read_at_most(content, _MAX_PAGE_BYTES + 1)
        if len(body) > _MAX_PAGE_BYTES:
            raise BrokenWebResponse(f"a page of the listing has more than {_MAX_PAGE_BYTES >> 20} MiB")
        if len(body) > most:
            raise listing_too_long_error(request.url, self._settings.max_listing)
        return body, web_response

    @contextlib.asynccontextmanager
    async def open_response(
        self, request: WebRequest, counters: RequestCounters
    ) -> AsyncIterator[tuple[WebResponse, "ResponseBody"]]:
        """Yield a response with status 200 or 206, and its body. counters: counts the request. Raises as `fetch_page`
        does."""
        session = await self._session()
        url, own = request.url, None
        for _ in range(_MAX_REDIRECTS + 1):
            with contextlib.suppress(_Redirect), counters.counted_request(_outcome_of) as exchange:
                async with session.get(
                    yarl.URL(_with_secret_query(request, url), encoded=True),
                    headers=_headers_to(request, url),
                    allow_redirects=False,
                    proxy=_proxy(*urlsplit(url)[:2]),
                    trace_request_ctx=exchange,
                ) as response:
                    if own is None or urlsplit(url)[:2] == urlsplit(request.url)[:2]:
                        own = response.headers
                    web_response = WebResponse(response.status, response.headers, own)
                    if response.status in (200, 206):
                        yield web_response, ResponseBody(response.content, exchange)
                        return
                    where = response.headers.get("Location", "")
                    if response.status not in _REDIRECTS or not where:
                        raise RequestRefused(await _refusal(web_response, response), request)
                    url = redirect_target(url, where)
                    raise _Redirect
        raise BrokenWebResponse(f"it redirects more than {_MAX_REDIRECTS} times")

    async def close(self) -> None:
        """Close all connections."""
        opening, self._opening = self._opening, None
        if opening is not None:
            with contextlib.suppress(OSError):  # the certificates could not be read
                await (await opening).close()

    def _write(self, file: BinaryIO, data: bytes) -> None:
        try:
            file.write(data)
            file.flush()
        except OSError as error:
            where = self._settings.scratch or tempfile.gettempdir()
            raise CachefsError(f"an index cannot be kept in {where}: {error.strerror}") from None

    async def _session(self) -> aiohttp.ClientSession:
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            opening = self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(opening)

    async def _open(self) -> aiohttp.ClientSession:
        tls = ClientTls(os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or True)
        settings = self._settings
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=settings.max_connections, ssl=await tls.context()),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout, sock_read=settings.read_timeout
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[_request_trace()],
            auto_decompress=False,
            headers={"User-Agent": "cachefs", "Accept-Encoding": "identity"},
        )


async def _refusal(web_response: WebResponse, response: aiohttp.ClientResponse) -> Refusal:
    """Return the refusal in a response, from its headers, as Azure and the hub send it, or its body."""
    body = b""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, zlib.error):
        async with asyncio.timeout(_BODY_SECONDS):
            while len(body) < MAX_ERROR_BODY and (chunk := await response.content.read(MAX_ERROR_BODY - len(body))):
                body += chunk
        if response.headers.get("Content-Encoding", "") == "gzip":
            body = zlib.decompressobj(wbits=31).decompress(body, MAX_ERROR_BODY)
    code, message = parse_error_body(body)
    own = web_response.own_headers
    return Refusal.from_response(
        web_response.status,
        own.get("x-ms-error-code") or own.get("X-Error-Code") or code,
        message or own.get("X-Error-Message", ""),
        web_response.headers.get("Retry-After"),
    )


def checked_endpoint(url: str, example: str) -> str:
    """Return the URL of a server, without a slash at the end. Raises ConfigError.

    The URL must hold no credentials, since every user of this node can see it.
    """
    if not is_plain(url):
        raise ConfigError(f"the endpoint must be a URL such as {example}, without a user and a query")
    return percent_encode(url).rstrip("/")


def is_plain(url: str) -> bool:
    """Return whether *url* is a plain URL of a web server, without user, query or fragment."""
    try:
        parts = urlsplit(url)
        has_server = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or not has_server or not _SERVER.fullmatch(parts.netloc):
        return False
    return not parts.query and not parts.fragment


def percent_encode(url: str) -> str:
    """Percent-encode the characters that are invalid in a request."""
    return quote(url, safe=":/%@!$&'()*+,;=~[]")


async def receive_range(content: ResponseBody, web_response: WebResponse, wanted: ObjectRange) -> bytearray | None:
    """Return the *wanted* bytes of a response's body; None if the body has other bytes. Raises BrokenWebResponse."""
    length = web_response.headers.get("Content-Length")
    promised = int(length) if length is not None and length.isdecimal() else None
    skip = 0
    if web_response.status == 206:
        span = f"bytes {wanted.offset}-{wanted.offset + wanted.length - 1}/"
        if web_response.headers.get("Content-Range", "") not in (f"{span}{wanted.size}", f"{span}*"):
            return None
        if promised not in (None, wanted.length):
            return None
    elif promised not in (None, wanted.size):
        return None
    else:
        skip = wanted.offset  # the server does not support ranges
    data = bytearray()
    missing = skip + wanted.length
    while missing and (chunk := await content.read(min(missing, _CHUNK))):
        missing -= len(chunk)
        data += chunk
        if skip:
            dropped = min(skip, len(data))
            del data[:dropped]
            skip -= dropped
    if missing:
        if web_response.status == 200 and web_response.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return None  # the object is shorter: the last chunk proves that nothing is missing
        raise BrokenWebResponse(f"the body ended {missing} bytes early")
    ends_here = web_response.status == 206 or wanted.offset + wanted.length == wanted.size
    if ends_here and await content.read(1):
        return None
    return data


def listing_too_long_error(where: str, most: int) -> ConfigError:
    """Return the error for an index or a listing with too many bytes."""
    return ConfigError(
        f"{where}: the listing has more than {format_size(most)}, or no end; if it is right, raise origin.max_listing"
    )


async def _read_at_most(content: ResponseBody, most: int) -> bytes:
    """Return the body, or its first *most* bytes."""
    data = bytearray()
    while len(data) < most and (chunk := await content.read(min(most - len(data), _CHUNK))):
        data += chunk
    return bytes(data)


def _headers_to(request: WebRequest, url: str) -> CIMultiDict[str]:
    """Return the headers for the request, or for a server that it is redirected to."""
    headers = CIMultiDict(request.headers)
    if request.secrets and _is_trusted(request, url):
        headers.update(request.secrets)
    return headers


def _with_secret_query(request: WebRequest, url: str) -> str:
    if url != request.url or not request.secret_query or not _is_trusted(request, url):
        return url
    return f"{url}{'&' if '?' in url else '?'}{request.secret_query}"


def _is_trusted(request: WebRequest, url: str) -> bool:
    """Return whether credentials may go to this URL: only to their own server. Raises ConfigError for it without
    TLS."""
    original, now = urlsplit(request.url), urlsplit(url)
    if (original.scheme, original.netloc) != (now.scheme, now.netloc):
        return False
    if now.scheme != "https" and now.hostname not in _LOOPBACK:
        raise ConfigError(
            f"credentials are not sent to {now.scheme}://{now.netloc} without TLS; name an https:// endpoint, or add "
            "the dataset with --anonymous"
        )
    return True


def redirect_target(url: str, where: str) -> str:
    """Return the target of a redirect. Raises BrokenWebResponse."""
    there = urljoin(url, where)
    parts = urlsplit(there)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise BrokenWebResponse("it redirects to an invalid URL")
    if url.startswith("https:") and parts.scheme != "https":
        raise BrokenWebResponse(f"it redirects to {parts.hostname} without TLS")
    return there


@functools.lru_cache(64)
def _proxy(scheme: str, server: str) -> str | None:
    """Return the proxy that the environment names for a server."""
    return None if urllib.request.proxy_bypass(server) else urllib.request.getproxies().get(scheme)
