"""Whether an answer of an S3 server has the bytes that were asked for, of the version that was listed."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from cachefs.errors import ObjectChanged, OriginError
from cachefs_daemon.origin.base import ALTERED, ObjectRange, is_weak_form

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Place(NamedTuple):
    """What was asked for: an object of a bucket, or a listing of the bucket."""

    bucket: str
    # Empty for a listing.
    key: str
    # URL of the server, or "AWS".
    endpoint: str
    # Whether requests say that who sends them pays.
    requester_pays: bool = False

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key} at {self.endpoint}"


class BrokenAnswer(Exception):
    """The server's answer is not what it promised, for instance cut short; another try may be better."""


def is_whole(wanted: ObjectRange, length: int | None, headers: Mapping[bytes, bytes]) -> bool:
    """Whether an answer is the whole object and says so plainly, as most are: there is nothing more to ask.

    length: of its body. headers: by name in lower case.
    """
    return (
        length == wanted.length == wanted.size
        and headers.get(b"etag") == b'"%b"' % wanted.version
        and b"content-range" not in headers
    )


def bytes_before(wanted: ObjectRange, place: Place, etag: str, promised: int | None, content_range: str) -> int:
    """How many bytes of the answer's body precede the *wanted* ones.

    etag, promised, content_range: what the answer says of itself; promised is the length of its body, and content_range
    is empty where it has none. Raises BrokenAnswer, ObjectChanged, and OriginError where the version is
    right and the bytes are not.
    """
    if not etag:
        raise BrokenAnswer("the answer has no ETag, so it may be that of a proxy or a login page")
    if etag.strip('"').encode() != wanted.version:
        if is_weak_form(etag, wanted.version):
            raise OriginError(f"{place}: the answer has a weak ETag; {ALTERED}")
        raise ObjectChanged(f"{place} has changed since it was listed; refresh the dataset")
    before = _bytes_before(wanted, promised, content_range)
    if before is None:
        first, last = wanted.offset, wanted.offset + wanted.length - 1
        raise OriginError(
            f"{place}: the server sent other bytes than {first}-{last} of {wanted.size} "
            f"(length {promised}, range {content_range or None}), but with the ETag that was listed; {ALTERED}"
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
    # rclone answers ranges in this way: status 200 and no Content-Range, but the right bytes.
    return 0 if promised == length else None
