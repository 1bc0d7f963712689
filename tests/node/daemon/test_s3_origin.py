"""The S3 origin against real servers: one that does everything right, and one that ignores If-Match and ranges."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from cachefs.errors import CachefsError, ConfigError, NotFound, ObjectChanged, OriginAccessDenied, OriginUnavailable
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from cachefs_bench.lab.ports import free_port
from cachefs_daemon.origin.base import ObjectRange, Origin, OriginSettings
from cachefs_daemon.origin.deadline import Deadline
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.s3 import listing as s3_listing
from cachefs_daemon.origin.s3 import origin as s3
from cachefs_daemon.origin.s3.origin import S3Origin
from tests.servers.s3 import S3Server

# Control characters besides the tab are left out: rclone never answers a request for them.
ODD_KEYS = [
    "plain", "a b", "a+b", "a%20b", "100%", "é/ü", "中文/字", "a&b<c>", "q?x#y", "emoji😀/f", "\uffee/z",
    "back\\slash", "'quote\"", "~t", "*", "trail ", " lead", "a=b;c,d",
]  # fmt: skip

Result = TypeVar("Result")


@pytest.fixture(scope="module", params=["radosgw", "rclone"])
def server(request: pytest.FixtureRequest) -> S3Server:
    """With a bucket `odd` that holds each odd key below `set/`, its content being the key ten times."""
    found: S3Server = request.getfixturevalue(request.param)
    found.create_bucket("odd")
    found.put("odd", {f"set/{key}": key.encode() * 10 for key in ODD_KEYS} | {"set2/x": b"other", "settle": b"other"})
    return found


@pytest.fixture(autouse=True)
def _credentials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    used = "server" if "server" in request.fixturenames else "radosgw"
    for name, value in request.getfixturevalue(used).environment.items():
        monkeypatch.setenv(name, value)


def with_origin(url: str, endpoint: str, work: Callable[[Origin], Awaitable[Result]], **options: object) -> Result:
    async def run() -> Result:
        chosen = OriginOptions(endpoint_url=endpoint, **options)  # type: ignore[arg-type]
        origin = open_origin(url, chosen, OriginSettings(connect_timeout=2, read_timeout=5))
        try:
            return await work(origin)
        finally:
            await origin.close()

    return asyncio.run(run())


async def listing(origin: Origin) -> list[ListedObject]:
    return [
        found async for batch in origin.list(lambda key, reason: pytest.fail(f"{key!r} {reason}")) for found in batch
    ]


def part_of(listed: ListedObject, offset: int, length: int) -> ObjectRange:
    return ObjectRange(listed.key, listed.version, listed.size, offset, length)


def test_every_key_is_listed_and_read(server: S3Server) -> None:
    async def work(origin: Origin) -> None:
        found = {listed.key.decode(): listed for listed in await listing(origin)}
        assert set(found) == set(ODD_KEYS)
        for key, listed in found.items():
            content = key.encode() * 10
            assert listed.size == len(content)
            assert await origin.read(part_of(listed, 0, listed.size), Deadline.after(10)) == content
            assert await origin.read(part_of(listed, 3, 5), Deadline.after(10)) == content[3:8]

    with_origin("s3://odd/set/", server.endpoint, work)


def test_what_changed_is_an_error_that_names_it(server: S3Server) -> None:
    server.create_bucket("changing")
    server.put("changing", {"rewritten": b"before", "shorter": b"before", "deleted": b"before"})

    async def list_now(origin: Origin) -> dict[bytes, ListedObject]:
        return {listed.key: listed for listed in await listing(origin)}

    found = with_origin("s3://changing", server.endpoint, list_now)
    server.put("changing", {"rewritten": b"beyond", "shorter": b"x"})
    server.delete("changing", ["deleted"])

    async def work(origin: Origin) -> None:
        for key, listed in found.items():
            for offset, length in ((0, 6), (2, 4)):
                with pytest.raises(ObjectChanged, match=f"s3://changing/{key.decode()} .*refresh"):
                    await origin.read(part_of(listed, offset, length), Deadline.after(10))

    with_origin("s3://changing", server.endpoint, work)


def test_an_empty_object(server: S3Server) -> None:
    server.create_bucket("empty")
    server.put("empty", {"nothing": b""})

    async def work(origin: Origin) -> None:
        (listed,) = await listing(origin)
        assert (listed.size, listed.key) == (0, b"nothing")
        assert await origin.read(part_of(listed, 0, 0), Deadline.after(10)) == b""

    with_origin("s3://empty", server.endpoint, work)


@pytest.mark.parametrize(
    ("url", "options", "error", "message"),
    [
        ("s3://nosuchbucket/x", {}, NotFound, "no bucket nosuchbucket at"),
        ("s3://odd/set", {"anonymous": True}, (OriginAccessDenied, OriginUnavailable), "s3://odd/"),
        ("s3://bad_name!/x", {}, ConfigError, "bad_name!"),
        ("s3:///x", {}, ConfigError, "names no bucket"),
        ("s3://odd/settle", {}, NotFound, "^s3://odd/settle is an object, .*: s3://odd$"),
        ("s3://odd/set", {"profile": "absent"}, ConfigError, r"^The config profile \(absent\) .*--profile"),
        ("s3://odd/set", {"addressing_style": "sideways"}, ConfigError, "sideways"),
    ],
)
def test_bad_settings_are_named(
    server: S3Server, url: str, options: dict[str, object], error: type[CachefsError], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        with_origin(url, server.endpoint, listing, **options)
    assert "\n" not in str(raised.value)


def test_an_endpoint_without_a_scheme_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"'127.0.0.1:17480' must begin with http:// or https://"):
        with_origin("s3://odd/set", "127.0.0.1:17480", listing)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:{port}", "nonsense"])
def test_unreachable_endpoints_are_named(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_FIRST_PAGE_SECONDS", 0.1)
    endpoint = endpoint.format(port=free_port())
    with pytest.raises((OriginUnavailable, ConfigError), match=endpoint) as raised:
        with_origin("s3://odd/set", endpoint, listing)
    assert str(raised.value).count(endpoint) == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", "nobody"), ("AWS_ACCESS_KEY_ID", "")],
)
def test_wrong_credentials(server: S3Server, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(OriginAccessDenied, match="credentials"):
        with_origin("s3://odd/set", server.endpoint, listing)


def test_a_large_bucket_is_listed_in_parallel_and_whole(radosgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short pages: a flat directory, many small ones, nested ones, and keys around the borders of ranges."""
    keys = {f"flat/{number:05}" for number in range(330)}
    keys |= {f"small/{number:03}/{file}" for number in range(18) for file in "ab"}
    keys |= {f"deep/{number % 3}/{number % 11}/{number}" for number in range(90)}
    keys |= {f"{name}{end}" for name in ("small", "deep/1") for end in ("", "!", "-x", "0", "é")} | {"small/007/", ""}
    radosgw.create_bucket("many")
    radosgw.put("many", {f"p/{key}": b"" for key in keys} | {"p!": b"", "p0": b"", "p": b"", "q": b""})
    monkeypatch.setattr(s3_listing, "_FIRST_PAGES", 1)

    async def work(origin: Origin) -> tuple[list[ListedObject], int]:
        assert isinstance(origin, S3Origin)
        page = origin._fetch_page
        monkeypatch.setattr(origin, "_fetch_page", lambda **query: page(**{"MaxKeys": 12, **query}))
        return await listing(origin), origin.requests

    found, requests = with_origin("s3://many/p", radosgw.endpoint, work)
    assert sorted(listed.key.decode() for listed in found) == sorted(keys)
    assert requests > 40
