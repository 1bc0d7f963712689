"""The error codes of Google Cloud Storage: reasons of its JSON API, and codes of its XML API, which emulators and
proxies also send."""

from typing import Final

from cachefs.errors import NotFound, OriginAccessDenied
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
