"""Origin `gs://bucket/prefix`: Google Cloud Storage, by its JSON API.

The version of an object is its generation, a number that each upload renews. Objects are read as they are stored: the
server would otherwise unpack objects with `Content-Encoding: gzip`, and their length would differ from the listing.
The error codes are the reasons of the JSON API, and codes of the XML API, which emulators and proxies also send.
"""

import base64
import binascii
import functools
import math
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from cachefs.errors import ConfigError, NotFound, OriginAccessDenied, OriginUnavailable
from cachefs.extras import install_command
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, OriginSettings, ReportProblem, not_a_directory_error
from cachefs_daemon.origin.refusals import (
    BUSY,
    CHANGED,
    GONE,
    SHORTER,
    THROTTLED,
    ErrorMeaning,
    ErrorMeanings,
    ErrorTable,
)
from cachefs_daemon.origin.web.bearer import BearerTokens, Token
from cachefs_daemon.origin.web.client import BrokenWebResponse, WebRequest, WebResponse, checked_endpoint
from cachefs_daemon.origin.web.origin import Checksum, PageFetcher, WebOrigin, range_header

_REFUSED: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where} is refused",
    "check the daemon's Google credentials (GOOGLE_APPLICATION_CREDENTIALS) and its rights to the bucket{anonymous}",
)
_PAYER: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where} is in a bucket whose requester pays, and no paying project was named",
    "name it with `cachectl dataset add --user-project PROJECT`, or `dataset set` where the dataset is there already",
)
_PROJECT: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where}: the project of --user-project cannot be billed for it",
    "check its name, its billing, and the daemon's right serviceusage.services.use in it",
)
_ACCOUNT: Final = ErrorMeaning(
    OriginAccessDenied, "{where}: Google has closed the account or the bucket", "ask the owner of the account"
)
_KEY: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where}: Google may not use the key that the object is encrypted with",
    "enable that key, and let Cloud Storage's service agent use it",
)
_CUSTOMER_KEY: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where} is encrypted with a key that Google does not keep (CSEK)",
    "store such objects with a key of Google or of Cloud KMS instead",
)
_TLS: Final = ErrorMeaning(
    OriginAccessDenied, "{where}: Google takes requests with TLS only", "name an https:// endpoint"
)
_COUNTRY_BLOCKED: Final = ErrorMeaning(
    OriginAccessDenied, "{where}: Google does not serve this country or network", "ask the administrator of the network"
)
_NO_BUCKET: Final = ErrorMeaning(NotFound, "there is no bucket {bucket} at {endpoint}", "check the URL")

_CODES: Final[ErrorMeanings] = {
    "notFound": GONE,
    "NoSuchKey": GONE,
    "gone": GONE,
    "conditionNotMet": CHANGED,
    "PreconditionFailed": CHANGED,
    "requestedRangeNotSatisfiable": SHORTER,
    "InvalidRange": SHORTER,
    "NoSuchBucket": _NO_BUCKET,
    # Requester pays.
    "userProjectMissing": _PAYER,
    "UserProjectMissing": _PAYER,
    "AuthenticationRequiredRequesterPays": _REFUSED,
    "userProjectInconsistent": _PROJECT,
    "userProjectInvalid": _PROJECT,
    "userProjectAccessDenied": _PROJECT,
    "userProjectAccountProblem": _PROJECT,
    "UserProjectInconsistent": _PROJECT,
    "UserProjectInvalid": _PROJECT,
    "UserProjectAccessDenied": _PROJECT,
    "UserProjectAccountProblem": _PROJECT,
    # Rights.
    "authError": _REFUSED,
    "forbidden": _REFUSED,
    "insufficientPermissions": _REFUSED,
    "AccessDenied": _REFUSED,
    401: _REFUSED,
    403: _REFUSED,
    # Google also answers 400 with the reason "required" if the paying project is missing.
    400: ErrorMeaning(
        OriginAccessDenied,
        "{where}: Google does not take the request",
        "if the requester pays for this bucket, name the project to bill: --user-project PROJECT",
    ),
    "accountDisabled": _ACCOUNT,
    "BillingDisabled": _ACCOUNT,
    "lockedDomainExpired": _ACCOUNT,
    "usageLimits.accessNotConfigured": _ACCOUNT,
    "accessNotConfigured": _ACCOUNT,
    "countryBlocked": _COUNTRY_BLOCKED,
    "orgPolicyConstraintFailed": _REFUSED,
    "sslRequired": _TLS,
    # Keys of encrypted objects.
    "cloudKmsBadKey": _KEY,
    "cloudKmsDecryptionKeyNotFound": _KEY,
    "cloudKmsDisabledKey": _KEY,
    "cloudKmsKeyLocationNotAllowed": _KEY,
    "resourceIsEncryptedWithCustomerEncryptionKey": _CUSTOMER_KEY,
    "ResourceIsEncryptedWithCustomerEncryptionKey": _CUSTOMER_KEY,
    "customerEncryptionKeyIsIncorrect": _CUSTOMER_KEY,
    # Overload. Google sends some of these with status 403.
    "rateLimitExceeded": THROTTLED,
    "userRateLimitExceeded": THROTTLED,
    "usageLimits.rateLimitExceeded": THROTTLED,
    "quotaExceeded": THROTTLED,
    "SlowDown": THROTTLED,
    "backendError": BUSY,
    "internalError": BUSY,
    "gatewayTimeout": BUSY,
    "InternalError": BUSY,
    "ServiceUnavailable": BUSY,
}
_LISTING: Final[ErrorMeanings] = {"notFound": _NO_BUCKET, "gone": _NO_BUCKET, 404: _NO_BUCKET}

