"""The meaning of a failed S3 request, as an error of cachefs that says what to do (see refusals.py, codes.py)."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final

import aiohttp
from botocore import exceptions as boto
from botocore.compat import HTTPHeaders
from botocore.parsers import ResponseParserError, RestXMLParser

from cachefs.errors import CachefsError, ConfigError, OriginAccessDenied, OriginUnavailable
from cachefs_daemon.origin.refusals import ErrorMeaning, Refusal
from cachefs_daemon.origin.request_counters import RequestOutcome
from cachefs_daemon.origin.retry import Failure
from cachefs_daemon.origin.s3.codes import OTHER_REGION, S3
from cachefs_daemon.origin.s3.response import BrokenS3Response, S3Target

_PAYER: Final = ", or add --requester-pays if the bucket's readers pay"

# Meanings of exceptions that are no response of the server: the first row with a matching type applies.
_EXCEPTION_MEANINGS: Final[tuple[tuple[tuple[type[Exception], ...], ErrorMeaning], ...]] = (
    (
        (
            boto.NoCredentialsError,
            boto.PartialCredentialsError,
            boto.TokenRetrievalError,
            boto.NoAuthTokenError,
            boto.SSOError,
        ),
        ErrorMeaning(
            OriginAccessDenied,
            "no usable credentials for {where}: {error}",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for the daemon and restart it, write ~/.aws/credentials "
            "of its user, or add the dataset with --anonymous",
        ),
    ),
    (
        (boto.CredentialRetrievalError,),
        ErrorMeaning(OriginAccessDenied, "the credentials for {where} cannot be renewed: {error}", is_transient=True),
    ),
    ((boto.ParamValidationError,), ErrorMeaning(ConfigError, "{where}: S3 allows no such bucket name or key")),
    (
        (boto.EndpointConnectionError, boto.ConnectTimeoutError),
        ErrorMeaning(
            OriginUnavailable,
            "no server answers at {endpoint} (for s3://{bucket}/{key})",
            "check the endpoint and the network",
            is_transient=True,
        ),
    ),
    (
        (boto.SSLError, aiohttp.ClientSSLError, ssl.SSLError),
        ErrorMeaning(OriginUnavailable, "{where}: {tls}", is_transient=True),
    ),
    (
        (boto.ProfileNotFound, boto.ConfigParseError, boto.InvalidRegionError, boto.EndpointProviderError),
        ErrorMeaning(ConfigError, "{where} cannot be requested: {error}"),
    ),
    (
        (ResponseParserError, boto.BotoCoreError, BrokenS3Response, aiohttp.ClientError, OSError),
        ErrorMeaning(OriginUnavailable, "{where} is unreachable or broken: {error}", is_transient=True),
    ),
)


def outcome_of(error: BaseException) -> RequestOutcome:
    """Return the outcome for the exception that ended a request of botocore's client."""
    match error:
        case asyncio.CancelledError():
            return RequestOutcome.CANCELLED
        case boto.ClientError():
            return RequestOutcome.REFUSED
        case (
            boto.EndpointConnectionError() | boto.ConnectTimeoutError() | boto.SSLError() | boto.ProxyConnectionError()
        ):
            return RequestOutcome.UNREACHABLE
        case boto.ConnectionClosedError():
            return RequestOutcome.UNANSWERED
    return RequestOutcome.BROKEN


def client_error_of(status: int, headers: Mapping[bytes, bytes], body: bytes) -> boto.ClientError:
    """Return the exception that botocore's client raises for this response to a GET of an object."""
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.items()]
    parsed = RestXMLParser().parse(
        {"status_code": status, "headers": HTTPHeaders.from_pairs(pairs), "body": body}, None
    )
    return boto.ClientError(parsed, "GetObject")


def is_redirect(error: boto.ClientError) -> bool:
    """Return whether botocore's client may know the right region now, or learn it from this response."""
    return S3.find_meaning(_refusal_of(error), is_listing=False) is OTHER_REGION


def are_credentials_refused(error: Exception) -> bool:
    """Return whether other credentials, such as renewed ones, may help."""
    if isinstance(error, boto.ClientError):
        return S3.find_meaning(_refusal_of(error), is_listing=False).may_renew
    return isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError)


def judge_error(error: Exception, target: S3Target) -> Failure:
    """Return the failure that *error* means. Raises *error* itself if network and server are not its cause."""
    if isinstance(error, CachefsError):
        return Failure(error, False)
    words = {
        "where": str(target), "bucket": target.bucket, "key": target.key, "endpoint": target.endpoint,
        "payer": "" if target.requester_pays else _PAYER,
    }  # fmt: skip
    if isinstance(error, boto.ClientError):
        return S3.judge(_refusal_of(error), words, is_listing=not target.key)
    for kinds, meaning in _EXCEPTION_MEANINGS:
        if isinstance(error, kinds):
            return meaning.make_failure({**words, "error": _line(error), "tls": _tls_problem(error)})
    raise error


def _refusal_of(error: boto.ClientError) -> Refusal:
    facts, details = error.response.get("ResponseMetadata", {}), error.response.get("Error", {})
    return Refusal.from_response(
        facts.get("HTTPStatusCode", 0),
        str(details.get("Code", "")),
        str(details.get("Message", "")),
        facts.get("HTTPHeaders", {}).get("retry-after"),
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _tls_problem(error: Exception) -> str:
    reason = _tls_reason(error)
    if reason == "WRONG_VERSION_NUMBER":  # OpenSSL's name for a response that is not TLS
        return "the server does not use TLS at this port; write http:// in the endpoint, or give the port for https://"
    return (
        f"the server's certificate is not trusted, or TLS fails ({reason}); for a private authority set AWS_CA_BUNDLE "
        "for the daemon to the file of its certificates"
    )


def _tls_reason(error: Exception) -> str:
    """Return OpenSSL's words, without the URL that botocore repeats."""
    cause = error.kwargs.get("error", error) if isinstance(error, boto.SSLError) else error
    for found in (cause, *cause.args, getattr(cause, "__cause__", None), getattr(cause, "os_error", None)):
        if reason := getattr(found, "verify_message", "") or getattr(found, "reason", ""):
            return str(reason)
    return type(cause).__name__
