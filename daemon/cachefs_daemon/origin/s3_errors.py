"""What a failed S3 request means, as an error of cachefs that says what to do."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final

import aiohttp
from botocore import exceptions as boto
from botocore.compat import HTTPHeaders
from botocore.parsers import ResponseParserError, RestXMLParser

from cachefs.errors import CachefsError, ConfigError, NotFound, ObjectChanged, OriginAccessDenied, OriginUnavailable
from cachefs_daemon.origin.ledger import Outcome
from cachefs_daemon.origin.retry import Failure, retry_after
from cachefs_daemon.origin.s3_answer import BrokenAnswer, Place

_THROTTLED: Final = {
    "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "BandwidthLimitExceeded",
    "TooManyRequests", "TooManyRequestsException",
}  # fmt: skip
# Too many requests. And 408, which proxies say of a connection that they close: they have seen no request.
_BUSY: Final = {408, 429}
_EXPIRED: Final = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_SKEWED: Final = "RequestTimeTooSkewed"
# Said of wrong credentials, but also of those that were replaced by others a moment ago.
_UNKNOWN: Final = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"}
_CREDENTIALS: Final = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.TokenRetrievalError,
    boto.NoAuthTokenError,
    boto.SSOError,
)
# The region of a bucket was guessed wrong, and the answer may say which it is.
_REDIRECTS: Final = {"PermanentRedirect", "AuthorizationHeaderMalformed"}
_SETTINGS: Final = (
    boto.ProfileNotFound,
    boto.ConfigParseError,
    boto.InvalidRegionError,
    boto.EndpointProviderError,
)


def outcome_of(error: BaseException) -> Outcome:
    """What the exception that has ended a request of a client of botocore says of it."""
    match error:
        case asyncio.CancelledError():
            return Outcome.CANCELLED
        case boto.ClientError():
            return Outcome.REFUSED
        case (
            boto.EndpointConnectionError() | boto.ConnectTimeoutError() | boto.SSLError() | boto.ProxyConnectionError()
        ):
            return Outcome.UNREACHABLE
        case boto.ConnectionClosedError():
            return Outcome.UNANSWERED
    return Outcome.BROKEN


def refusal(status: int, headers: Mapping[bytes, bytes], body: bytes) -> boto.ClientError:
    """The exception that a client of botocore raises for such an answer to a GET of an object."""
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.items()]
    parsed = RestXMLParser().parse(
        {"status_code": status, "headers": HTTPHeaders.from_pairs(pairs), "body": body}, None
    )
    return boto.ClientError(parsed, "GetObject")


def is_redirect(error: boto.ClientError) -> bool:
    """Whether a client of botocore may know the right region now, or can learn it from such an answer."""
    return _code(error) in _REDIRECTS


def are_credentials_refused(error: Exception) -> bool:
    """Whether other credentials, such as renewed ones, may help."""
    if isinstance(error, boto.ClientError):
        return _code(error) in _EXPIRED | _UNKNOWN
    return isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError)


def judge(error: Exception, place: Place) -> Failure:
    """What an exception means. Raises *error* itself where neither the network nor the server is its cause."""
    if isinstance(error, CachefsError):
        return Failure(error, False)
    if isinstance(error, boto.ClientError):
        return _refusal(error, place)
    if isinstance(error, _CREDENTIALS):
        return Failure(
            OriginAccessDenied(
                f"no usable credentials for {place}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
                "~/.aws/credentials for the daemon, or add the dataset as anonymous"
            ),
            False,
        )
    if isinstance(error, boto.CredentialRetrievalError):
        return Failure(OriginAccessDenied(f"the credentials for {place} cannot be renewed: {_line(error)}"), True)
    if isinstance(error, boto.ParamValidationError):
        return Failure(ConfigError(f"{place}: S3 allows no such bucket name or key"), False)
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError):
        return Failure(
            OriginUnavailable(
                f"no server answers at {place.endpoint} (for s3://{place.bucket}/{place.key}); check the "
                "endpoint and the network"
            ),
            True,
        )
    if isinstance(error, boto.SSLError | aiohttp.ClientSSLError | ssl.SSLError):
        return Failure(OriginUnavailable(f"{place}: {_tls_trouble(_tls_reason(error))}"), True)
    if isinstance(error, _SETTINGS):
        return Failure(ConfigError(f"{place} cannot be asked for: {_line(error)}"), False)
    if isinstance(error, ResponseParserError | boto.BotoCoreError | BrokenAnswer | aiohttp.ClientError | OSError):
        return Failure(OriginUnavailable(f"{place} is unreachable or broken: {_line(error)}"), True)
    raise error


def _refusal(error: boto.ClientError, place: Place) -> Failure:
    code = _code(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _THROTTLED or code == "RequestTimeout" or status in _BUSY or status >= 500:
        later = retry_after(error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after"))
        return Failure(
            OriginUnavailable(f"{place}: the server answers {_said(status, code)}; it is overloaded or down"),
            True,
            throttled=code in _THROTTLED or status == 429 or (status == 503 and later is not None),
            retry_after=later or 0.0,
        )
    if code in _EXPIRED:
        # Whoever renews them may be late by a moment. They are read again before each attempt.
        return Failure(
            OriginAccessDenied(f"{place}: the credentials have expired ({code}); renew them for the daemon"), True
        )
    if code == _SKEWED:
        # A clock that was off is set within seconds, for instance after a virtual machine has slept.
        return Failure(
            OriginAccessDenied(
                f"{place}: the server's clock and this node's differ too much; set this node's clock (chronyc makestep)"
            ),
            True,
        )
    return Failure(_permanent(code, status, place), False)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _tls_trouble(reason: str) -> str:
    if reason == "WRONG_VERSION_NUMBER":  # OpenSSL's name for an answer that is no TLS
        return "the server speaks no TLS at this port; write http:// in the endpoint, or name the port for https://"
    return (
        f"the server's certificate is not trusted, or TLS fails ({reason}); for a private authority set AWS_CA_BUNDLE "
        "for the daemon to the file of its certificates"
    )


def _tls_reason(error: Exception) -> str:
    """In OpenSSL's words, without the URL that botocore repeats."""
    cause = error.kwargs.get("error", error) if isinstance(error, boto.SSLError) else error
    for found in (cause, *cause.args, getattr(cause, "__cause__", None), getattr(cause, "os_error", None)):
        if reason := getattr(found, "verify_message", "") or getattr(found, "reason", ""):
            return str(reason)
    return type(cause).__name__


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _permanent(code: str, status: int, place: Place) -> CachefsError:
    if code == "NoSuchBucket" or (status == 404 and not place.key):
        return NotFound(f"there is no bucket {place.bucket} at {place.endpoint}; check the URL and the endpoint")
    if status == 404:
        return ObjectChanged(f"{place} is gone since it was listed; refresh the dataset")
    if status == 412:
        return ObjectChanged(f"{place} has changed since it was listed; refresh the dataset")
    if status == 416:
        return ObjectChanged(f"{place} is shorter than it was when listed; refresh the dataset")
    if status in (401, 403) or "AccessDenied" in code or code in _UNKNOWN:
        return OriginAccessDenied(
            f"{place} is refused ({_said(status, code)}); check the daemon's AWS credentials and the bucket's policy"
        )
    if code == "UnsupportedAlgorithm":
        return OriginAccessDenied(f"{place}: the server takes signed requests only ({code}); leave out --anonymous")
    if status in (301, 307):
        return ConfigError(f"bucket {place.bucket} is in another region; give the dataset its region")
    if status == 400 and not code.isalpha():
        # Such an answer has no body that says why.
        return OriginUnavailable(
            f"{place}: the server answers {status} without a reason; most likely the endpoint is no S3 server,"
            " or its region, its port or http:// in place of https:// is wrong"
        )
    return OriginUnavailable(
        f"{place}: the server answers {_said(status, code)}; see its log, or the endpoint may be wrong"
    )


def _said(status: int, code: str) -> str:
    """botocore repeats the status where the answer has no code."""
    return f"{status} {code}" if code not in ("", str(status)) else str(status)
