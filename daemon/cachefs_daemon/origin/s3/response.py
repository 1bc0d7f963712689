"""Checks that an S3 response has the requested bytes of the listed version."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from cachefs.errors import ObjectChanged, OriginError
from cachefs_daemon.origin.base import ALTERED_HINT, ObjectRange, is_weak_form

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


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
