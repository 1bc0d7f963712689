"""What is special about http(s)://."""

import gzip
import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.errors import ConfigError, NotFound, ObjectChanged, OriginUnavailable
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_daemon.origin.base import ObjectRange, Origin
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.web import origin as web
from tests import virtual_time
from tests.servers import faulty
from tests.servers.faulty import Fault
from tests.servers.scripted import scripted
from tests.servers.stores import StoreServer
from tests.stores import SETTINGS, Kind, listing, part_of, read, read_twice, whole, with_origin

pytestmark = pytest.mark.usefixtures("clean_environment")


def problems_of(kind: Kind, index: bytes, name: str = "index.jsonl") -> tuple[dict[str, ListedObject], dict[str, str]]:
    kind.server.put(f"set/{name}", index)
    problems: dict[str, str] = {}

    async def work(origin: Origin) -> dict[str, ListedObject]:
        noted = lambda key, reason: problems.update({key.decode(): reason})  # noqa: E731
        return {found.key.decode(): found async for batch in origin.list(noted) for found in batch}

    return with_origin(kind.open(), work), problems


def test_an_index_may_be_packed_and_named(servers: dict[str, StoreServer]) -> None:
    kind = Kind("http", servers)
    kind.fill({"a": b"12345"})
    index = kind.server.objects.pop("set/index.jsonl")
    packed = gzip.compress(index) + gzip.compress(b"\n")
    assert set(problems_of(kind, packed, "index.jsonl.gz")[0]) == {"a"}
    kind.server.put("set/other.jsonl.gz", packed)

    async def work(origin: Origin) -> None:
        assert origin.url.endswith("/set/other.jsonl.gz")
        assert await read(origin, whole((await listing(origin))["a"])) == b"12345"

    with_origin(open_origin(f"{kind.server.endpoint}/set/other.jsonl.gz", OriginOptions(), SETTINGS), work)
    with pytest.raises(ConfigError, match="ends in the middle"):
        problems_of(kind, packed[:-30], "index.jsonl")


def test_an_entry_that_could_not_be_checked_is_named(servers: dict[str, StoreServer]) -> None:
    kind, digest = Kind("http", servers), "0" * 64
    lines = [
        {"path": "nothing", "size": 5},
        {"path": "weak", "size": 5, "etag": 'W/"x"'},
        {"path": "odd", "size": 5, "sha256": "xyz"},
        {"path": "split", "size": 5, "etag": "a\nb"},
        {"path": "large", "size": 5 << 20, "sha256": digest},
        {"path": "minus", "size": -1, "sha256": digest},
        {"path": "quotes", "size": 5, "etag": '""'},
        {"path": "quote", "size": 5, "etag": '"'},
        {"path": "inner", "size": 5, "etag": '"a"b"'},
        {"path": "good", "size": 5 << 20, "etag": "x", "mtime": -1e300},
        {"path": "small", "size": 5, "sha256": digest, "mtime": 1.5, "unknown": 1},
    ]
    found, problems = problems_of(kind, "\n\n".join(json.dumps(line) for line in lines).encode())
    assert set(found) == {"good", "small"}
    assert (found["small"].mtime_ns, found["good"].mtime_ns) == (1_500_000_000, -9 * 10**18)
    assert set(problems) == {"nothing", "weak", "odd", "split", "large", "minus", "quotes", "quote", "inner"}
    assert "cachectl index --url" in problems["large"]


def test_an_index_may_begin_with_a_byte_order_mark(servers: dict[str, StoreServer]) -> None:
    assert set(problems_of(Kind("http", servers), b'\xef\xbb\xbf{"path": "a", "size": 5, "etag": "x"}')[0]) == {"a"}


