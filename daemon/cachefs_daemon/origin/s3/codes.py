"""The error codes of S3, for GETs of objects and for listings: of AWS, of Ceph and MinIO, and of Google's XML API."""

from typing import Final

from cachefs.errors import ConfigError, NotFound, OriginAccessDenied, OriginUnavailable
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
