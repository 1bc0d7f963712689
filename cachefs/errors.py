"""Errors that reach a user or a reader.

Each has one line of text that names the thing and the way out, and the errno of a failed read through the mount. A
daemon sends the name of the class to its clients. A client that does not know the name raises CachefsError.

A URL may contain a user and a password, and the query of a signed URL authenticates the sender. Servers, proxies and
libraries repeat such URLs in their messages. Every CachefsError therefore passes its text through `remove_secrets`, and
so does the daemon's log. A secret outside of a URL and without a name beside it cannot be recognised.
"""

import errno
import re
from typing import Final
from urllib.parse import urlsplit, urlunsplit

REMOVED: Final = "[removed]"
_URL_USER: Final = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#'\"<>]*@")
# Parameters of signed URLs (AWS, Google, Azure, CDNs), and usual names of secret parameters.
_SECRET_NAME: Final = (
    r"(?:x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|googleaccessid|key-pair-id|policy"
    r"|signature|sig|[\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key)|pwd|auth)"
)
_SECRET_PARAMETER: Final = re.compile(rf"(?P<name>[?&;]{_SECRET_NAME}=)[^\s&#'\"<>;,)\]]+", re.IGNORECASE)


def remove_secrets(text: str) -> str:
    """Return the text without users and passwords in URLs, and without the values of secret parameters."""
    if "@" in text:
        text = _URL_USER.sub(r"\g<scheme>", text)
    return _SECRET_PARAMETER.sub(rf"\g<name>{REMOVED}", text) if "=" in text else text


def has_secrets(url: str) -> bool:
    """Return whether a URL has a user, or a parameter that authenticates the sender."""
    return remove_secrets(url) != url


def public_url(url: str) -> str:
    """Return a URL without the parts that may be secret: user, password, query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class CachefsError(Exception):
    """Base of every error that cachefs raises on purpose.

    `str(error)` is one line fit for a terminal, without credentials of URLs: logs, `cachectl`, the web page and jobs
    repeat it.
    """

    errno = errno.EIO

    def __init__(self, *texts: str) -> None:
        super().__init__(*map(remove_secrets, texts))


class ConfigError(CachefsError):
    """A setting is unknown or malformed, or contradicts another one."""

    errno = errno.EINVAL


class NotFound(CachefsError):
    """No such dataset, snapshot, path or mount."""

    errno = errno.ENOENT


class AlreadyExists(CachefsError):
    """The name belongs to something else already."""

    errno = errno.EEXIST


class Busy(CachefsError):
    """Another process or operation uses the resource."""

    errno = errno.EBUSY


class AccessDenied(CachefsError):
    """A user may not use the daemon's socket, or a client may not make the request."""

    errno = errno.EACCES


class Unidentified(AccessDenied):
    """The daemon does not know the caller; see cachefs.identity."""


class DaemonUnavailable(CachefsError):
    """No daemon answers on the socket within the deadline."""


class SnapshotDamaged(CachefsError):
    """A record of a snapshot file does not match its checksum."""


class StoreFull(CachefsError):
    """No tier has room for a block, and no other block may be evicted for it."""

    errno = errno.ENOSPC


class OriginError(CachefsError):
    """The origin did not deliver what the snapshot promises."""


class OriginUnavailable(OriginError):
    """The origin was unreachable, throttled or broken until the deadline; a later attempt may succeed."""


# Advice where an object differs from the listed one, and where its dataset was refreshed after the listing.
REFRESH_HINT: Final = "refresh the dataset"
REMOUNT_HINT: Final = (
    "the dataset was refreshed since, so mount it again (on a mount that follows refreshes, open the file again)"
)


class ObjectChanged(OriginError):
    """The object differs from the one that the snapshot lists: it was changed, replaced or deleted."""

    errno = errno.ESTALE

    def for_older_snapshot(self) -> "ObjectChanged":
        """Return the error for a mount of an older snapshot, whose reader another refresh would not help."""
        return ObjectChanged(str(self).replace(REFRESH_HINT, REMOUNT_HINT))


class OriginAccessDenied(OriginError):
    """The origin refuses the daemon's credentials, or the daemon lacks a permission there."""

    errno = errno.EACCES
