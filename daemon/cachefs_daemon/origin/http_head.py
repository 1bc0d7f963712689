"""The head of an HTTP/1.1 answer: its status line and headers, parsed strictly.

What two programs may read differently is refused, since between us and a server there may be others: folded lines, bare
CR or LF, blanks before a colon, two values where there may be one. Whoever asked repeats the request in another way.
"""

import functools
from typing import Final, NamedTuple

# Bytes that the heads of one answer may have, those of interim answers included, and header lines of one head.
MOST_BYTES: Final = 8 << 10
MOST_LINES: Final = 100
END: Final = b"\r\n\r\n"

_VERSION: Final = b"HTTP/1.1 "
_NAME: Final = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Of these there may be one only, or several that say the same.
_SINGLE: Final = frozenset(
    (b"content-length", b"content-range", b"etag", b"transfer-encoding", b"connection", b"content-encoding")
)
# More digits are no length of anything.
_LONGEST_NUMBER: Final = 18
# No body follows these, whatever length their heads give.
_BODILESS: Final = frozenset((204, 304))
# Control characters besides the tab.
_CONTROLS: Final = bytes({*range(32), 127} - {9})


class Malformed(Exception):
    """The head is not what HTTP/1.1 allows."""


class Head(NamedTuple):
    """The head of an answer."""

    status: int
    # By name in lower case; several values are joined with commas.
    headers: dict[bytes, bytes]
    # Bytes of the body; None where the server does not say so, sends it in chunks, or sends none.
    length: int | None

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after the body."""
        said = self.headers.get(b"connection")
        return said is not None and b"close" in said.lower()


def parse_head(text: bytes) -> Head:
    """text: the head without the empty line at its end. Raises Malformed."""
    lines = text.split(b"\r\n")
    count = len(lines) - 1
    if count > MOST_LINES:
        raise Malformed(f"it has {count} header lines")
    if text.count(b"\r") != count or text.count(b"\n") != count:
        raise Malformed("it has a CR or LF within a line")
    status = _parse_start(lines[0])
    headers = parse_lines(lines[1:])
    return Head(status, headers, _length(headers) if status not in _BODILESS else None)


def parse_lines(lines: list[bytes]) -> dict[bytes, bytes]:
    """Header lines without their ends, by name in lower case. Raises Malformed."""
    headers = dict(map(_parse_line, lines))
    return headers if len(headers) == len(lines) else _joined(lines)


def _joined(lines: list[bytes]) -> dict[bytes, bytes]:
    """The headers where some come more than once."""
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, value = _parse_line(line)
        if headers.get(name, value) == value:
            headers[name] = value
        elif name in _SINGLE:
            raise Malformed(f"it has two different values of {name.decode()}")
        else:
            headers[name] += b", " + value
    return headers


# Most lines are the same in all answers of a server. Remembering them halves the time.
@functools.lru_cache(16)
def _parse_start(line: bytes) -> int:
    if not line.startswith(_VERSION) or not line[9:12].isdigit() or line[12:13] not in (b" ", b""):
        raise Malformed(f"its status line is {line[:40]!r}")
    return int(line[9:12])


@functools.lru_cache(256)
def _parse_line(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    # An empty remainder means that all are characters of names; a folded line begins with a blank, which is none.
    if not colon or not name or name.translate(None, _NAME) or len(line.translate(None, _CONTROLS)) != len(line):
        raise Malformed(f"one of its lines is {line[:40]!r}")
    return name.lower(), value.strip(b" \t")


def _length(headers: dict[bytes, bytes]) -> int | None:
    length = headers.get(b"content-length")
    if length is None or b"transfer-encoding" in headers:
        return None
    if not length.isdigit() or len(length) > _LONGEST_NUMBER:
        raise Malformed(f"its length is {length[:40]!r}")
    return int(length)
