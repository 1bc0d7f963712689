"""Origin `http(s)://host/path/`: files on a web server, listed by an index.

The index is `index.jsonl` or `index.jsonl.gz` below the URL, or the file that the URL names. Each of its lines is a
JSON object with `path` and `size`, and `sha256` or `etag` or both; `mtime` (unix time in seconds) is optional. A file
larger than a block is read in parts, which a checksum of the whole cannot prove, so it needs an ETag.
"""

import codecs
import functools
import re
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO, Final
from urllib.parse import quote, urlsplit

import msgspec

from cachefs.errors import ConfigError, NotFound
from cachefs.messages import OriginOptions
from cachefs.snapshot import content_version
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, OriginSettings, ReportProblem
from cachefs_daemon.origin.refusals import ErrorMeaning, ErrorTable
from cachefs_daemon.origin.web.client import WebRequest, WebResponse, is_plain, listing_too_long_error, percent_encode
from cachefs_daemon.origin.web.origin import Checksum, PageFetcher, WebOrigin, range_header

_INDEX: Final = "index.jsonl"
_INDEXES: Final = (".jsonl", ".jsonl.gz")
_GZIP: Final = b"\x1f\x8b"
# Most bytes of a line.
_LONGEST_LINE: Final = 64 << 10
_CHUNK: Final = 1 << 20
# Times further from 1970 are clipped to this one, in 2255, as their nanoseconds exceed 64 bits.
_MOST_SECONDS: Final = 9e9
_BATCH: Final = 5000
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")


_NO_INDEX: Final = ErrorMeaning(NotFound, "there is no {indexes}", "`cachectl index` makes one")
_ERRORS: Final = ErrorTable(
    {},
    {
        404: _NO_INDEX,
        410: _NO_INDEX,
        400: ErrorMeaning(
            ConfigError,
            "the index {asked} cannot be read: the server does not understand the request",
            "for S3 use s3://bucket/prefix --endpoint-url {server}",
        ),
    },
)


class IndexLine(msgspec.Struct, frozen=True):
    """A line of the index: a file on the server."""

    # Relative to the directory of the index, not percent-encoded.
    path: str
    size: int
    etag: str = ""
    sha256: str = ""
    # Unix time in seconds.
    mtime: float = 0


class IndexedStore:
    """A web server with an index (see cachefs_daemon.origin.web.origin.WebStore)."""

    def __init__(self, url: str, settings: OriginSettings) -> None:
        """Raises ConfigError."""
        if not is_plain(url):
            raise ConfigError(
                "the URL must look like https://host/path/, without a user, a query or a fragment, since every user "
                "of this node can see it"
            )
        self.url = url.rstrip("/")
        parts = urlsplit(url)
        self.server = f"{parts.scheme}://{parts.netloc}"
        sent = percent_encode(self.url)
        named = sent.endswith(_INDEXES)
        self._base = sent.rpartition("/")[0] if named else sent
        self._indexes = [sent] if named else [f"{self._base}/{_INDEX}", f"{self._base}/{_INDEX}.gz"]
        self.identity = f"http:{self._base}/".encode()
        self._settings = settings
        self.errors = _ERRORS
        self.text_values = {"indexes": " or ".join(self._indexes), "server": self.server}

    async def list(self, fetch_page: PageFetcher, report: ReportProblem) -> AsyncIterator[list[ListedObject]]:
        with tempfile.TemporaryFile(dir=self._settings.scratch or None) as index:
            where = await self._fetch_index(fetch_page, index)
            index.seek(0)
            batch: list[ListedObject] = []
            is_empty = True
            for number, text in enumerate(_read_lines(index, where, self._settings.max_listing), 1):
                if not text.strip():
                    continue
                is_empty = False
                try:
                    line = msgspec.json.decode(text, type=IndexLine)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ConfigError(f"line {number} of {where} is not understood: {error}") from None
                if reason := self._unreadable(line):
                    report(line.path.encode(), reason)
                else:
                    batch.append(_listed_object(line))
                if len(batch) == _BATCH:
                    yield batch
                    batch = []
            if is_empty:
                raise NotFound(f"the index {where} names no file; `cachectl index` makes one that does")
            yield batch

    async def make_request(self, wanted: ObjectRange) -> WebRequest:
        etag = _etag(wanted.version)
        if not etag and wanted.length != wanted.size:
            raise ConfigError(f"{self._base}/{wanted.key.decode()} {_TOO_LARGE}")
        match = {"If-Match": f'"{etag}"'} if etag else {}
        return WebRequest(f"{self._base}/{quote(wanted.key.decode(), safe='/~')}", {**match, **range_header(wanted)})

    def is_version(self, wanted: ObjectRange, response: WebResponse) -> bool | None:
        etag, received = _etag(wanted.version), response.headers.get("ETag", "")
        if not etag:
            return True  # its checksum proves the version
        return received == f'"{etag}"' if received else None

    def checksum(self, wanted: ObjectRange, response: WebResponse) -> Checksum | None:
        kind, _, digest = content_version(wanted.version).decode().partition(":")
        if kind != "sha256":
            return None
        return Checksum("sha256", bytes.fromhex(digest), is_only_proof=not _etag(wanted.version))

    def handle_refusal(self, request: WebRequest) -> bool:
        return False

    async def _fetch_index(self, fetch_page: PageFetcher, index: BinaryIO) -> str:
        """Write the index to *index*, and return its URL."""
        for where in self._indexes:
            try:
                await fetch_page(functools.partial(_make_request, where), index)
            except NotFound:
                if where == self._indexes[-1]:
                    raise
            else:
                return where
        raise AssertionError("there is at least one")

    def _unreadable(self, line: IndexLine) -> str | None:
        """Return why a file could not be read; None if it can."""
        if line.size < 0:
            return "has a negative size"
        if line.sha256 and not _SHA256.fullmatch(line.sha256):
            return "has a sha256 that is not 64 hexadecimal digits"
        if line.etag.startswith("W/"):
            return "has a weak ETag, which may stand for other bytes too; give its sha256 instead"
        if not line.etag.isascii() or not line.etag.isprintable():
            return "has an ETag that cannot be sent"
        if '"' in _unquoted(line.etag):
            return "has an ETag with a quotation mark in it"
        if not _unquoted(line.etag) and not line.sha256:
            return "has neither sha256 nor etag in the index, so a change of it could not be noticed"
        if not _unquoted(line.etag) and line.size > self._settings.block_size:
            return _TOO_LARGE
        return None


