"""Checks that an S3 response has the requested bytes of the listed version, and the bytes of its checksums."""

import asyncio
import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from cachefs.errors import ObjectChanged, OriginError
from cachefs_daemon.origin.base import ALTERED_HINT, ObjectRange, is_weak_form

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
# The header that requests checksums, as botocore sends it.
CHECKSUM_HEADER: Final = ("x-amz-checksum-mode", "ENABLED")

_CRC32: Final = b"x-amz-checksum-crc32"
_SHA256: Final = b"x-amz-checksum-sha256"
_KINDS: Final[dict[bytes, Callable[[memoryview], bytes]]] = {
    _CRC32: lambda data: zlib.crc32(data).to_bytes(4, "big"),
    _SHA256: lambda data: hashlib.sha256(data).digest(),
}
_TYPE: Final = b"x-amz-checksum-type"
# Most bytes that are hashed on the event loop: a third of a millisecond.
_SHORT: Final = 1 << 20


class S3Target(NamedTuple):
    """The target of a request: an object of a bucket, or the listing of the bucket."""

    bucket: str
    # Empty for a listing.
    key: str
    # URL of the server, or "AWS".
    endpoint: str
    # Whether requests carry the consent of the requester to pay.
    requester_pays: bool = False

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key} at {self.endpoint}"


class BrokenS3Response(Exception):
    """The response is not what the server promised, for instance cut short; a retry may succeed."""


def is_whole_object(wanted: ObjectRange, length: int | None, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a response is plainly the whole object, as most are, and needs no further check.

    length: of its body. headers: by name in lower case.
    """
    return (
        length == wanted.length == wanted.size
        and headers.get(b"etag") == b'"%b"' % wanted.version
        and b"content-range" not in headers
    )


def bytes_before(wanted: ObjectRange, target: S3Target, etag: str, promised: int | None, content_range: str) -> int:
    """Return how many bytes of the response's body precede the *wanted* ones.

    etag, promised, content_range: headers of the response; promised is the length of its body, and content_range is
    empty without one. Raises BrokenS3Response, ObjectChanged, and OriginError if the version is right and the bytes are
    not.
    """
    if not etag:
        raise BrokenS3Response("the answer has no ETag, so it may be that of a proxy or a login page")
    if etag.strip('"').encode() != wanted.version:
        if is_weak_form(etag, wanted.version):
            raise OriginError(f"{target}: the answer has a weak ETag; {ALTERED_HINT}")
        raise ObjectChanged(f"{target} has changed since it was listed; refresh the dataset")
    before = _bytes_before(wanted, promised, content_range)
    if before is None:
        first, last = wanted.offset, wanted.offset + wanted.length - 1
        raise OriginError(
            f"{target}: the server sent other bytes than {first}-{last} of {wanted.size} "
            f"(length {promised}, range {content_range or None}), but with the ETag that was listed; {ALTERED_HINT}"
        )
    return before


def _bytes_before(wanted: ObjectRange, promised: int | None, content_range: str) -> int | None:
    size, offset, length = wanted.size, wanted.offset, wanted.length
    if content_range:
        found = _CONTENT_RANGE.fullmatch(content_range)
        if found is None or (int(found[1]), int(found[2])) != (offset, offset + length - 1):
            return None
        return 0 if found[3] in ("*", str(size)) and promised in (None, length) else None
    if promised == size or (promised is None and length == size):
        return offset
    # rclone answers ranges with status 200 and no Content-Range, but with the right bytes.
    return 0 if promised == length else None


def has_checksum(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether there is a checksum to verify."""
    return _CRC32 in headers or _SHA256 in headers


async def verify_checksum(data: memoryview, headers: Mapping[bytes, bytes]) -> None:
    """Verify the checksums that an S3 server sends with a whole object.

    Only checksums that the standard library computes quickly are verified: CRC-32 takes 30 us for 110 KB, SHA-256 60. A
    plain installation has no library for CRC-32C and CRC-64/NVME, the default of AWS. headers: of the response, by name
    in lower case. Raises BrokenS3Response.
    """
    for name, count in _KINDS.items():
        value = headers.get(name)
        # A checksum of the part checksums has another type, or the number of parts behind it.
        if value is None or b"-" in value or headers.get(_TYPE, b"FULL_OBJECT") != b"FULL_OBJECT":
            continue
        try:
            expected = base64.b64decode(value, validate=True)
        except binascii.Error:
            raise BrokenS3Response(f"its {name.decode()} is {value[:80]!r}") from None
        found = count(data) if len(data) <= _SHORT else await asyncio.to_thread(count, data)
        if found != expected:
            raise BrokenS3Response(f"its bytes do not have the {name.decode()} that the server sent with them")
