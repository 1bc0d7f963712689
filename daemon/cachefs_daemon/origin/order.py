"""How a whole object can be asked for by a process that knows nothing but this: no configuration and no credentials of
its own, and nothing of retries. See cachefs_daemon.fetch_process.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from cachefs_daemon.origin.base import ObjectRange, OriginSettings
from cachefs_daemon.origin.s3_route import Route


@dataclass(frozen=True, slots=True)
class Keys:
    """Credentials as they are at one moment."""

    access_key: str
    secret_key: str = field(repr=False)
    # Of temporary ones.
    token: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Way:
    """How objects of one bucket are asked for at this moment."""

    route: Route
    # None for requests that are not signed.
    keys: Keys | None
    # Whether objects are to come with their checksums.
    checksums: bool
    # As in `Tls`.
    verify: bool | str
    settings: OriginSettings


@dataclass(frozen=True, slots=True)
class Order:
    """One whole object."""

    way: Way
    # Its key in the bucket.
    key: str
    # Its version.
    etag: str


@runtime_checkable
class OrderingOrigin(Protocol):
    """An origin whose objects another process can ask for."""

    def order(self, wanted: ObjectRange) -> Order | None:
        """How the *wanted* object, a whole one, is asked for now; None where `Origin.read` is to read it. No I/O."""

    def brought(self, wanted: ObjectRange, seconds: float) -> None:
        """It was answered as it should be, after so many *seconds*."""

    def not_brought(self, reason: str, *, throttled: bool) -> None:
        """A request has failed. throttled: as there were too many."""

    def hedged(self, sent: int, won: int) -> None:
        """So many requests were *sent* a second time, and so many of these answered first."""