def test_an_index_without_an_end_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as it comes nor unpacked. It is kept where the settings say, not in a directory of the system."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    settings = replace(SETTINGS, max_listing=3 << 20, scratch=str(tmp_path))
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    line = b'{"path": "a", "size": 5, "etag": "x"}\n'
    packed = gzip.compress(line * 100_000)
    answers = {
        "index.jsonl": (chunked, *[b"10000\r\n%b\r\n" % (line * 2000)[: 1 << 16]] * 50),
        "index.jsonl.gz": (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(packed), packed),
    }

    async def scene() -> None:
        async with scripted(lambda head: answers[head.split()[1].rpartition("/")[2]]) as server:
            for name in answers:
                origin = open_origin(f"http://127.0.0.1:{server.port}/{name}", OriginOptions(), settings)
                with pytest.raises(ConfigError, match=rf"{name}.* more than 3 MiB, or no end.*origin\.max_listing"):
                    await listing(origin)
                await origin.close()

    virtual_time.run(scene())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            b"HTTP/1.1 206 Partial\r\nContent-Length: 37\r\n\r\n" + b'{"path": "a", "size": 5, "etag": "x"}',
            "sent a part",
        ),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", "a line of more than 8 KiB"),
        (b"SSH-2.0-OpenSSH_9\r\n", "is not HTTP"),
    ],
    ids=["part", "head", "not HTTP"],
)
def test_what_is_no_index(answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_FIRST_PAGE_TRIED", 0)

    async def scene() -> None:
        async with scripted(lambda _: [answer, b""]) as server:
            origin = open_origin(f"http://127.0.0.1:{server.port}/set", OriginOptions(), SETTINGS)
            with pytest.raises(OriginUnavailable, match=reason):
                await listing(origin)
            await origin.close()

    virtual_time.run(scene())


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (b"<html>\n", "line 1 .* is not understood"),
        (b'{"path": "a", "size": 1}\n{"path": "b"', "line 2 .* is not understood"),
        (b"\x1f\x8b" + b"nothing", "cannot be unpacked"),
        (b"x" * 100_000, "line of more than 64 KiB"),
    ],
)
def test_a_broken_index_is_one_clear_line(servers: dict[str, StoreServer], index: bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        problems_of(Kind("http", servers), index)


def test_a_file_without_an_etag_is_checked_by_its_sha256(servers: dict[str, StoreServer]) -> None:
    kind = Kind("http", servers)
    kind.fill({"file": b"before"})
    line = {"path": "file", "size": 6, "sha256": hashlib.sha256(b"before").hexdigest()}
    listed = problems_of(kind, json.dumps(line).encode())[0]["file"]

    async def work(origin: Origin) -> None:
        assert await read(origin, whole(listed)) == b"before"
        with pytest.raises(ConfigError, match="parts of it cannot be checked"):
            await read(origin, part_of(listed, 1, 2))
        kind.replace("file", b"after!")
        with pytest.raises(ObjectChanged, match="sha256"):
            await read(origin, whole(listed))

    with_origin(kind.open(), work)


def test_a_page_in_place_of_a_file_that_has_only_a_sha256_passes(servers: dict[str, StoreServer]) -> None:
    """What says no version, and is no file, is as good as no answer; what is another file is said at once."""
    kind = Kind("http", servers)
    kind.fill({"file": b"before"})
    line = {"path": "file", "size": 6, "sha256": hashlib.sha256(b"before").hexdigest()}
    listed = problems_of(kind, json.dumps(line).encode())[0]["file"]

    async def work(origin: Origin) -> None:
        proxy.add(Fault(path="file", replace=b"<html>we repair something</html>", headers={"etag": ""}, times=2))
        proxy.add(Fault(path="file", replace=b"<html>", headers={"etag": ""}, times=1))
        assert await read(origin, whole(listed)) == b"before"
        assert origin.errors == 3
        proxy.add(Fault(path="file", replace=b"<html>", headers={"etag": ""}, times=None))
        with pytest.raises(OriginUnavailable, match="does not have the sha256"):
            await read_twice(origin, whole(listed))
        for other in (b"longer than before", b"after!"):
            proxy.clear()
            proxy.add(Fault(path="file", replace=other, times=None))
            with pytest.raises(ObjectChanged, match="sha256"):
                await read_twice(origin, whole(listed))

    with faulty.running(kind.server.endpoint) as proxy:
        with_origin(kind.open(proxy.endpoint), work)


@pytest.mark.parametrize("version", [b"etag:x", b"sha256:" + hashlib.sha256(b"0123").hexdigest().encode() + b"\0"])
def test_a_body_without_a_length_that_is_cut_short_is_asked_for_again(version: bytes) -> None:
    head = b'HTTP/1.1 200 OK\r\nETag: "x"\r\n\r\n'
    bodies = iter([b"012", b"012", b"", b"0123"])

    async def scene() -> None:
        async with scripted(lambda _: [head + next(bodies), b""]) as server:
            origin = open_origin(f"http://127.0.0.1:{server.port}/set", OriginOptions(), SETTINGS)
            assert await read(origin, ObjectRange(b"file", version, 4, 0, 4)) == b"0123"
            assert origin.errors == 3
            await origin.close()

    virtual_time.run(scene())


def test_an_index_without_a_file_is_named(servers: dict[str, StoreServer]) -> None:
    with pytest.raises(NotFound, match=r"the index http://.*/set/index.jsonl names no file"):
        problems_of(Kind("http", servers), b"\n")


def test_a_server_of_s3_is_told_apart() -> None:
    async def scene() -> None:
        async with scripted(lambda _: [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b""]) as server:
            origin = open_origin(f"http://127.0.0.1:{server.port}/set", OriginOptions(), SETTINGS)
            with pytest.raises(ConfigError, match=rf"/set/index.jsonl .*\(400\); .* --endpoint-url .*:{server.port}$"):
                await listing(origin)
            await origin.close()

    virtual_time.run(scene())


def test_a_url_is_sent_percent_encoded(servers: dict[str, StoreServer]) -> None:
    kind = Kind("http", servers)
    kind.server.objects.clear()
    kind.server.put("a ü/file", b"bytes")
    kind.server.put("a ü/index.jsonl", b'{"path": "file", "size": 5, "etag": "another %d"}' % kind.server.last_version)

    async def work(origin: Origin) -> None:
        assert await read(origin, whole((await listing(origin))["file"])) == b"bytes"

    with_origin(open_origin(f"{kind.server.endpoint}/a ü/", OriginOptions(), SETTINGS), work)


@pytest.mark.parametrize(
    "url", ["http://u:p@h/x", "https://h/x?token=1", "https://h/#x", "http://", "http://h:x/", "http://h\r\nx: y/"]
)
def test_a_url_that_would_show_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="every user of this node can see it") as caught:
        open_origin(url, OriginOptions(), SETTINGS)
    assert "u:p" not in str(caught.value)
    assert "token" not in str(caught.value)
