"""Errors that reach a user or a reader.

Each carries one line that names the thing and the way out, and the errno a read through the mount answers with.
"""

import errno


class CachefsError(Exception):
    """Base of every error cachefs raises on purpose; `str(error)` is one line fit for a terminal."""

    errno = errno.EIO


class ConfigError(CachefsError):
    """A setting is unknown, malformed or contradicts another."""

    errno = errno.EINVAL


class NotFound(CachefsError):
    """No such dataset, snapshot, path or mount."""

    errno = errno.ENOENT


class AlreadyExists(CachefsError):
    """The name is taken by something else."""

    errno = errno.EEXIST


class Busy(CachefsError):
    """Another process or operation holds the thing."""

    errno = errno.EBUSY


class AccessDenied(CachefsError):
    """Who asks has no right to: a user to the daemon's socket, or a peer to what it wants."""

    errno = errno.EACCES


class DaemonUnavailable(CachefsError):
    """No daemon answers on the socket within the deadline."""


class SnapshotDamaged(CachefsError):
    """A record of a snapshot file does not match its checksum."""


class StoreFull(CachefsError):
    """No tier has room for a block, and nothing may be evicted for it."""

    errno = errno.ENOSPC


class OriginError(CachefsError):
    """The origin did not deliver what the snapshot promises."""


class OriginUnavailable(OriginError):
    """Unreachable, throttled or broken until the deadline; trying again later may help."""


class ObjectChanged(OriginError):
    """The object is no longer the one the snapshot lists (changed, replaced or deleted)."""

    errno = errno.ESTALE


class OriginAccessDenied(OriginError):
    """The origin refuses our credentials or permissions."""

    errno = errno.EACCES