def open_indexed_origin(url: str, _: OriginOptions, settings: OriginSettings) -> WebOrigin:
    """Return the origin of files of a web server. Raises ConfigError."""
    return WebOrigin(IndexedStore(url, settings), settings)


_TOO_LARGE: Final = (
    "is larger than a block and has no etag in the index, so parts of it cannot be checked; `cachectl index --url` "
    "asks the server for it"
)


async def _make_request(url: str) -> WebRequest:
    return WebRequest(url)


def _listed_object(line: IndexLine) -> ListedObject:
    etag = _unquoted(line.etag)
    version = f"sha256:{line.sha256.lower()}\0{etag}" if line.sha256 else f"etag:{etag}"
    mtime = min(max(line.mtime, -_MOST_SECONDS), _MOST_SECONDS)
    return ListedObject(line.path.encode(), line.size, int(mtime * 1e9), version.encode())


def _unquoted(etag: str) -> str:
    """Strip the quotation marks of an ETag."""
    return etag.removeprefix('"').removesuffix('"')


def _etag(version: bytes) -> str:
    if version.startswith(b"etag:"):
        return version.removeprefix(b"etag:").decode()
    return version.partition(b"\0")[2].decode()


def _read_lines(index: BinaryIO, where: str, most: int) -> Iterator[bytes]:
    """Yield the lines of an index with at most *most* unpacked bytes. Raises ConfigError."""
    incomplete, size = b"", 0
    for chunk in _unpack_chunks(index, where):
        if not size:
            chunk = chunk.removeprefix(codecs.BOM_UTF8)
        size += len(chunk)
        if size > most:
            raise listing_too_long_error(f"{where}, unpacked", most)
        *lines, incomplete = (incomplete + chunk).split(b"\n")
        yield from lines
        if len(incomplete) > _LONGEST_LINE:
            raise ConfigError(f"{where} has a line of more than {_LONGEST_LINE >> 10} KiB; is it an index?")
    yield incomplete


def _unpack_chunks(index: BinaryIO, where: str) -> Iterator[bytes]:
    """Yield the unpacked content in portions of bounded size, whatever the compression ratio."""
    chunk = index.read(_CHUNK)
    if not chunk.startswith(_GZIP):
        while chunk:
            yield chunk
            chunk = index.read(_CHUNK)
        return
    unpacker, is_complete = zlib.decompressobj(wbits=31), False
    try:
        while chunk:
            yield unpacker.decompress(chunk, _CHUNK)
            chunk, is_complete = unpacker.unconsumed_tail, unpacker.eof
            if is_complete:  # gzip files may have several members
                chunk, unpacker = unpacker.unused_data, zlib.decompressobj(wbits=31)
            chunk = chunk or index.read(_CHUNK)
    except zlib.error as error:
        raise ConfigError(f"{where} cannot be unpacked: {error}") from None
    if not is_complete:
        raise ConfigError(f"{where} ends in the middle; upload it again")
