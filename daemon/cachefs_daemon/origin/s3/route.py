"""The route of GETs to a bucket, as aiobotocore would send them: server, path, and region of the signature.

Only botocore knows endpoints, virtual hosts, dual stack, FIPS, access points and regions learned from a redirect. So
botocore prepares one GET, which is captured and never sent. All other GETs of the bucket differ from it only in their
key, their conditions and their time.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlsplit

from cachefs_daemon.origin.http.pool import ServerAddress
from cachefs_daemon.runtime.signing_key import SigningKey

ALGORITHM: Final = "AWS4-HMAC-SHA256"
# No object has this ETag.
_PROBE_ETAG: Final = '"cachefs: never sent"'
_KEY: Final = "key"
_PAYER: Final = "x-amz-request-payer"
_SIGNED: Final = frozenset(("host", "if-match", "x-amz-content-sha256", "x-amz-date", _PAYER, "x-amz-security-token"))
_PLAIN: Final = re.compile("[A-Za-z0-9_.~/-]+")
_PORTS: Final = {"http": 80, "https": 443}


class Signer:
    """Signs GETs of one moment with one key of one account, for one service of one region.

    Making a signer takes 8 us and a signature 2, where botocore takes 60. Servers accept times that are 15 minutes off,
    so one signer serves all requests of a second.
    """

    def __init__(self, access_key: str, secret_key: str, region: str, service: str, when: str) -> None:
        """when: the value of X-Amz-Date."""
        names = (when[:8], region, service, "aws4_request")
        key = f"AWS4{secret_key}".encode()
        for name in names:
            key = SigningKey(key).sign(name.encode())
        scope = "/".join(names)
        self._key = SigningKey(key)
        self._before_hash = f"{ALGORITHM}\n{when}\n{scope}\n"
        self._before_names = f"{ALGORITHM} Credential={access_key}/{scope}, SignedHeaders="

    def authorization(self, path: str, lines: str, names: str, payload: str) -> str:
        """Return the value of the header Authorization.

        path: as it is sent. lines: the signed headers, each as `name:value` and a line end, sorted by their names,
        which are in lower case; values have no superfluous blanks. names: the same names, separated by semicolons.
        payload: the signed hash of the body.
        """
        request = f"GET\n{path}\n\n{lines}\n{names}\n{payload}"
        text = self._before_hash + hashlib.sha256(request.encode()).hexdigest()
        return f"{self._before_names}{names}, Signature={self._key.sign(text.encode()).hex()}"


class NoRoute(Exception):
    """Our own client cannot send GETs to this bucket."""


class _CapturedRequest(Exception):
    """Stops the captured GET."""

    def __init__(self, request: Any) -> None:
        self.request = request


@dataclass(frozen=True, slots=True)
class S3Route:
    """The server, headers and path prefix of GETs to one bucket, and the scope of their signature."""

    server: ServerAddress
    # Value of the header Host.
    host: str
    user_agent: str
    # The path before the key.
    prefix: str
    # The signed hash of the empty body; "" for unsigned requests.
    payload: str
    # "" for unsigned requests.
    region: str
    service: str
    # Value of the header x-amz-request-payer; "" without it.
    payer: str = ""

    def path(self, key: str) -> str:
        """Return the path of *key*, quoted as botocore does."""
        # Most keys need no quoting, and checking that takes half as long as quoting.
        return self.prefix + (key if _PLAIN.fullmatch(key) else quote(key, safe="/~"))


def register_capture(client: Any) -> None:
    """Prepare a new client for find_route."""
    client.meta.events.register("before-send.s3.GetObject", _capture_request)


async def find_route(client: Any, bucket: str) -> S3Route:
    """Return the route to *bucket*. Raises NoRoute, and what botocore raises, as for missing credentials."""
    try:
        await client.get_object(Bucket=bucket, Key=_KEY, IfMatch=_PROBE_ETAG)
    except _CapturedRequest as revealed:
        return _route(client, revealed.request)
    raise NoRoute("botocore prepares requests in an unknown way")


def _capture_request(request: Any, **_: Any) -> None:
    if request.headers.get("If-Match") in (_PROBE_ETAG, _PROBE_ETAG.encode()):
        raise _CapturedRequest(request)


def _route(client: Any, request: Any) -> S3Route:
    url = urlsplit(request.url)
    headers = {name.lower(): _text(value) for name, value in request.headers.items()}
    if url.query or not url.path.endswith("/" + _KEY) or url.hostname is None or url.username is not None:
        raise NoRoute(f"the URL of its objects is {request.url}")
    from botocore.utils import get_environ_proxies  # takes 0.07 s to import, and daemons without S3 do not need it

    if url.scheme in get_environ_proxies(client.meta.endpoint_url):
        raise NoRoute("a proxy is configured")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    port = url.port or _PORTS[url.scheme]
    region, service = _scope(headers)
    return S3Route(
        ServerAddress(url.hostname, port, url.scheme == "https"),
        host if port == _PORTS[url.scheme] else f"{host}:{port}",
        headers.get("user-agent", "cachefs"),
        url.path.removesuffix(_KEY),
        headers.get("x-amz-content-sha256", "") if region else "",
        region,
        service,
        headers.get(_PAYER, ""),
    )


def _scope(headers: dict[str, str]) -> tuple[str, str]:
    """Return region and service of the signature; "" for an unsigned request."""
    if "authorization" not in headers:
        if any(name.startswith("x-amz-") for name in headers):
            raise NoRoute("its requests are signed in another way")
        return "", ""
    algorithm, _, parameters = headers["authorization"].partition(" ")
    fields = dict(field.strip().partition("=")[::2] for field in parameters.split(","))
    # The access key may contain slashes.
    scope = fields.get("Credential", "").rsplit("/", 4)
    if algorithm != ALGORITHM or len(scope) != 5 or not set(fields.get("SignedHeaders", "").split(";")) <= _SIGNED:
        raise NoRoute("its requests are signed in another way")
    return scope[2], scope[3]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
