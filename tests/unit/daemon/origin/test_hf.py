"""What is special about hf://."""

import hashlib
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.errors import ConfigError, NotFound, ObjectChanged, OriginAccessDenied, OriginUnavailable
from cachefs.messages import OriginOptions
from cachefs_daemon.origin.base import Origin
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.web import bearer
from tests import virtual_time
from tests.servers import faulty
from tests.servers.faulty import Fault
from tests.servers.scripted import ScriptedServer, scripted
from tests.servers.stores import HubServer, StoreServer
from tests.stores import SETTINGS, Kind, listing, part_of, read, whole, with_origin

pytestmark = pytest.mark.usefixtures("clean_environment")


def test_a_listing_of_the_hub_stays_as_it_was(servers: dict[str, StoreServer]) -> None:
    kind, server = Kind("hf", servers), servers["hf"]
    assert isinstance(server, HubServer)
    kind.fill({"small": b"before", "dir/large": b"before" * 50, "dir/kept": b"kept" * 50})

    async def work(origin: Origin) -> None:
        found = await listing(origin)
        first = server.main
        server.commit({"small": b"after!", "dir/large": b"after!" * 50, "dir/kept": b"kept" * 50})
        assert await read(origin, whole(found["small"])) == b"before"
        assert await read(origin, part_of(found["dir/large"], 6, 6)) == b"before"
        later = await listing(origin)
        assert await read(origin, whole(later["small"])) == b"after!"
        # What a commit has not changed has the same content, at another place.
        assert later["dir/kept"].version.partition(b"\0")[0] == found["dir/kept"].version.partition(b"\0")[0]
        assert later["dir/kept"].version != found["dir/kept"].version
        url = f"hf://datasets/team/set@{first}/dir"
        of_first = open_origin(url, OriginOptions(endpoint_url=server.endpoint), SETTINGS)
        below = await listing(of_first)
        assert await read(of_first, whole(below["large"])) == b"before" * 50
        assert below["large"].version == found["dir/large"].version
        await of_first.close()

    with_origin(kind.open(), work)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("@refs/convert/parquet", ["dir/file", "top"]),
        ("@refs/pr/3/dir", ["file"]),
        ("@refs%2Fpr%2F3/dir/", ["file"]),
        ("@feature%2Fnew", ["dir/file", "top"]),
    ],
)
def test_a_revision_is_named_as_the_hub_writes_it(
    url: str, expected: list[str], servers: dict[str, StoreServer]
) -> None:
    kind = Kind("hf", servers)
    kind.fill({"dir/file": b"bytes", "top": b"t"})
    options = OriginOptions(endpoint_url=kind.server.endpoint)

    async def work(origin: Origin) -> None:
        found = await listing(origin)
        assert sorted(found) == expected
        for listed in found.values():
            assert len(await read(origin, whole(listed))) == listed.size

    with_origin(open_origin(f"hf://datasets/team/set{url}", options, SETTINGS), work)


@pytest.mark.parametrize("url", ["@feature/new", "@refs/heads/main", "@refs/pr/3x"])
def test_another_revision_with_slashes_is_told_how_to_write_them(url: str, servers: dict[str, StoreServer]) -> None:
    options = OriginOptions(endpoint_url=servers["hf"].endpoint)
    with pytest.raises(NotFound, match=r"has no revision (feature|refs) .*%2F"):
        with_origin(open_origin(f"hf://datasets/team/set{url}", options, SETTINGS), listing)


def test_one_wrong_byte_of_a_large_file_of_the_hub(servers: dict[str, StoreServer]) -> None:
    kind, far = Kind("hf", servers), servers["far"]
    kind.fill({"large": b"x" * 300})

    async def work(origin: Origin) -> None:
        listed = (await listing(origin))["large"]
        far.put(hashlib.sha256(b"x" * 300).hexdigest(), b"x" * 299 + b"y")
        with pytest.raises(ObjectChanged, match="sha256"):
            await read(origin, whole(listed))

    with_origin(kind.open(), work)


def test_a_token_of_the_hub_goes_to_the_hub_only(
    servers: dict[str, StoreServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FilesServer, to which large files redirect, fails where a token comes."""
    kind, server = Kind("hf", servers), servers["hf"]
    kind.fill({"large": b"x" * 300, "small": b"y"})
    monkeypatch.setattr(server, "token", "hf_secret")
    monkeypatch.setattr(bearer, "RENEW_SECONDS", 0)

    async def refused(origin: Origin) -> None:
        with pytest.raises(OriginAccessDenied, match="is private") as caught:
            await listing(origin)
        assert "HF_TOKEN" in str(caught.value)

    with_origin(kind.open(), refused)
    (tmp_path / "token").write_text("hf_secret\n")

    async def work(origin: Origin) -> None:
        for listed in (await listing(origin)).values():
            assert len(await read(origin, whole(listed))) == listed.size
        assert origin.errors == 0

    with_origin(kind.open(), work)
    (tmp_path / "token").unlink()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with_origin(kind.open(), work)
    monkeypatch.setattr(server, "gated", True)
    with pytest.raises(OriginAccessDenied, match=r"is gated .*; accept its conditions"):
        with_origin(kind.open(), listing)


def test_a_revision_that_is_not_there(servers: dict[str, StoreServer]) -> None:
    kind = Kind("hf", servers)
    kind.fill({"file": b"x"})
    origin = open_origin("hf://datasets/team/set@v9", OriginOptions(endpoint_url=kind.server.endpoint), SETTINGS)
    with pytest.raises(NotFound, match="no revision v9"):
        with_origin(origin, listing)


def test_a_listing_that_always_names_another_page_is_one_clear_line() -> None:
    commit, numbers = "0" * 40, itertools.count()

    def answer(head: str) -> list[bytes]:
        if "/revision/" in head:
            body, link = b'{"sha": "%b"}' % commit.encode(), b""
        else:
            next_page = b"http://127.0.0.1:%d/api/%d" % (server.port, next(numbers))
            body, link = b"[]", b'Link: <%b>; rel="next"\r\n' % next_page
        return [b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (link, len(body), body)]

    async def scene() -> None:
        nonlocal server
        async with scripted(answer) as server:
            options = OriginOptions(endpoint_url=f"http://127.0.0.1:{server.port}", anonymous=True)
            origin = open_origin("hf://datasets/team/set", options, replace(SETTINGS, max_pages=20))
            with pytest.raises(ConfigError, match=r"more than 20 pages, or no end.*origin\.max_pages"):
                await listing(origin)
            await origin.close()

    server: ScriptedServer
    virtual_time.run(scene())


@pytest.mark.parametrize(
    ("where", "reason"), [("{}", "repeats itself"), ("http://other.invalid/x", "on another server")]
)
def test_a_listing_that_would_not_end_or_leads_away(servers: dict[str, StoreServer], where: str, reason: str) -> None:
    kind, server = Kind("hf", servers), servers["hf"]
    assert isinstance(server, HubServer)
    kind.fill({"file": b"x"})
    with faulty.running(server.endpoint) as proxy:
        url = where.format(f"{proxy.endpoint}/api/datasets/team/set/tree/{server.main}?recursive=true")
        proxy.add(Fault(path="/tree/", headers={"Link": f'<{url}>; rel="next"'}, times=None))
        with pytest.raises(OriginUnavailable, match=reason):
            with_origin(kind.open(proxy.endpoint), listing)
