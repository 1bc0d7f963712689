"""Answers to ListObjectsV2 are read alike, however they are written, and what is no whole answer is an error."""

import pytest

from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.s3.page import ListingPage, parse_page, parse_time
from cachefs_daemon.origin.s3.response import BrokenS3Response

TIME_NS = 1_767_323_045_678_000_000
USUAL = (
    "<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified><ETag>&quot;e&quot;</ETag>"
    "<Size>3</Size></Contents>"
)
AWS = (
    "<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified><ETag>&quot;e&quot;</ETag>"
    "<ChecksumAlgorithm>CRC64NVME</ChecksumAlgorithm><ChecksumType>FULL_OBJECT</ChecksumType><Size>3</Size>"
    "<StorageClass>STANDARD</StorageClass></Contents>"
)
OTHER_ORDER = (
    "<Contents>\n <ETag>&#34;e&#34;</ETag> <Size>3</Size>\n <Owner><ID>o</ID></Owner> <Key>{key}</Key>"
    " <LastModified>2026-01-02T03:04:05.678Z</LastModified></Contents>"
)


def body(*contents: str, encoding: str | None = "url", more: str = "<IsTruncated>false</IsTruncated>") -> bytes:
    named = f"<EncodingType>{encoding}</EncodingType>" if encoding else ""
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return (
        f'<?xml version="1.0"?><ListBucketResult {space}>{named}{"".join(contents)}{more}</ListBucketResult>'.encode()
    )


@pytest.mark.parametrize("written", [USUAL, AWS, OTHER_ORDER])
@pytest.mark.parametrize(
    ("encoding", "key", "expected"),
    [
        ("url", "p/a+b%2Bc%20d%25", b"a b+c d%"),
        ("url", "p/%FF%00", b"\xff\x00"),
        (None, "p/a+b%20é", "a+b%20é".encode()),
        (None, "p/a&amp;b", b"a&b"),
    ],
)
def test_objects_are_read_as_they_are_written(written: str, encoding: str | None, key: str, expected: bytes) -> None:
    page = parse_page(body(USUAL.format(key="p/0"), written.format(key=key), encoding=encoding), "p/")
    assert page == ListingPage([ListedObject(b"0", 3, TIME_NS, b"e"), ListedObject(expected, 3, TIME_NS, b"e")], None)


@pytest.mark.parametrize("kind", ["GLACIER", "DEEP_ARCHIVE"])
def test_an_object_in_an_archive_is_told_from_others(kind: str) -> None:
    cold = AWS.replace("STANDARD", kind)
    others = [AWS.replace("STANDARD", other) for other in ("STANDARD", "GLACIER_IR", "INTELLIGENT_TIERING")]
    written = [*(each.format(key="a") for each in others), cold.format(key="b%2Bc"), USUAL.format(key="d")]
    page = parse_page(body(*written), "")
    assert [each.is_archived for each in page.objects] == [False, False, False, True, False]
    assert page.objects[3] == ListedObject(b"b+c", 3, TIME_NS, b"e", is_archived=True)


@pytest.mark.parametrize("written", [USUAL, OTHER_ORDER])
def test_a_carriage_return_that_a_server_has_not_escaped_is_no_line_feed(written: str) -> None:
    lines = body(written.format(key="a\rb"), encoding=None).replace(b"?>", b"?>\r\n")
    assert [each.key for each in parse_page(lines, "").objects] == [b"a\rb"]


def test_an_object_without_an_etag() -> None:
    page = parse_page(body(USUAL.replace("<ETag>&quot;e&quot;</ETag>", "").format(key="a")), "")
    assert page.objects == [ListedObject(b"a", 3, TIME_NS, b"")]


def test_a_page_with_another_after_it() -> None:
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t&amp;1</NextContinuationToken>"
    assert parse_page(body(USUAL.format(key="a"), more=more), "").token == "t&1"
    assert parse_page(body(), "") == ListingPage([], None)


def test_a_page_that_cannot_be_followed_is_not_taken_for_the_last() -> None:
    with pytest.raises(BrokenS3Response, match="truncated"):
        parse_page(body(more="<IsTruncated>true</IsTruncated>"), "")


def test_an_answer_that_is_cut_anywhere_is_an_error() -> None:
    whole = body(AWS.format(key="a"), AWS.format(key="b"))
    for length in range(len(whole)):
        with pytest.raises(BrokenS3Response):
            parse_page(whole[:length], "")


@pytest.mark.parametrize(
    "broken",
    [
        b"<Error><Code>InternalError</Code></Error>",
        body(USUAL.format(key="a").replace("<Size>3</Size>", "<Size>x</Size>")),
        body(USUAL.format(key="a").replace("2026-01-02T03:04:05.678Z", "yesterday")),
        body("<Contents><Size>3</Size></Contents>"),
    ],
)
def test_what_is_no_listing_is_an_error(broken: bytes) -> None:
    with pytest.raises(BrokenS3Response):
        parse_page(broken, "")


def test_times_in_headers_are_understood_too() -> None:
    assert parse_time("Fri, 02 Jan 2026 03:04:05 GMT") == parse_time("2026-01-02T03:04:05Z")
