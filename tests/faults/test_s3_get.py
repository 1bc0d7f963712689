"""Answers that our own client of S3 does not take: another try, aiobotocore, or an error; never other bytes."""

import asyncio
import base64
import hashlib
import itertools
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import TypeVar
from urllib.parse import unquote

import pytest

from cachefs.errors import ObjectChanged, OriginAccessDenied, OriginUnavailable
from cachefs.messages import OriginOptions
from cachefs_daemon.origin import retry
from cachefs_daemon.origin.base import ObjectRange, Origin, OriginSettings
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.s3 import connection
from tests.servers import scripted as scripted_server
from tests.servers.scripted import RESET, Script, ScriptedServer, scripted

BODY = b"hello, world"
WHOLE = ObjectRange(b"key", b"e", len(BODY), 0, len(BODY))
PART = ObjectRange(b"key", b"e", len(BODY), 7, 5)
CERTIFICATE = Path(scripted_server.__file__).parent / "localhost.pem"

Result = TypeVar("Result")
Scene = Callable[[ScriptedServer, Origin], Awaitable[Result]]


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST", 0.001)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)


def play(script: Script, scene: Scene[Result], tls: SSLContext | None = None, **options: object) -> Result:
    async def run() -> Result:
        async with scripted(script, tls) as server:
            endpoint = f"https://localhost:{server.port}" if tls else f"http://127.0.0.1:{server.port}"
            chosen = OriginOptions(endpoint_url=endpoint, **options)  # type: ignore[arg-type]
            origin = open_origin("s3://bucket", chosen, OriginSettings())
            try:
                return await asyncio.wait_for(scene(server, origin), 30)
            finally:
                await origin.close()

    return asyncio.run(run())


async def read(origin: Origin, wanted: ObjectRange = WHOLE, seconds: float = 20) -> bytes:
    return bytes(await origin.read(wanted, Deadline.after(seconds)))


