"""Origins: where datasets live.

A new kind of origin is a class that follows `Origin`, in a module of its own; a function here that opens one; and that
function's entry in _KINDS, by the scheme of its URLs. Where the kind has settings of its own, they are fields of
cachefs.messages.OriginOptions and options of `cachectl dataset add`.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from cachefs.errors import ConfigError, NotFound
from cachefs.messages import OriginOptions
from cachefs.secrets_in_text import has_secrets
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.key_ranges import ListingPlace
from cachefs_daemon.origin.patience import Patience

# Bytes of an object. Nobody changes them any more.
Data = bytes | bytearray | memoryview
Report = Callable[[bytes, str], None]  # told of (key, reason) for what cannot be listed


# What is said where an answer has the version that was listed, and other bytes: to list the origin again does not help.
ALTERED: Final = "a proxy may unpack or change what it passes on: name the endpoint of the store itself"


def no_directory(url: str) -> NotFound:
    """The error for a URL that names one object."""
    return NotFound(
        f"{url} is an object, and a dataset is a directory of objects; name the one it is in: {url.rpartition('/')[0]}"
    )


def no_proof(version: bytes) -> str:
    """Why the ETag of an object cannot tell whether its bytes have changed; empty where it can."""
    if not version:
        return "is listed without an ETag, so a change of it could not be noticed"
    return "is listed with a weak ETag, which may stand for other bytes too" if version.startswith(b"W/") else ""


def is_weak_form(etag: str, version: bytes) -> bool:
    """Whether an ETag is that of the *version*, weakened (W/"...") by a server or proxy that has changed the bytes."""
    return etag.startswith("W/") and etag.removeprefix("W/").strip('"').encode() == version


@dataclass(frozen=True, slots=True)
class OriginSettings:
    """Limits of one origin."""

    # Requests that are under way at once, at most.
    max_connections: int = 64
    # Seconds that connecting may take, per attempt.
    connect_timeout: float = 5
    # Seconds that may pass without a byte, per attempt.
    read_timeout: float = 20
    # Bytes of a block: larger files are read in parts.
    block_size: int = 4 << 20
    # Directories of which one must have a file:// dataset in it; empty: any.
    file_roots: tuple[str, ...] = ()
    # Whether links in a file:// dataset are followed where they lead out of it.
    follow_symlinks: bool = False
    # Requests that may be sent a second time since they are late, as a share of all.
    hedge_share: float = 0.02
    # Bytes of one request for several neighbouring blocks, at most; 0: there are none.
    max_request: int = 16 << 20
    # Bytes of an index, packed and unpacked, and of one listing of gs://, az:// and hf://.
    max_listing: int = 16 << 30
    # Pages of one listing.
    max_pages: int = 100_000
    # Directory in which an index is kept while it is read; empty: the system's for temporary files.
    scratch: str = ""


def too_many_pages(where: str, most: int) -> ConfigError:
    """What is said of a listing that has more pages than it may have. where: what is listed, for people."""
    return ConfigError(
        f"{where}: the listing has more than {most} pages, or no end; if it is right, raise origin.max_pages"
    )


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """Bytes [offset, offset + length) of one version of one object."""

    # Key of the object, relative to the origin's URL.
    key: bytes
    # Version of the object as it was listed.
    version: bytes
    # Bytes of the whole object, as it was listed.
    size: int
    offset: int
    length: int


class Origin(Protocol):
    """The origin of one dataset."""

    @property
    def url(self) -> str:
        """As the dataset was added, without a slash at the end."""

    @property
    def requests(self) -> int:
        """Sent so far, every attempt counted."""

    @property
    def errors(self) -> int:
        """Attempts that failed so far."""

    @property
    def detours(self) -> int:
        """Reads so far that took a slower way than they usually do."""

    @property
    def endpoint(self) -> Endpoint:
        """Its server, which it may share with other origins. What asks nobody over a network has one of its own."""

    def identity(self, key: bytes) -> bytes:
        """The name of the object *key*, which is unique among the objects of all origins."""

    def list(self, report: Report) -> AsyncIterator[list[ListedObject]]:
        """Everything there is, in batches and in any order.

        report: called with (key, reason) for what is there but cannot be listed.
        Raises NotFound, OriginAccessDenied, OriginUnavailable, ConfigError.
        """

    async def read(self, wanted: ObjectRange, patience: Patience) -> Data:
        """The *wanted* bytes of the object as it was listed, and never any others.

        Where the origin may come back, it is asked again as long as the *patience* lasts. Raises ObjectChanged,
        OriginAccessDenied, OriginUnavailable, ConfigError.
        """

    async def close(self) -> None:
        """Close connections and end threads."""


@runtime_checkable
class ResumableOrigin(Protocol):
    """An origin that can go on with a listing that was interrupted."""

    def list_from(self, report: Report, place: ListingPlace) -> AsyncIterator[list[ListedObject]]:
        """As Origin.list, beginning at *place*, which always tells what is left after the last batch."""


@runtime_checkable
class RangeOrigin(Protocol):
    """An origin that can bring neighbouring parts of an object with one request."""

    @property
    def reads_ranges(self) -> bool:
        """Whether it can do so now."""

    async def read_parts(
        self, wanted: ObjectRange, lengths: Sequence[int], arrived: Callable[[int, Data], None]
    ) -> None:
        """Read the *wanted* bytes, and call *arrived* with the number and the bytes of each part as it comes.

        lengths: of the parts, which are the wanted bytes together. A part may come twice. There is one attempt only;
        what has come before it fails is right. Raises as `Origin.read` does.
        """


@runtime_checkable
class PreparedOrigin(Protocol):
    """An origin whose first read takes longer than others."""

    async def prepare(self) -> None:
        """Open what the first read would wait for. Raises what a read raises, and what it would try again after."""


def _file(url: str, options: OriginOptions, settings: OriginSettings) -> Origin:
    from cachefs_daemon.origin.file import FileOrigin

    return FileOrigin(url, options, settings)


def _s3(url: str, options: OriginOptions, settings: OriginSettings) -> Origin:
    from cachefs_daemon.origin.s3 import S3Origin  # aiobotocore takes 0.5 s to import

    return S3Origin(url, options, settings)


def _gs(url: str, options: OriginOptions, settings: OriginSettings) -> Origin:
    from cachefs_daemon.origin.gs import GoogleStore
    from cachefs_daemon.origin.web import WebOrigin

    return WebOrigin(GoogleStore(url, options), settings)


def _az(url: str, options: OriginOptions, settings: OriginSettings) -> Origin:
    from cachefs_daemon.origin.az import AzureStore
    from cachefs_daemon.origin.web import WebOrigin

    return WebOrigin(AzureStore(url, options), settings)


def _http(url: str, options: OriginOptions, settings: OriginSettings) -> Origin:
    from cachefs_daemon.origin.http_index import IndexedStore
    from cachefs_daemon.origin.web import WebOrigin

    return WebOrigin(IndexedStore(url, settings), settings)


def _hf(url: str, options: OriginOptions, settings: OriginSettings) -> Origin:
    from cachefs_daemon.origin.hf import HubStore
    from cachefs_daemon.origin.web import WebOrigin

    return WebOrigin(HubStore(url, options), settings)


_KINDS = {"file": _file, "s3": _s3, "gs": _gs, "az": _az, "http": _http, "https": _http, "hf": _hf}


def open_origin(url: str, options: OriginOptions, settings: OriginSettings) -> Origin:
    """The origin that *url* names. It connects to nothing yet. Raises ConfigError."""
    if has_secrets(url):
        raise ConfigError(
            "the URL must have no user, password or signature in it, since everybody on this node can see it; set "
            "credentials for the daemon (docs/user-guide.md, Origins)"
        )
    kind = _KINDS.get(url.partition("://")[0])
    if kind is None:
        *known, last = (f"{scheme}://" for scheme in _KINDS)
        raise ConfigError(
            f"URL {url!r} does not start with {', '.join(known)} or {last}, as in s3://bucket/prefix or file:///directory"
        )
    return kind(url, options, settings)
