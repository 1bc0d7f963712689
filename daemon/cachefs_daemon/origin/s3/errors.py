"""The meaning of a failed S3 request, as an error of cachefs that says what to do (see refusals.py, codes.py)."""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final

import aiohttp
from botocore import exceptions as boto
from botocore.compat import HTTPHeaders
from botocore.parsers import ResponseParserError, RestXMLParser

from cachefs.errors import CachefsError, ConfigError, NotFound, OriginAccessDenied, OriginUnavailable
from cachefs_daemon.origin.refusals import (
    BUSY,
    CHANGED,
    GONE,
    SHORTER,
    THROTTLED,
    ErrorMeaning,
    ErrorMeanings,
    ErrorTable,
    Refusal,
)
from cachefs_daemon.origin.request_counters import RequestOutcome
from cachefs_daemon.origin.retry import Failure
from cachefs_daemon.origin.s3.response import BrokenS3Response, S3Target

_RIGHTS: Final = "check the daemon's AWS credentials and the bucket's policy"
_REFUSED: Final = ErrorMeaning(OriginAccessDenied, "{where} is refused", _RIGHTS + "{payer}")
# Sent for wrong credentials, but also for those that were replaced a moment ago.
_WRONG_KEYS: Final = ErrorMeaning(OriginAccessDenied, "{where} is refused", _RIGHTS, may_renew=True)
# The program that renews credentials may be a moment late. They are read again before each attempt.
_EXPIRED: Final = ErrorMeaning(
    OriginAccessDenied, "{where}: the credentials have expired", "renew them for the daemon", True, may_renew=True
)
# A clock that is off is corrected within seconds, for instance after a virtual machine has slept.
_SKEWED: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where}: the server's clock and this node's differ too much",
    "set this node's clock (chronyc makestep)",
    is_transient=True,
)
_ACCOUNT: Final = ErrorMeaning(
    OriginAccessDenied, "{where}: the server has closed the account or the bucket", "ask the owner of the account"
)
_ARCHIVED: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where} is archived, so it cannot be read",
    "restore it (aws s3api restore-object), and read it again when that is done",
)
_KEY: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where}: the server may not use the key that the object is encrypted with",
    "give the daemon's credentials the right kms:Decrypt, or mend that key",
)
_BAD_REQUEST: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where}: the server does not take the request",
    "objects that are encrypted with a key of yours (SSE-C) cannot be read; store them with SSE-S3 or SSE-KMS",
)
_NO_BUCKET: Final = ErrorMeaning(
    NotFound, "there is no bucket {bucket} at {endpoint}", "check the URL and the endpoint"
)
_NO_ACCESS_POINT: Final = ErrorMeaning(
    NotFound, "there is no access point {bucket} at {endpoint}", "check the ARN, the account and the region"
)
_BAD_NAME: Final = ErrorMeaning(ConfigError, "{where}: S3 allows no such bucket name or key", "check the URL")
# botocore's client may know the right region by now, or learn it from the response.
OTHER_REGION: Final = ErrorMeaning(
    ConfigError, "bucket {bucket} is in another region", "give the dataset its region (--region)"
)
_UNSIGNED: Final = ErrorMeaning(
    OriginAccessDenied, "{where}: the server takes signed requests only", "leave out --anonymous"
)
_SIGNATURE: Final = ErrorMeaning(
    ConfigError, "{where}: the server does not take signatures of version 4", "check the endpoint and its region"
)
_NO_S3: Final = ErrorMeaning(
    OriginUnavailable,
    "{where}: the server does not understand the request",
    "if the server gives no reason, the endpoint is not an S3 server, or the region, the port or the scheme (http:// "
    "or https://) is wrong",
)
_UNABLE: Final = ErrorMeaning(
    OriginUnavailable, "{where}: the server does not know such requests", "check the endpoint, or use another server"
)

