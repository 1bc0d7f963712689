"""Origins over HTTP: the common part of `gs://`, `az://`, `http(s)://` and `hf://`.

A store prepares requests and tells whether a response has the listed version. `WebOrigin` sends the requests, retries
them, and checks each response: version, length, range, and the checksum of a whole object if the store has one.
"""

import asyncio
import functools
import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final, Protocol, TypeVar
from weakref import WeakValueDictionary

import aiohttp

from cachefs.errors import CachefsError, ObjectChanged, OriginError, OriginUnavailable
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import (
    ALTERED_HINT,
    Data,
    ObjectRange,
    OriginSettings,
    ReportProblem,
    is_weak_form,
    too_many_pages_error,
)
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.kinds import kind_of
from cachefs_daemon.origin.outage import Outage
from cachefs_daemon.origin.refusals import ErrorMeaning, ErrorTable
from cachefs_daemon.origin.request_counters import OWN_COUNTERS
from cachefs_daemon.origin.retry import Failure, run_with_retries
from cachefs_daemon.origin.web.client import (
    BrokenWebResponse,
    Headers,
    RequestRefused,
    WebClient,
    WebRequest,
    WebResponse,
    receive_range,
)

# Seconds for all attempts for one page of the listing together.
_PAGE_DEADLINE: Final = 120.0
# The same for an index, which may have a gigabyte.
_INDEX_DEADLINE: Final = 3600.0
# Seconds after which the first page is not retried: a silent endpoint may be a typing error.
_FIRST_PAGE_TRIED: Final = 3.0
# Most bytes that are hashed on the event loop: MD5, the slowest, takes half a millisecond.
_SHORT: Final = 256 << 10
_UNAUTHORIZED: Final = 401
# Responses with a file have one of these headers. Other pages, such as a maintenance notice, seldom do.
_FILE_HEADERS: Final = ("ETag", "Last-Modified")

Result = TypeVar("Result")
_Digests = set[bytes]  # of wrong bytes, and lengths, received so far
MakeRequest = Callable[[], Awaitable[WebRequest]]  # called for each attempt, since credentials may be new


class PageFetcher(Protocol):
    """Requests a page of a listing, with retries."""

    async def __call__(self, make: MakeRequest, into: BinaryIO | None = None) -> tuple[bytes, WebResponse]:
        """Return the page and the head of its response. into: the file that a long page is written to."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """The checksum of a whole object."""

    # Name of the hashlib algorithm.
    kind: str
    expected: bytes
    # Bytes that are hashed before the object.
    before: bytes = b""
    # No header but this checksum proves that a response is the listed object.
    is_only_proof: bool = False

    def matches(self, data: Data) -> bool:
        """Return whether *data*, a whole object, has the checksum."""
        digest = hashlib.new(self.kind, self.before, usedforsecurity=False)
        digest.update(data)
        return digest.digest() == self.expected


class WebStore(Protocol):
    """The part of an origin that depends on its kind."""

    @property
    def url(self) -> str:
        """URL of the dataset, without a slash at the end."""

    @property
    def server(self) -> str:
        """The server: its scheme, name and port, and the account if one server has several."""

    @property
    def identity(self) -> bytes:
        """The prefix that makes a key unique among the objects of all origins."""

    def list(self, fetch_page: PageFetcher, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        """List all objects (see Origin.list)."""

    async def make_request(self, wanted: ObjectRange) -> WebRequest:
        """Prepare a request for these bytes of an object as it was listed. Raises CachefsError."""

    def is_version(self, wanted: ObjectRange, response: WebResponse) -> bool | None:
        """Return whether a response has the listed version; None if it does not tell its version."""

    def checksum(self, wanted: ObjectRange, response: WebResponse) -> Checksum | None:
        """Return the checksum of the whole object, if it is known."""

    def handle_refusal(self, request: WebRequest) -> bool:
        """Handle refused credentials. Return whether others may be found at once."""

    @property
    def errors(self) -> ErrorTable:
        """Meanings of the store's error codes."""

    @property
    def text_values(self) -> Mapping[str, str]:
        """Values of the names in the texts of `errors`, beside {where}."""


@dataclass(slots=True)
class _ListingSize:
    """The size of a listing so far."""

    pages: int = 0
    bytes: int = 0


