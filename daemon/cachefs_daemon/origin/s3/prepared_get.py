"""Prepared GETs: all that a fetch process needs to download one object, without configuration, credentials or retries
of its own. See cachefs_daemon.fetch_process."""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from cachefs_daemon.origin.base import ObjectRange, OriginSettings
from cachefs_daemon.origin.s3.route import S3Route


@dataclass(frozen=True, slots=True)
class FrozenCredentials:
    """Credentials at one moment."""

    access_key: str
    secret_key: str = field(repr=False)
    # Session token of temporary credentials.
    token: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class GetParameters:
    """The parameters of GETs to one bucket at this moment, for another process."""

    route: S3Route
    # None for unsigned requests.
    keys: FrozenCredentials | None
    # Whether to request checksums with objects.
    checksums: bool
    # See `ClientTls`.
    verify: bool | str
    settings: OriginSettings


@dataclass(frozen=True, slots=True)
class PreparedGet:
    """A prepared GET of one whole object."""

    parameters: GetParameters
    # Key in the bucket.
    key: str
    # Version of the object.
    etag: str


@runtime_checkable
class PreparedGetOrigin(Protocol):
    """An origin whose objects another process can download."""

    def prepare_get(self, wanted: ObjectRange) -> PreparedGet | None:
        """Return the prepared GET of the *wanted* whole object; None if `Origin.read` is to read it. Does no I/O."""

    def note_success(self, wanted: ObjectRange, seconds: float) -> None:
        """Record a good response to a prepared GET, after *seconds*."""

    def note_failure(self, reason: str, *, throttled: bool) -> None:
        """Record a failed request. throttled: the server refused it as one too many."""

    def count_hedges(self, sent: int, won: int) -> None:
        """Count hedged requests: *sent* were sent, *won* of them answered first."""
