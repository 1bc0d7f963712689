"""The interface of origins."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from cachefs.errors import ConfigError, NotFound
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.key_ranges import ListingCheckpoint

# Bytes of an object. They are not changed any more.
Data = bytes | bytearray | memoryview
ReportProblem = Callable[[bytes, str], None]  # called with (key, reason) for an object that cannot be listed


# The hint where a response has the listed version but other bytes: refreshing the listing does not help.
ALTERED_HINT: Final = "a proxy may unpack or change the response: use the endpoint of the store itself"


def not_a_directory_error(url: str) -> NotFound:
    """Return the error for a URL that names an object instead of a directory."""
    return NotFound(
        f"{url} is an object, and a dataset is a directory of objects; name the one it is in: {url.rpartition('/')[0]}"
    )


def missing_proof(version: bytes) -> str:
    """Return why the ETag of an object cannot prove that its bytes are unchanged, or ""."""
    if not version:
        return "is listed without an ETag, so a change of it could not be noticed"
    return "is listed with a weak ETag, which may stand for other bytes too" if version.startswith(b"W/") else ""


def is_weak_form(etag: str, version: bytes) -> bool:
    """Return whether an ETag is *version* in weak form (W/"..."), as sent by a server that changed the bytes."""
    return etag.startswith("W/") and etag.removeprefix("W/").strip('"').encode() == version


@dataclass(frozen=True, slots=True)
class OriginSettings:
    """Limits of one origin."""

    # Most concurrent requests.
    max_connections: int = 64
    # Timeout of connecting in seconds, per attempt.
    connect_timeout: float = 5
    # Most seconds without a byte, per attempt.
    read_timeout: float = 20
    # Bytes of a block: larger files are read in parts.
    block_size: int = 4 << 20
    # Directories, one of which must contain a file:// dataset; empty: any directory will do.
    file_roots: tuple[str, ...] = ()
    # Whether symbolic links in a file:// dataset are followed out of it.
    follow_symlinks: bool = False
    # Most hedged requests, as a share of all.
    hedge_share: float = 0.02
    # Most bytes of one request for several neighbouring blocks; 0: one block per request.
    max_request: int = 16 << 20
    # Most bytes of an index, packed and unpacked, and of one listing of gs://, az:// and hf://.
    max_listing: int = 16 << 30
    # Most pages of one listing.
    max_pages: int = 100_000
    # Directory that holds an index while it is read; empty: the system's for temporary files.
    scratch: str = ""


def too_many_pages_error(where: str, most: int) -> ConfigError:
    """Return the error for a listing with too many pages. where: name of the listing, for people."""
    return ConfigError(
        f"{where}: the listing has more than {most} pages, or no end; if it is right, raise origin.max_pages"
    )


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """The bytes [offset, offset + length) of one version of one object."""

    # Key of the object, relative to the origin's URL.
    key: bytes
    # Version of the object in the listing.
    version: bytes
    # Size of the whole object in the listing, in bytes.
    size: int
    offset: int
    length: int


class Origin(Protocol):
    """The origin of one dataset."""

    @property
    def url(self) -> str:
        """URL of the dataset, without a slash at the end."""

    @property
    def requests(self) -> int:
        """Number of requests sent so far, retries included."""

    @property
    def errors(self) -> int:
        """Number of attempts that failed so far."""

    @property
    def fallback_reads(self) -> int:
        """Number of reads so far that took a slower path than usual."""

    @property
    def endpoint(self) -> Endpoint:
        """The origin's server, which other origins may share. An origin without a network has its own endpoint."""

    def identity(self, key: bytes) -> bytes:
        """Return the name of the object *key*, unique among the objects of all origins."""

    def list(self, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        """Yield all objects, in batches and in any order.

        report: called with (key, reason) for each object that cannot be listed. Raises NotFound, OriginAccessDenied,
        OriginUnavailable, ConfigError.
        """

    async def read(self, wanted: ObjectRange, deadline: Deadline) -> Data:
        """Return the *wanted* bytes of the object as it was listed, and never other bytes.

        Transient failures are retried until *deadline* ends. Raises ObjectChanged, OriginAccessDenied,
        OriginUnavailable, ConfigError.
        """

    async def close(self) -> None:
        """Close connections and end threads."""


@runtime_checkable
class ResumableOrigin(Protocol):
    """An origin that can resume an interrupted listing."""

    def list_from(self, report: ReportProblem, checkpoint: ListingCheckpoint) -> AsyncIterator[list[ListedObject]]:
        """List as Origin.list does, beginning at *checkpoint*, which is kept up to date after each batch."""


@runtime_checkable
class RangeOrigin(Protocol):
    """An origin that can read neighbouring parts of an object with one request."""

    @property
    def can_read_ranges(self) -> bool:
        """Whether the origin can do so now."""

    async def read_parts(
        self, wanted: ObjectRange, lengths: Sequence[int], on_part: Callable[[int, Data], None]
    ) -> None:
        """Read the *wanted* bytes, and call *on_part* with the number and the bytes of each part as it arrives.

        lengths: of the parts, which together are the wanted bytes. A part may arrive twice. There is one attempt only;
        parts that arrive before it fails are right. Raises as `Origin.read` does.
        """


@runtime_checkable
class PreconnectingOrigin(Protocol):
    """An origin whose first read takes longer than others."""

    async def preconnect(self) -> None:
        """Open what the first read would wait for. Raises what a read raises, and transient errors, without a retry."""