def answer(body: bytes = BODY, *headers: str, start: str = "200 OK", etag: str = "e") -> bytes:
    lines = (f"HTTP/1.1 {start}", f"Content-Length: {len(body)}", f'ETag: "{etag}"', *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(body: bytes, start: str = "200 OK") -> bytes:
    head = f'HTTP/1.1 {start}\r\nTransfer-Encoding: chunked\r\nETag: "e"\r\n\r\n{len(body):x}\r\n'
    return head.encode() + body + b"\r\n0\r\n\r\n"


def error(code: str, *fields: str) -> bytes:
    inner = "".join(fields)
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message>{inner}</Error>".encode()


def is_ours(request: str) -> bool:
    return "amz-sdk-request" not in request


def unless_ours(unusual: bytes) -> Script:
    """To our client the server answers with something unusual."""

    def script(request: str) -> Iterable[bytes]:
        if is_ours(request):
            return [unusual]
        if "bytes=7-11" in request:
            return [answer(BODY[7:], "Content-Range: bytes 7-11/12", start="206 Partial Content")]
        return [answer()]

    return script


UNUSUAL = {
    "chunked": chunked(BODY),
    "no length": b'HTTP/1.1 200 OK\r\nETag: "e"\r\n\r\n' + BODY,
    "two lengths": answer(BODY, "Content-Length: 5"),
    "folded": answer(BODY, "X-Note: a", " b"),
    "nothing": b"HTTP/1.1 204 No Content\r\n\r\n",
    "redirect": b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "temporary redirect": b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "refused in chunks": chunked(error("AccessDenied"), "403 Forbidden"),
    "gone in chunks": chunked(error("NoSuchKey"), "404 Not Found"),
    "old": answer().replace(b"1.1", b"1.0", 1),
}


@pytest.mark.parametrize("wanted", [WHOLE, PART], ids=["whole", "part"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_repeated_through_aiobotocore_and_counted(
    name: str, wanted: ObjectRange, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(server: ScriptedServer, origin: Origin) -> None:
        for _ in range(2):
            assert await read(origin, wanted) == BODY[wanted.offset : wanted.offset + wanted.length]
        assert [is_ours(request) for request in server.requests] == [True, False] * 2
        assert (origin.requests, origin.errors, origin.fallback_reads) == (4, 2, 2)

    with caplog.at_level(logging.WARNING):
        play(unless_ours(UNUSUAL[name]), scene)
    assert sum("through aiobotocore" in record.message for record in caplog.records) == 1


LISTED = (
    b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>key</Key>"
    b"<LastModified>2024-05-01T12:00:00.000Z</LastModified><ETag>&quot;e&quot;</ETag><Size>12</Size></Contents>"
    b"</ListBucketResult>"
)


@pytest.mark.parametrize("ours", [True, False], ids=["our client", "aiobotocore"])
def test_who_reads_pays_in_each_request_where_the_bucket_wants_that(ours: bool) -> None:
    def script(request: str) -> Iterable[bytes]:
        said = {line.lower() for line in request.split("\r\n")}
        signed = next((line for line in said if line.startswith("authorization:")), "")
        if "x-amz-request-payer: requester" not in said or "x-amz-request-payer" not in signed:
            return [answer(error("AccessDenied"), start="403 Forbidden")]
        if "list-type=2" in request:
            return [answer(LISTED)]
        return [UNUSUAL["chunked"] if not ours and is_ours(request) else answer()]

    async def pays(_: ScriptedServer, origin: Origin) -> None:
        listed = [each.key async for batch in origin.list(lambda key, reason: None) for each in batch]
        assert listed == [b"key"]
        assert await read(origin) == BODY
        assert origin.fallback_reads == (not ours)

    async def does_not(_: ScriptedServer, origin: Origin) -> None:
        with pytest.raises(OriginAccessDenied, match=r"403 AccessDenied: no\).*--requester-pays"):
            await read(origin)

    play(script, pays, requester_pays=True)
    play(script, does_not)


def test_a_server_that_is_always_unusual_is_not_asked_twice_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(server: ScriptedServer, origin: Origin) -> None:
        for _ in range(30):
            assert await read(origin) == BODY
        assert (sum(map(is_ours, server.requests)), origin.fallback_reads) == (connection._FAILURES_TO_SWITCH, 30)

    monkeypatch.setattr(connection, "_SHORTEST", 60.0)
    play(unless_ours(chunked(BODY)), scene)


def test_an_overloaded_server_is_not_asked_again_through_aiobotocore() -> None:
    async def scene(server: ScriptedServer, origin: Origin) -> None:
        with pytest.raises(OriginUnavailable, match="503"):
            await read(origin, seconds=0.5)
        assert all(map(is_ours, server.requests))
        assert len(server.requests) > 1
        assert origin.fallback_reads == 0

    play(lambda request: [chunked(error("SlowDown"), "503 Slow Down")], scene)


def test_a_region_that_aiobotocore_learns_is_used_from_then_on() -> None:
    def script(request: str) -> Iterable[bytes]:
        if "/eu-south-9/s3/" in request:
            return [answer()]
        said = error("AuthorizationHeaderMalformed", "<Region>eu-south-9</Region>")
        return [answer(said, "x-amz-bucket-region: eu-south-9", start="400 Bad Request")]

    async def scene(server: ScriptedServer, origin: Origin) -> None:
        assert await read(origin) == BODY
        assert await read(origin) == BODY
        assert is_ours(server.requests[-1])
        assert origin.fallback_reads == 1

    play(script, scene, region="us-east-1")


def test_one_wrong_byte_is_noticed_where_the_server_gives_a_checksum() -> None:
    sums = {
        "crc32": zlib.crc32(BODY).to_bytes(4, "big"),
        "sha256": hashlib.sha256(BODY).digest(),
    }

    async def scene(server: ScriptedServer, origin: Origin) -> None:
        assert await read(origin) == BODY
        assert "x-amz-checksum-mode: ENABLED" in server.requests[0]
        assert (len(server.requests), origin.errors) == (3, 2)

    for name, value in sums.items():
        header = f"x-amz-checksum-{name}: {base64.b64encode(value).decode()}"
        bodies = iter([b"hellO, world", b"hello, worle", BODY])
        play(lambda request: [answer(next(bodies), header)], scene)  # noqa: B023


def test_a_server_that_does_not_know_checksums_is_asked_for_them_once() -> None:
    def script(request: str) -> Iterable[bytes]:
        if "x-amz-checksum-mode" in request:
            return [answer(error("NotImplemented"), start="501 Not Implemented")]
        return [answer()]

    async def scene(server: ScriptedServer, origin: Origin) -> None:
        for _ in range(3):
            assert await read(origin) == BODY
        assert [is_ours(request) for request in server.requests] == [True, False, True, True]

    play(script, scene)


@pytest.mark.parametrize(
    "headers", [["x-amz-checksum-crc32: AAAA-3"], ["x-amz-checksum-crc32: AAAA", "x-amz-checksum-type: COMPOSITE"]]
)
def test_a_checksum_of_checksums_is_not_one_of_the_bytes(headers: list[str]) -> None:
    assert play(lambda request: [answer(BODY, *headers)], lambda _, origin: read(origin)) == BODY


@pytest.mark.parametrize("ending", [b"", RESET], ids=["closed", "reset"])
def test_cut_at_any_byte_an_answer_is_asked_for_again(ending: bytes) -> None:
    whole = answer(BODY[7:], "Content-Range: bytes 7-11/12", start="206 Partial Content")
    cuts = iter(range(len(whole)))
    turns = itertools.cycle([True, False])

    def script(request: str) -> Iterable[bytes]:
        return [*filter(None, [whole[: next(cuts)]]), ending] if next(turns) else [whole, b""]

    async def scene(server: ScriptedServer, origin: Origin) -> None:
        for _ in range(len(whole)):
            assert await read(origin, PART) == BODY[7:]
        assert len(server.requests) == 2 * len(whole)
        assert origin.fallback_reads == 0

    play(script, scene)


def test_where_no_proxy_is_to_be_used_our_client_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(server: ScriptedServer, origin: Origin) -> None:
        assert await read(origin) == BODY
        assert (len(server.requests), origin.fallback_reads) == (1, 0)

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    play(lambda request: [answer()], scene)


def test_an_answer_to_another_request_is_noticed_and_its_connection_used_no_more() -> None:
    """As a proxy gives it that is out of step: each answer on the connection is that to the request before."""
    other = {
        "another object": answer(b"HELLO, WORLD", etag="f"),
        "another part": answer(BODY[:5], "Content-Range: bytes 0-4/12", start="206 Partial Content"),
        "gone": answer(error("NoSuchKey"), start="404 Not Found"),
        "refused": answer(error("PreconditionFailed"), start="412 Precondition Failed"),
    }
    part = answer(BODY[7:], "Content-Range: bytes 7-11/12", start="206 Partial Content")

    def play_with(astray: bytes) -> None:
        async def scene(server: ScriptedServer, origin: Origin) -> None:
            assert await read(origin, PART) == BODY[7:]
            server.script = lambda request: [astray if is_ours(request) else part]
            assert await read(origin, PART) == BODY[7:]
            server.script = lambda request: [part]
            assert await read(origin, PART) == BODY[7:]
            assert [is_ours(request) for request in server.requests] == [True, True, False, True]
            assert (server.connections, origin.fallback_reads) == (3, 1)

        play(lambda request: [part], scene)

    for astray in other.values():
        play_with(astray)


def test_a_dataset_that_was_replaced_does_not_end_the_use_of_our_client(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(server: ScriptedServer, origin: Origin) -> None:
        for _ in range(20):
            assert await read(origin) == BODY
            with pytest.raises(ObjectChanged):
                await read(origin, replace(WHOLE, key=b"replaced"))
        for _ in range(20):
            with pytest.raises(ObjectChanged):
                await read(origin, replace(WHOLE, key=b"replaced"))
        assert await read(origin) == BODY
        assert is_ours(server.requests[-1])

    play(lambda request: [answer(etag="f" if "replaced" in request else "e")], scene)
    assert "through aiobotocore" not in caplog.text


def test_what_a_new_connection_says_is_final_at_once() -> None:
    async def scene(server: ScriptedServer, origin: Origin) -> None:
        with pytest.raises(ObjectChanged, match="gone since"):
            await read(origin)
        assert (len(server.requests), origin.fallback_reads) == (1, 0)

    play(lambda request: [answer(error("NoSuchKey"), "Connection: close", start="404 Not Found")], scene)


@pytest.mark.parametrize(
    ("start", "body", "said"),
    [
        ("200 OK", b"<html>We are back soon", "has no ETag"),
        ("408 Request Timeout", b"<html><body><h1>408 Request Time-out</h1>", None),
        ("403 Forbidden", error("RequestTimeTooSkewed"), "set this node's clock"),
        ("502 Bad Gateway", b"<html>", "502"),
        ("400 Bad Request", error("RequestTimeout"), "overloaded"),
    ],
)
def test_what_passes_is_waited_for(start: str, body: bytes, said: str | None) -> None:
    answers = iter([answer(body, "Connection: close", start=start).replace(b'ETag: "e"', b"X: x")] * 3 + [answer()])

    async def scene(server: ScriptedServer, origin: Origin) -> None:
        patience = Deadline.after(20)
        assert bytes(await origin.read(WHOLE, patience)) == BODY
        assert len(server.requests) == 4
        assert said is None or said in str(patience.last_error)

    play(lambda request: [next(answers)], scene)


def test_a_server_that_sends_a_byte_now_and_then_is_given_up_at_the_deadline() -> None:
    async def scene(server: ScriptedServer, origin: Origin) -> None:
        server.pause = 0.01
        with pytest.raises(OriginUnavailable, match="s3://bucket/key"):
            await read(origin, seconds=0.1)
        server.drop_all()
        server.script, server.pause = (lambda request: [answer()]), 0.0
        assert await read(origin) == BODY

    play(lambda request: (bytes([byte]) for byte in answer()), scene)


def test_keys_with_odd_characters_are_asked_for_as_they_are() -> None:
    keys = ["a b", "a+b", "a%2Fb", "e\u0301", "a//b", "./a", "a/../b", "a/", "/a", "?x=1", "#f", "&", "\\", "~", "\x7f"]

    async def scene(server: ScriptedServer, origin: Origin) -> None:
        for key in keys:
            assert await read(origin, replace(WHOLE, key=key.encode())) == BODY
        paths = [request.split(" ", 2)[1] for request in server.requests]
        assert [unquote(path).removeprefix("/bucket/") for path in paths] == keys
        assert all(path.isascii() and path.isprintable() for path in paths)
        assert origin.fallback_reads == 0

    play(lambda request: [answer()], scene)


def test_the_last_bytes_of_a_very_large_object() -> None:
    size = 5 * 2**40
    span = f"bytes {size - 5}-{size - 1}/{size}"

    async def scene(server: ScriptedServer, origin: Origin) -> None:
        assert await read(origin, ObjectRange(b"key", b"e", size, size - 5, 5)) == b"world"
        assert f"range: bytes={size - 5}-{size - 1}\r\n" in server.requests[0]
        assert origin.fallback_reads == 0

    play(lambda request: [answer(b"world", f"Content-Range: {span}", start="206 Partial Content")], scene)


def test_an_object_without_bytes() -> None:
    async def scene(server: ScriptedServer, origin: Origin) -> None:
        assert await read(origin, ObjectRange(b"key", b"e", 0, 0, 0)) == b""
        assert await read(origin, ObjectRange(b"key", b"e", 0, 0, 0)) == b""
        assert (server.connections, origin.fallback_reads) == (1, 0)

    play(lambda request: [answer(b"")], scene)


def test_credentials_that_expire_while_many_read_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"tester"}

    def script(request: str) -> Iterable[bytes]:
        key = request.partition("Credential=")[2].partition("/")[0]
        return [answer() if key in good else answer(error("ExpiredToken"), start="400 Bad Request")]

    async def scene(server: ScriptedServer, origin: Origin) -> None:
        async def reader() -> None:
            for number in range(30):
                if number == 10 and good == {"tester"}:
                    good.clear()
                    good.add("renewed")
                    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
                assert await read(origin) == BODY

        await asyncio.gather(*(reader() for _ in range(8)))
        assert origin.requests == len(server.requests)
        assert 240 < len(server.requests) < 300
        assert origin.fallback_reads == 0

    play(script, scene)


def test_wrong_credentials_say_so_at_once() -> None:
    async def scene(server: ScriptedServer, origin: Origin) -> None:
        with pytest.raises(OriginAccessDenied, match="SignatureDoesNotMatch"):
            await read(origin)
        assert len(server.requests) == 1

    play(lambda request: [answer(error("SignatureDoesNotMatch"), start="403 Forbidden")], scene)


def test_certificates_are_found_as_botocore_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tls = SSLContext(PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE)

    async def refused(server: ScriptedServer, origin: Origin) -> None:
        with pytest.raises(OriginUnavailable, match="AWS_CA_BUNDLE"):
            await read(origin, seconds=2)
        assert not server.requests

    async def trusted(server: ScriptedServer, origin: Origin) -> None:
        assert await read(origin) == BODY
        assert is_ours(server.requests[0])

    play(unless_ours(answer()), refused, tls)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(CERTIFICATE))
    play(unless_ours(answer()), trusted, tls)


def test_through_a_proxy_only_aiobotocore_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(server: ScriptedServer, origin: Origin) -> None:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
        assert await read(origin) == BODY
        assert not any(map(is_ours, server.requests))
        assert server.requests[0].startswith("GET http://")
        assert (origin.requests, origin.errors, origin.fallback_reads) == (1, 0, 1)

    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    play(lambda request: [answer()], scene)