GOOGLE: Final = ErrorTable(_CODES, _LISTING)
_GOOGLE: Final = "https://storage.googleapis.com"
_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_only"
_FIELDS: Final = "nextPageToken,items(name,size,generation,updated)"


class _Item(msgspec.Struct, frozen=True):
    """An object in a listing."""

    name: str
    # Numbers in quotes.
    size: str
    generation: str
    # RFC 3339.
    updated: datetime


class _Page(msgspec.Struct, frozen=True):
    """One page of a listing."""

    items: list[_Item] = []
    # Token for the next page; "" on the last one.
    nextPageToken: str = ""  # Google's name


class GoogleStore:
    """Google Cloud Storage (see cachefs_daemon.origin.web.origin.WebStore)."""

    def __init__(self, url: str, options: OriginOptions) -> None:
        """Raises ConfigError."""
        bucket, _, prefix = url.removeprefix("gs://").partition("/")
        prefix = prefix.strip("/")
        if not bucket:
            raise ConfigError(f"URL {url!r} names no bucket; it must look like gs://bucket/prefix")
        if options.requester_pays:
            raise ConfigError("--requester-pays is for s3://; for gs:// name the project that pays: --user-project")
        self.url = f"gs://{bucket}/{prefix}".rstrip("/")
        self._endpoint = _endpoint(options)
        self.server = self._endpoint
        self.identity = f"gs:{self._endpoint}:{bucket}/{prefix}{'/' if prefix else ''}".encode()
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._objects = f"{self._endpoint}/storage/v1/b/{quote(bucket, safe='')}/o"
        self._bearer = None if options.anonymous else BearerTokens(_find_token)
        self._payer = {"userProject": options.user_project} if options.user_project else {}
        self.errors = GOOGLE
        self.text_values = {
            "bucket": bucket,
            "endpoint": self._endpoint,
            "anonymous": ", or add the dataset without --anonymous" if options.anonymous else "",
        }

    async def list(self, fetch_page: PageFetcher, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        start = len(self._prefix)
        token, seen, is_empty = "", set[str](), True
        while True:
            page = await self._fetch_page(fetch_page, self._prefix, token)
            is_empty = is_empty and not page.items
            try:
                yield [
                    ListedObject(
                        each.name[start:].encode(),
                        int(each.size),
                        _ns(each.updated),
                        str(int(each.generation)).encode(),
                    )
                    for each in page.items
                ]
            except ValueError as error:
                raise BrokenWebResponse(f"the listing is not understood: {error}") from None
            token = page.nextPageToken
            if not token:
                break
            if token in seen:
                raise BrokenWebResponse("the listing repeats itself")
            seen.add(token)
        if is_empty and self._prefix:
            name = self._prefix.removesuffix("/")
            if any(each.name == name for each in (await self._fetch_page(fetch_page, name, "")).items):
                raise not_a_directory_error(self.url)

    async def make_request(self, wanted: ObjectRange) -> WebRequest:
        name = quote(self._prefix + wanted.key.decode(), safe="")
        query = {"alt": "media", "ifGenerationMatch": wanted.version.decode(), **self._payer}
        return WebRequest(
            f"{self._objects}/{name}?{urlencode(query)}",
            {"Accept-Encoding": "gzip", **range_header(wanted)},
            await self._secrets(),
        )

    def is_version(self, wanted: ObjectRange, response: WebResponse) -> bool | None:
        generation: str = response.headers.get("x-goog-generation", "")
        return generation.encode() == wanted.version if generation else None

    def checksum(self, wanted: ObjectRange, response: WebResponse) -> Checksum | None:
        """Return the MD5. Composed objects have none, and a plain installation has no library for CRC-32C."""
        for value in ",".join(response.headers.getall("x-goog-hash", [])).split(","):
            kind, _, md5 = value.strip().partition("=")
            if kind == "md5":
                return parse_md5(md5)
        return None

    def handle_refusal(self, request: WebRequest) -> bool:
        return self._bearer is not None and self._bearer.handle_refusal(request.secrets)

    async def _secrets(self) -> dict[str, str]:
        return await self._bearer.headers() if self._bearer is not None else {}

    async def _fetch_page(self, fetch_page: PageFetcher, prefix: str, token: str) -> _Page:
        body, _ = await fetch_page(functools.partial(self._make_page_request, prefix, token))
        try:
            return msgspec.json.decode(body, type=_Page)
        except msgspec.DecodeError as error:
            raise BrokenWebResponse(f"the listing is not understood: {error}") from None

    async def _make_page_request(self, prefix: str, token: str) -> WebRequest:
        query = {"fields": _FIELDS, "maxResults": "1000", "prefix": prefix, **self._payer}
        if token:
            query["pageToken"] = token
        return WebRequest(f"{self._objects}?{urlencode(query)}", secrets=await self._secrets())


def open_google_origin(url: str, options: OriginOptions, settings: OriginSettings) -> WebOrigin:
    """Return the origin of a bucket of Google Cloud Storage. Raises ConfigError."""
    return WebOrigin(GoogleStore(url, options), settings)


def parse_md5(text: str) -> Checksum | None:
    """Parse a header with an MD5 in base64; None if it is invalid."""
    try:
        expected = base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
    return Checksum("md5", expected) if len(expected) == 16 else None


def _ns(time: datetime) -> int:
    return round(time.timestamp() * 1e6) * 1000


def _endpoint(options: OriginOptions) -> str:
    """Raises ConfigError."""
    named = options.endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST") or _GOOGLE
    if "://" not in named:
        named = f"http://{named}"  # Google's libraries accept this form too
    return checked_endpoint(named, _GOOGLE)


def _find_token() -> Token:
    """Return a token for Google's application default credentials. Raises CachefsError."""
    try:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
        from google.auth.transport.requests import Request as Transport
    except ModuleNotFoundError:
        raise ConfigError(
            f"credentials for gs:// need google-auth; install it for the daemon with: {install_command('gs')}, or add "
            "the dataset with --anonymous"
        ) from None
    try:
        credentials: Any = google.auth.default(scopes=[_SCOPE])[0]
        credentials.refresh(Transport())
    except DefaultCredentialsError:
        raise OriginAccessDenied(
            "the daemon has no Google credentials; set GOOGLE_APPLICATION_CREDENTIALS for it and restart it, or add "
            "the dataset with --anonymous"
        ) from None
    except TransportError:
        raise OriginUnavailable("the server that gives tokens for gs:// is not reachable") from None
    except GoogleAuthError as error:
        if error.retryable:
            raise OriginUnavailable("the server that gives tokens for gs:// is overloaded or down") from None
        raise OriginAccessDenied(f"the daemon's Google credentials are refused ({type(error).__name__})") from None
    expiry = credentials.expiry
    # The time is in UTC, but has no time zone set.
    return Token(credentials.token, expiry.replace(tzinfo=UTC).timestamp() if expiry else math.inf)
