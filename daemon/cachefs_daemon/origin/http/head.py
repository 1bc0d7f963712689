"""Strict parser of the head of an HTTP/1.1 response: its status line and headers.

Input that two programs may read differently is refused, since there may be proxies between us and a server: folded
lines, bare CR or LF, blanks before a colon, two values of a single header. The caller then repeats the request in
another way.
"""

import functools
from typing import Final, NamedTuple

# Most bytes of the heads of one response, interim responses included, and most header lines of one head.
MAX_HEAD_BYTES: Final = 8 << 10
MAX_HEADER_LINES: Final = 100
HEAD_END: Final = b"\r\n\r\n"

_VERSION: Final = b"HTTP/1.1 "
_NAME: Final = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Headers with a single value, which may be repeated unchanged.
_SINGLE: Final = frozenset(
    (b"content-length", b"content-range", b"etag", b"transfer-encoding", b"connection", b"content-encoding")
)
# More digits are no valid length.
_LONGEST_NUMBER: Final = 18
# Responses without a body, whatever their heads say.
_STATUSES_WITHOUT_BODY: Final = frozenset((204, 304))
# Control characters besides the tab.
_CONTROLS: Final = bytes({*range(32), 127} - {9})


class MalformedHead(Exception):
    """The head violates HTTP/1.1."""


class Head(NamedTuple):
    """The head of a response."""

    status: int
    # By name in lower case; several values are joined with commas.
    headers: dict[bytes, bytes]
    # Length of the body; None if it is unknown, chunked, or absent.
    length: int | None

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after the body."""
        connection = self.headers.get(b"connection")
        return connection is not None and b"close" in connection.lower()


def parse_head(text: bytes) -> Head:
    """Parse a head, given without the empty line at its end. Raises MalformedHead."""
    lines = text.split(b"\r\n")
    count = len(lines) - 1
    if count > MAX_HEADER_LINES:
        raise MalformedHead(f"it has {count} header lines")
    if text.count(b"\r") != count or text.count(b"\n") != count:
        raise MalformedHead("it has a CR or LF within a line")
    status = _parse_start(lines[0])
    headers = parse_header_lines(lines[1:])
    return Head(status, headers, _length(headers) if status not in _STATUSES_WITHOUT_BODY else None)


def parse_header_lines(lines: list[bytes]) -> dict[bytes, bytes]:
    """Parse header lines without their ends, and return them by name in lower case. Raises MalformedHead."""
    headers = dict(map(_parse_line, lines))
    return headers if len(headers) == len(lines) else _parse_repeated(lines)


def _parse_repeated(lines: list[bytes]) -> dict[bytes, bytes]:
    """Parse headers of which some are repeated."""
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, value = _parse_line(line)
        if headers.get(name, value) == value:
            headers[name] = value
        elif name in _SINGLE:
            raise MalformedHead(f"it has two different values of {name.decode()}")
        else:
            headers[name] += b", " + value
    return headers


# Most lines are the same in all responses of a server: the cache halves the time.
@functools.lru_cache(16)
def _parse_start(line: bytes) -> int:
    if not line.startswith(_VERSION) or not line[9:12].isdigit() or line[12:13] not in (b" ", b""):
        raise MalformedHead(f"its status line is {line[:40]!r}")
    return int(line[9:12])


@functools.lru_cache(256)
def _parse_line(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    # An empty remainder proves that all characters are valid in names; a folded line begins with a blank, which is not.
    if not colon or not name or name.translate(None, _NAME) or len(line.translate(None, _CONTROLS)) != len(line):
        raise MalformedHead(f"one of its lines is {line[:40]!r}")
    return name.lower(), value.strip(b" \t")


def _length(headers: dict[bytes, bytes]) -> int | None:
    length = headers.get(b"content-length")
    if length is None or b"transfer-encoding" in headers:
        return None
    if not length.isdigit() or len(length) > _LONGEST_NUMBER:
        raise MalformedHead(f"its length is {length[:40]!r}")
    return int(length)