_CODES: Final[ErrorMeanings] = {
    # Objects.
    "NoSuchKey": GONE,
    "NoSuchVersion": GONE,
    "PreconditionFailed": CHANGED,
    "InvalidRange": SHORTER,
    "InvalidObjectState": _ARCHIVED,
    "ObjectNotInActiveTierError": _ARCHIVED,
    # Keys of encrypted objects.
    "KMS.DisabledException": _KEY,
    "KMS.InvalidKeyUsageException": _KEY,
    "KMS.InvalidStateException": _KEY,
    "KMS.KMSInvalidStateException": _KEY,
    "KMS.NotFoundException": _KEY,
    "KMS.AccessDeniedException": _KEY,
    "InvalidRequest": _BAD_REQUEST,
    "ServerSideEncryptionConfigurationNotFoundError": _KEY,
    # Buckets.
    "NoSuchBucket": _NO_BUCKET,
    "NoSuchAccessPoint": _NO_ACCESS_POINT,
    "NoSuchAccessPointPolicy": _NO_ACCESS_POINT,
    "InvalidAccessPointAliasError": _NO_ACCESS_POINT,
    "InvalidAccessPoint": _NO_ACCESS_POINT,
    "InvalidBucketName": _BAD_NAME,
    "InvalidURI": _BAD_NAME,
    "KeyTooLongError": _BAD_NAME,
    "XMinioInvalidObjectName": _BAD_NAME,
    "PermanentRedirect": OTHER_REGION,
    "TemporaryRedirect": OTHER_REGION,
    "Redirect": OTHER_REGION,
    "AuthorizationHeaderMalformed": OTHER_REGION,
    "IllegalLocationConstraintException": OTHER_REGION,
    "IncorrectEndpoint": OTHER_REGION,
    301: OTHER_REGION,
    307: OTHER_REGION,
    # Rights.
    "AccessDenied": _REFUSED,
    "AccessDeniedException": _REFUSED,
    "UnauthorizedAccess": _REFUSED,
    "InvalidPayer": _REFUSED,
    "InvalidSecurity": _REFUSED,
    401: _REFUSED,
    403: _REFUSED,
    "AccountProblem": _ACCOUNT,
    "AllAccessDisabled": _ACCOUNT,
    "NotSignedUp": _ACCOUNT,
    "UserSuspended": _ACCOUNT,
    "UserProjectMissing": ErrorMeaning(
        OriginAccessDenied, "{where} is in a bucket whose requester pays", "read it with gs:// and --user-project"
    ),
    # Credentials.
    "InvalidAccessKeyId": _WRONG_KEYS,
    "SignatureDoesNotMatch": _WRONG_KEYS,
    "InvalidToken": _WRONG_KEYS,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestTimeTooSkewed": _SKEWED,
    "RequestExpired": _SKEWED,
    "AccessTokenRequired": _UNSIGNED,
    "MissingAuthenticationToken": _UNSIGNED,
    "MissingSecurityHeader": _UNSIGNED,
    "UnsupportedAlgorithm": _UNSIGNED,
    "UnsupportedSignature": _SIGNATURE,
    # Overload.
    "SlowDown": THROTTLED,
    "SlowDownRead": THROTTLED,
    "Throttling": THROTTLED,
    "ThrottlingException": THROTTLED,
    "KMS.ThrottlingException": THROTTLED,
    "RequestLimitExceeded": THROTTLED,
    "BandwidthLimitExceeded": THROTTLED,
    "TooManyRequests": THROTTLED,
    "TooManyRequestsException": THROTTLED,
    "RequestTimeout": BUSY,
    "InternalError": BUSY,
    "ServiceUnavailable": BUSY,
    "OperationAborted": BUSY,
    "Busy": BUSY,
    "XMinioServerNotInitialized": BUSY,
    "XMinioReadQuorum": BUSY,
    # Servers that are not S3, or implement only part of it.
    "NotImplemented": _UNABLE,
    "MethodNotAllowed": _UNABLE,
    501: _UNABLE,
    400: _NO_S3,
}
_LISTING: Final[ErrorMeanings] = {"NoSuchKey": _NO_BUCKET, 404: _NO_BUCKET}

S3: Final = ErrorTable(_CODES, _LISTING)
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
