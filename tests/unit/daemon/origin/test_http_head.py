import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs_daemon.origin.http.head import MAX_HEADER_LINES, MalformedHead, parse_head

NAMES = st.text("abcDEF-_!#09", min_size=1, max_size=12).filter(lambda name: name.lower() not in ("e", "etag"))
VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"), max_size=20)


def head(*lines: str, start: str = "HTTP/1.1 200 OK") -> bytes:
    return "\r\n".join((start, *lines)).encode("latin-1")


def test_a_usual_head() -> None:
    found = parse_head(head("Content-Length: 12", 'ETag: "e"', "Connection: keep-alive", "Vary: a", "vary:\tb "))
    assert (found.status, found.length, found.is_last) == (200, 12, False)
    assert found.headers[b"etag"] == b'"e"'
    assert found.headers[b"vary"] == b"a, b"


@pytest.mark.parametrize(
    ("lines", "length", "last"),
    [
        ([], None, False),
        (["Content-Length: 5", "content-length: 5"], 5, False),
        (["Content-Length: 5", "Transfer-Encoding: chunked"], None, False),
        (["Content-Length: 0", "Connection: Close"], 0, True),
    ],
)
def test_the_length_of_a_body(lines: list[str], length: int | None, last: bool) -> None:
    found = parse_head(head(*lines))
    assert (found.length, found.is_last) == (length, last)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"HTTP/1.0 200 OK",
        b"HTTP/2 200",
        b"HTTP/1.1  200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 +20 OK",
        b" HTTP/1.1 200 OK",
        head("Content-Length: 5", "Content-Length: 6"),
        head('ETag: "a"', 'etag: "b"'),
        head("Content-Length: 5, 5"),
        head("Content-Length: -5"),
        head("Content-Length: +5"),
        head("Content-Length: 0x5"),
        head("Content-Length: 5 5"),
        head("Content-Length: \xb2"),
        head("Content-Length: "),
        head("Content-Length: " + "9" * 19),
        head("Content-Length : 5"),
        head(" Content-Length: 5"),
        head("X: a", " folded"),
        head("X: a", "\tfolded"),
        head("no colon"),
        head(": no name"),
        head("X: a\nContent-Length: 5"),
        head("X: a\rContent-Length: 5"),
        head("X: a\0b"),
        head("X\0: a"),
        head("", "X: a"),
        head(*["X: a"] * (MAX_HEADER_LINES + 1)),
    ],
)
def test_what_may_be_read_differently_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedHead):
        parse_head(text)


@given(st.dictionaries(NAMES.map(str.lower), VALUES, max_size=20), st.integers(100, 999))
def test_what_was_written_is_read(headers: dict[str, str], status: int) -> None:
    text = head(*(f"{name.title()}: {value}" for name, value in headers.items()), start=f"HTTP/1.1 {status} Why not")
    found = parse_head(text)
    assert found.status == status
    assert found.headers == {name.encode(): value.encode("latin-1") for name, value in headers.items()}


@given(st.binary(max_size=200))
def test_nothing_else_than_a_refusal_comes_of_anything(tail: bytes) -> None:
    for text in (tail, b"HTTP/1.1 200 OK\r\n" + tail):
        try:
            found = parse_head(text)
        except MalformedHead:
            continue
        # Put together again, what was read is the same: there is one way to read it.
        lines = [b"HTTP/1.1 %d" % found.status, *(b"%b: %b" % item for item in found.headers.items())]
        assert parse_head(b"\r\n".join(lines)) == found
