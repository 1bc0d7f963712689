"""The error codes of Azure Blob Storage, for GETs of blobs and for listings."""

from typing import Final

from cachefs.errors import ConfigError, NotFound, OriginAccessDenied
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
    OriginAccessDenied, "{where} is refused", "check the daemon's Azure credentials ({kind}) and their rights"
)
_ROLE: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where} is refused",
    "give the daemon's identity ({kind}) the role Storage Blob Data Reader, or the signature the rights r and l",
)
_NETWORK: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where}: the account's firewall, or the signature's address range, does not let this node in",
    "add the node's network to it",
)
_PUBLIC: Final = ErrorMeaning(
    OriginAccessDenied, "{where}: the account allows no public access", "add the dataset without --anonymous"
)
_ACCOUNT: Final = ErrorMeaning(
    OriginAccessDenied, "{where}: the account or the container is disabled", "ask the owner of the account"
)
_ARCHIVED: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where} is archived, so it cannot be read",
    "restore it (az storage blob set-tier --tier Hot), and read it again when that is done, which can take hours",
)
_KEY: Final = ErrorMeaning(
    OriginAccessDenied,
    "{where} is encrypted with a key that Azure does not have, or may not use",
    "mend the account's key in Key Vault, or store such blobs without a key of your own",
)
_TLS: Final = ErrorMeaning(
    ConfigError, "{where}: the account takes requests with TLS only", "name an https:// endpoint"
)
_NO_CONTAINER: Final = ErrorMeaning(
    NotFound,
    "there is no container {container} at {endpoint}, or the daemon may not see it",
    "check the URL, the account and the credentials",
)
_BAD_NAME: Final = ErrorMeaning(ConfigError, "{where}: Azure allows no such container or blob name", "check the URL")

_CODES: Final[ErrorMeanings] = {
    "BlobNotFound": GONE,
    "ResourceNotFound": GONE,
    "ConditionNotMet": CHANGED,
    "TargetConditionNotMet": CHANGED,
    "BlobOverwritten": CHANGED,
    "InvalidRange": SHORTER,
    "BlobArchived": _ARCHIVED,
    "BlobBeingRehydrated": _ARCHIVED,
    "ContainerNotFound": _NO_CONTAINER,
    "ContainerBeingDeleted": _NO_CONTAINER,
    "InvalidResourceName": _BAD_NAME,
    "InvalidUri": _BAD_NAME,
    "OutOfRangeInput": _BAD_NAME,
    "AuthenticationFailed": _REFUSED,
    "InvalidAuthenticationInfo": _REFUSED,
    "NoAuthenticationInformation": _REFUSED,
    "AuthorizationFailure": _NETWORK,
    "AuthorizationSourceIPMismatch": _NETWORK,
    "AuthorizationProtocolMismatch": _TLS,
    "AccountRequiresHttps": _TLS,
    "AuthorizationPermissionMismatch": _ROLE,
    "AuthorizationServiceMismatch": _ROLE,
    "AuthorizationResourceTypeMismatch": _ROLE,
    "InsufficientAccountPermissions": _ROLE,
    "KeyBasedAuthenticationNotPermitted": _ROLE,
    "PublicAccessNotPermitted": _PUBLIC,
    "AccountIsDisabled": _ACCOUNT,
    "ContainerDisabled": _ACCOUNT,
    401: _REFUSED,
    403: _REFUSED,
    # Keys of encrypted blobs.
    "BlobUsesCustomerSpecifiedEncryption": _KEY,
    "KeyVaultEncryptionKeyNotFound": _KEY,
    "KeyVaultAccessTokenCannotBeAcquired": _KEY,
    "KeyVaultVaultNotFound": _KEY,
    # Overload.
    "ServerBusy": THROTTLED,
    "OperationTimedOut": BUSY,
    "InternalError": BUSY,
    "AccountBeingCreated": BUSY,
}
_LISTING: Final[ErrorMeanings] = {"ResourceNotFound": _NO_CONTAINER}

AZURE: Final = ErrorTable(_CODES, _LISTING)