class WebOrigin:
    """A store as an origin (see cachefs_daemon.origin.base.Origin)."""

    def __init__(self, store: WebStore, settings: OriginSettings) -> None:
        self.url = store.url
        self.requests = 0
        self.errors = 0
        self.fallback_reads = 0
        self._store = store
        self._settings = settings
        kind = kind_of(store.url).name
        self._read_counters = OWN_COUNTERS.counters_of(kind)
        self._client = WebClient(settings, OWN_COUNTERS.counters_of(kind, "list"))
        self.endpoint = _endpoint(store.server, settings.max_connections)
        self._server_suffix = "" if store.server in store.url else f" at {store.server}"
        self._outage = Outage(f"{store.url}{self._server_suffix}")
        self._has_responded = False

    def identity(self, key: bytes) -> bytes:
        return self._store.identity + key

    async def list(self, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        try:
            async for objects in self._store.list(functools.partial(self._fetch_page, _ListingSize()), report):
                yield objects
        except (RequestRefused, BrokenWebResponse, aiohttp.ClientError, OSError) as error:
            raise self._judge("", error).error from None

    async def read(self, wanted: ObjectRange, deadline: Deadline) -> Data:
        key = wanted.key.decode()
        last: _Digests = set()
        read = functools.partial(self._read_once, key, wanted, last)
        return await self._run_with_retries(read, key, deadline, math.inf)

    async def close(self) -> None:
        await self._client.close()

    async def _fetch_page(
        self, extent: _ListingSize, make_request: MakeRequest, into: BinaryIO | None = None
    ) -> tuple[bytes, WebResponse]:
        async def page() -> tuple[bytes, WebResponse]:
            return await self._client.fetch_page(await make_request(), self._settings.max_listing - extent.bytes, into)

        extent.pages += 1
        if extent.pages > self._settings.max_pages:
            raise too_many_pages_error(self._display_name(""), self._settings.max_pages)

        give_up = math.inf if self._has_responded else asyncio.get_running_loop().time() + _FIRST_PAGE_TRIED
        patience = Deadline.after(_PAGE_DEADLINE if into is None else _INDEX_DEADLINE)
        found = await self._run_with_retries(page, "", patience, give_up)
        self._has_responded = True
        extent.bytes += len(found[0])
        return found

    async def _run_with_retries(
        self, work: Callable[[], Awaitable[Result]], key: str, deadline: Deadline, give_up: float
    ) -> Result:
        def judge_attempt(error: Exception) -> Failure:
            self.errors += 1
            failure = self._judge(key, error)
            self.endpoint.note_failure(self.url, failure, self._outage)
            return failure

        async def attempt() -> Result:
            result = await self._with_credentials(work)
            self._outage.note_response()
            return result

        return await run_with_retries(attempt, judge_attempt, self._display_name(key), deadline, give_up)

    async def _with_credentials(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Make one attempt, repeated at once if its credentials were refused and others may be found."""
        self.requests += 1
        try:
            return await work()
        except RequestRefused as refusal:
            if refusal.refusal.status != _UNAUTHORIZED or not self._store.handle_refusal(refusal.request):
                raise
        self.requests += 1
        self.errors += 1
        return await work()

    async def _read_once(self, key: str, wanted: ObjectRange, last: _Digests) -> Data:
        began = await self.endpoint.wait_for_turn(self.url)
        request = await self._store.make_request(wanted)
        async with self._client.open_response(request, self._read_counters) as (response, content):
            is_version = self._store.is_version(wanted, response)
            if is_version is None:
                # A login page or a maintenance notice.
                raise BrokenWebResponse("the response does not name the version of the object")
            if not is_version:
                if is_weak_form(
                    response.headers.get("ETag", ""), request.headers.get("If-Match", "").strip('"').encode()
                ):
                    raise OriginError(f"{self._display_name(key)}: the answer has a weak ETag; {ALTERED_HINT}")
                raise ObjectChanged(f"{self._display_name(key)} has changed since it was listed; refresh the dataset")
            data = await receive_range(content, response, wanted)
        try:
            right = await self._verify(key, wanted, response, data, last)
        except BaseException as error:
            self._read_counters.count_unused_response(error, content.received)
            raise
        self._read_counters.count_dropped_bytes(content.received - len(right))
        self.endpoint.note_response(self.url, wanted.length, began)
        return right

    async def _verify(
        self, key: str, wanted: ObjectRange, response: WebResponse, data: Data | None, last: _Digests
    ) -> Data:
        """Return *data*, verified to be those of the object. data: None if the response has another length."""
        checksum = self._store.checksum(wanted, response) if wanted.length == wanted.size else None
        if data is None and (checksum is None or not checksum.is_only_proof):
            raise OriginError(
                f"{self._display_name(key)}: the server sent other bytes than {wanted.length} from {wanted.offset} on "
                f"of {wanted.size}, but of the version that was listed; {ALTERED_HINT}"
            )
        if checksum is not None:
            await self._verify_checksum(key, checksum, response, data, last)
        assert data is not None  # one of the two would have raised
        return data

    async def _verify_checksum(
        self, key: str, checksum: Checksum, response: WebResponse, data: Data | None, last: _Digests
    ) -> None:
        """Verify a checksum. data: None if the response has another length. Raises BrokenWebResponse, and ObjectChanged
        if the same wrong bytes, or the same wrong length, arrived twice."""
        if data is None:
            wrong = f"length {response.headers.get('Content-Length', '')}".encode()
        elif checksum.matches(data) if len(data) <= _SHORT else await asyncio.to_thread(checksum.matches, data):
            return
        else:
            wrong = hashlib.sha256(data).digest()
        # Without a version, the response may be an error page, which is transient.
        is_page = checksum.is_only_proof and not any(response.headers.get(name) for name in _FILE_HEADERS)
        if wrong in last and not is_page:
            raise ObjectChanged(
                f"{self._display_name(key)} does not have the {checksum.kind} that it was listed or stored with; "
                "upload it again or refresh the dataset"
            )
        last.add(wrong)
        raise BrokenWebResponse(f"the response does not have the {checksum.kind} of the object")

    def _display_name(self, key: str) -> str:
        return f"{self.url}/{key}".rstrip("/") + self._server_suffix

    def _judge(self, key: str, error: Exception) -> Failure:
        """Return the failure that *error* means. Raises *error* itself if network and server are not its cause."""
        if isinstance(error, CachefsError):
            return Failure(error, isinstance(error, OriginUnavailable))
        words = {"where": self._display_name(key)}
        if isinstance(error, RequestRefused):
            words |= {"asked": error.request.url, **self._store.text_values}
            return self._store.errors.judge(error.refusal, words, is_listing=not key)
        for kinds, cause in _EXCEPTION_CAUSES:
            if isinstance(error, kinds):
                details = {"error": str(error) if isinstance(error, BrokenWebResponse) else type(error).__name__}
                return ErrorMeaning(OriginUnavailable, cause, is_transient=True).make_failure(
                    {**words, **details, "tls": _tls_reason(error)}
                )
        raise error


# Meanings of exceptions that are no response of the server: the first row with a matching type applies. Texts of
# aiohttp's exceptions are not repeated: they contain URLs, which may hold credentials.
_EXCEPTION_CAUSES: Final[tuple[tuple[tuple[type[Exception], ...], str], ...]] = (
    ((BrokenWebResponse,), "{where} is broken: {error}"),
    (
        (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError),
        "{where}: the server's certificate is not trusted, or TLS fails ({tls}); REQUESTS_CA_BUNDLE names the file of "
        "the authorities that the daemon trusts",
    ),
    ((aiohttp.ClientConnectorError,), "no server answers for {where}; check the URL and the network"),
    ((aiohttp.ServerTimeoutError,), "{where}: the server sent nothing for too long"),
    ((aiohttp.ClientPayloadError,), "{where} is broken: the answer was cut short"),
    (
        (aiohttp.ClientResponseError,),
        "{where}: the head of the response is not HTTP, or has a line of more than 8 KiB or too many lines",
    ),
    ((aiohttp.ClientError, OSError), "{where} is unreachable or broken ({error})"),
)


def _tls_reason(error: Exception) -> str:
    """Return OpenSSL's words, which name no URL."""
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
    return getattr(cause, "verify_message", "") or getattr(cause, "reason", None) or type(error).__name__


_endpoints: Final[WeakValueDictionary[tuple[str, int], Endpoint]] = WeakValueDictionary()


def _endpoint(server: str, most: int) -> Endpoint:
    """Return the endpoint of the server, which all its open origins share."""
    found = _endpoints.get((server, most))
    if found is None:
        found = _endpoints[server, most] = Endpoint(server, most)
    return found


def range_header(wanted: ObjectRange) -> Headers:
    """Return the header that requests a part of an object; none for a whole one."""
    if wanted.length == wanted.size:
        return {}
    return {"Range": f"bytes={wanted.offset}-{wanted.offset + wanted.length - 1}"}
