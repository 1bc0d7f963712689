"""Origins: where datasets live. A new kind of origin is one class that follows `Origin`, and a line in _KINDS."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from cachefs.errors import ConfigError
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject

Report = Callable[[bytes, str], None]


@dataclass(frozen=True, slots=True)
class OriginSettings:
    """Limits of one origin. Timeouts are in seconds, per attempt; attempts: tries per request, the first included."""

    max_connections: int = 64
    connect_timeout: float = 5
    read_timeout: float = 20
    attempts: int = 8


class Origin(Protocol):
    """One dataset's origin.

    url: as the dataset was added, without a slash at the end; requests, errors: sent so far and failed so far, every
    attempt counted.
    """

    url: str
    requests: int
    errors: int

    def identity(self, key: bytes) -> bytes:
        """Name of the object *key* that is unique among all origins."""

    def list(self, report: Report) -> AsyncIterator[list[ListedObject]]:
        """Everything there is, in batches and in any order.

        report: called with (key, reason) for what is there but cannot be listed.
        Raises NotFound, OriginAccessDenied, OriginUnavailable, ConfigError.
        """

    async def read(
        self, key: bytes, version: bytes, size: int, offset: int, length: int, deadline: float
    ) -> bytes | bytearray:
        """Bytes [offset, offset + length) of *key* as it was listed with *version* and *size*; never any others.

        deadline: seconds from now. Raises ObjectChanged, OriginAccessDenied, OriginUnavailable.
        """

    async def close(self) -> None:
        """Give up connections and threads."""


def _file(url: str, options: OriginOptions, settings: OriginSettings) -> Origin:
    from cachefs_daemon.origin.file import FileOrigin

    return FileOrigin(url, settings)


def _s3(url: str, options: OriginOptions, settings: OriginSettings) -> Origin:
    from cachefs_daemon.origin.s3 import S3Origin  # aiobotocore takes 0.5 s to import

    return S3Origin(url, options, settings)


_KINDS = {"file": _file, "s3": _s3}


def open_origin(url: str, options: OriginOptions, settings: OriginSettings) -> Origin:
    """The origin *url* names; connects to nothing yet. Raises ConfigError."""
    kind = _KINDS.get(url.partition("://")[0])
    if kind is None:
        known = " or ".join(f"{scheme}://" for scheme in _KINDS)
        raise ConfigError(f"URL {url!r} does not start with {known}, as in s3://bucket/prefix or file:///directory")
    return kind(url, options, settings)
