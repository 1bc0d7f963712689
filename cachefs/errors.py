"""Errors that reach a user or a reader.

Each has one line of text that names the thing and the way out, and the errno of a failed read through the mount. A
daemon sends the name of the class to its clients. A client that does not know the name raises CachefsError.
"""

import errno
from typing import Final

from cachefs.secrets_in_text import remove_secrets


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
