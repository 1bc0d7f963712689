"""Origins over HTTP with small servers that follow the stores' APIs: what all of them promise."""

import re
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.errors import (
    CachefsError,
    ConfigError,
    NotFound,
    ObjectChanged,
    OriginError,
    OriginUnavailable,
)
from cachefs.extras import install_command
from cachefs.messages import OriginOptions
from cachefs_bench.lab.ports import free_port
from cachefs_daemon.origin.base import ObjectRange, Origin
from cachefs_daemon.origin.kinds import open_origin
from cachefs_daemon.origin.refusals import Refusal
from cachefs_daemon.origin.web import client as web_client
from cachefs_daemon.origin.web import origin as web
from cachefs_daemon.origin.web.gs import GOOGLE
from tests.servers import faulty
from tests.servers.faulty import Fault, FaultyProxy
from tests.servers.stores import FilesServer, StoreServer, running
from tests.stores import SETTINGS, Kind, listing, part_of, read, read_twice, whole, with_origin

pytestmark = pytest.mark.usefixtures("clean_environment")


ODD_KEYS = [
    "plain",
    "a b",
    "a+b",
    "a%20b",
    "100%",
    "é/ü",
    "中文/字",
    "a&b<c>",
    "q?x#y",
    "tab\tx",
    "~t",
    "*",
    " lead",
    "a;b",
]


@pytest.fixture(params=["gs", "az", "http", "hf"])
def kind(request: pytest.FixtureRequest, servers: dict[str, StoreServer]) -> Kind:
    return Kind(request.param, servers)


def test_every_key_is_listed_and_read(kind: Kind) -> None:
    contents = {key: (key * 40).encode() for key in ODD_KEYS}
    kind.fill(contents)

    async def work(origin: Origin) -> None:
        found = await listing(origin)
        assert {key: listed.size for key, listed in found.items()} == {key: len(contents[key]) for key in contents}
        for key, listed in found.items():
            assert await read(origin, whole(listed)) == contents[key]
            assert await read(origin, part_of(listed, 3, 20)) == contents[key][3:23]
            assert await read(origin, part_of(listed, listed.size - 5, 5)) == contents[key][-5:]
        assert origin.errors == 0

    with_origin(kind.open(), work)


@pytest.mark.parametrize("name", ["gs", "az"])
def test_a_url_of_an_object_says_which_directory_to_name(name: str, servers: dict[str, StoreServer]) -> None:
    kind = Kind(name, servers)
    kind.fill({"dir/file": b"bytes", "dir/files": b"more"})
    options = OriginOptions(
        endpoint_url=f"{kind.server.endpoint}/someaccount" if name == "az" else kind.server.endpoint,
        anonymous=name == "gs",
    )
    with pytest.raises(NotFound, match=rf"^{name}://set/dir/file is an object, .*: {name}://set/dir$"):
        with_origin(open_origin(f"{name}://set/dir/file", options, SETTINGS), listing)
    assert with_origin(open_origin(f"{name}://set/dir/fil", options, SETTINGS), listing) == {}


@pytest.mark.parametrize("name", ["gs", "az", "http"])  # what a commit of the hub has never changes
def test_a_replaced_or_deleted_object_is_an_error_and_never_other_bytes(
    name: str, servers: dict[str, StoreServer]
) -> None:
    kind = Kind(name, servers)
    kind.fill({"same size": b"before", "shorter": b"before", "deleted": b"before"})

    async def work(origin: Origin) -> None:
        found = await listing(origin)
        kind.replace("same size", b"after!")
        kind.replace("shorter", b"x")
        kind.server.delete("set/deleted")
        for key, listed in found.items():
            for wanted in (whole(listed), part_of(listed, 2, 3)):
                with pytest.raises(ObjectChanged, match=key):
                    await read(origin, wanted)

    with_origin(kind.open(), work)


def test_an_object_that_is_replaced_although_the_server_ignores_the_condition(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a proxy that answers out of its cache: the answer says which version it has."""
    kind.fill({"file": b"before" * 50})
    with faulty.running(kind.server.endpoint) as proxy:
        kind = Kind(kind.name, {kind.name: kind.server})

        async def work(origin: Origin) -> None:
            listed = (await listing(origin))["file"]
            others = {"x-goog-generation": "1", "etag": '"another"', "x-linked-etag": '"another"'}
            proxy.add(Fault(path="file", headers=others, times=None))
            for wanted in (whole(listed), part_of(listed, 2, 3)):
                with pytest.raises(ObjectChanged, match="file"):
                    await read(origin, wanted)

        with_origin(kind.open(proxy.endpoint), work)


@pytest.fixture(params=["gs", "az", "http"])
def fault_kind(request: pytest.FixtureRequest, servers: dict[str, StoreServer]) -> Iterator[tuple[Kind, FaultyProxy]]:
    found = Kind(request.param, servers)
    found.fill({"file": b"0123456789" * 30})
    with faulty.running(found.server.endpoint) as proxy:
        yield found, proxy


@pytest.mark.parametrize(
    "fault",
    [
        Fault(drop=True),
        Fault(status=503),
        Fault(status=429),
        Fault(headers={"etag": "", "x-goog-generation": ""}),
        Fault(truncate=100),
        Fault(truncate=0),
        Fault(replace=b"0123456789" * 29 + b"012345678X"),
    ],
    ids=["dropped", "503", "429", "no version", "cut short", "no body", "one wrong byte"],
)
def test_what_goes_wrong_once_is_tried_again(fault_kind: tuple[Kind, FaultyProxy], fault: Fault) -> None:
    kind, proxy = fault_kind

    async def work(origin: Origin) -> None:
        listed = (await listing(origin))["file"]
        proxy.add(Fault(**{**fault.__dict__, "path": "file", "times": 1}))
        assert await read(origin, whole(listed)) == b"0123456789" * 30
        # aiohttp itself asks again where a connection that it has used before is closed.
        assert origin.errors == (0 if fault.drop else 1)

    with_origin(kind.open(proxy.endpoint), work)


@pytest.mark.parametrize(
    ("status", "said", "throttled", "seconds"),
    [
        (429, None, True, 0.0),
        (429, "7", True, 7.0),
        (503, None, False, 0.0),
        (503, "2", True, 2.0),
        (500, "2", False, 2.0),
    ],
)
def test_a_server_that_says_when_to_come_back(status: int, said: str | None, throttled: bool, seconds: float) -> None:
    failure = GOOGLE.judge(Refusal(status, retry_after=said), {"where": "gs://bucket/key"}, is_listing=False)
    assert (failure.transient, failure.throttled, failure.retry_after) == (True, throttled, seconds)


def test_wrong_bytes_that_stay_are_never_delivered(fault_kind: tuple[Kind, FaultyProxy]) -> None:
    kind, proxy = fault_kind

    async def work(origin: Origin) -> None:
        listed = (await listing(origin))["file"]
        proxy.add(Fault(path="file", replace=b"x" * 300, times=None))
        with pytest.raises(ObjectChanged, match="file"):
            await read(origin, whole(listed))
        proxy.clear()
        proxy.add(Fault(path="file", extra=b"y", times=None))
        with pytest.raises(OriginError, match=r"file.*a proxy may unpack"):
            await read(origin, whole(listed))
        with pytest.raises(OriginError, match=r"file.*a proxy may unpack"):
            await read(origin, part_of(listed, 10, 20))

    with_origin(kind.open(proxy.endpoint), work)


def test_a_server_that_knows_no_ranges(fault_kind: tuple[Kind, FaultyProxy]) -> None:
    kind, proxy = fault_kind

    async def work(origin: Origin) -> None:
        listed = (await listing(origin))["file"]
        proxy.add(Fault(path="file", replace=b"0123456789" * 30, times=None))
        assert await read(origin, part_of(listed, 105, 10)) == b"5678901234"
        assert await read(origin, part_of(listed, 295, 5)) == b"56789"

    with_origin(kind.open(proxy.endpoint), work)


def test_an_outage_lasts_as_long_as_the_reader_waits(kind: Kind) -> None:
    kind.fill({"file": b"bytes"})

    async def work(origin: Origin) -> None:
        version = {"gs": "1", "az": "0x1", "http": "etag:x", "hf": f"git:{'0' * 40}\0{'1' * 40}"}[kind.name]
        with pytest.raises(OriginUnavailable, match="no server answers"):
            await read_twice(origin, ObjectRange(b"file", version.encode(), 5, 0, 5))
        assert origin.errors == 2

    with_origin(kind.open(f"http://127.0.0.1:{free_port()}"), work)


def test_what_cannot_be_listed_is_one_clear_line(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    kind.server.objects.clear()

    async def work(origin: Origin) -> None:
        with pytest.raises(CachefsError) as caught:
            await listing(origin)
        assert isinstance(caught.value, NotFound)
        assert "\n" not in str(caught.value)

    with_origin(kind.open(), work)


def test_a_redirect_that_leads_nowhere_ends(servers: dict[str, StoreServer]) -> None:
    kind = Kind("http", servers)
    kind.fill({"file": b"bytes"})

    async def work(origin: Origin) -> None:
        listed = (await listing(origin))["file"]
        proxy.add(Fault(path="file", status=302, headers={"Location": "/set/file"}, times=None))
        with pytest.raises(OriginUnavailable, match="redirects more than 5 times"):
            await read_twice(origin, whole(listed))

    with faulty.running(kind.server.endpoint) as proxy:
        with_origin(kind.open(proxy.endpoint), work)


def test_what_is_learned_of_a_server_serves_all_its_datasets(
    servers: dict[str, StoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gs", "az", "http", "hf"):
        kind = Kind(name, servers)
        one, same = kind.open(), kind.open()
        assert one.endpoint is same.endpoint
        assert one.endpoint is not kind.open("http://127.0.0.1:1").endpoint
    one, *others = (
        open_origin(url, OriginOptions(), SETTINGS)
        for url in ["http://h/a", "http://h/b/index.jsonl", "https://h/a", "http://h:81/a"]
    )
    assert [one.endpoint is other.endpoint for other in others] == [True, False, False]


@pytest.mark.parametrize("where", ["http://h/x", "ftp://h/x", "https://u:p@h/x", "file:///etc/passwd"])
def test_a_redirect_that_is_not_followed(where: str) -> None:
    with pytest.raises(web_client.BrokenWebResponse, match="it redirects to"):
        web_client.redirect_target("https://h/", where)


def test_a_server_is_believed_by_its_certificate_only(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = Path(faulty.__file__).parent / "localhost.pem"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    server = FilesServer()
    with running(server, tls=tls):
        kind = Kind("http", {"http": server})
        kind.fill({"file": b"bytes"})

        async def work(origin: Origin) -> None:
            assert await read(origin, whole((await listing(origin))["file"])) == b"bytes"

        monkeypatch.setattr(web, "_FIRST_PAGE_TRIED", 0)
        with pytest.raises(
            OriginUnavailable, match=r"certificate is not trusted, .* \(self.signed certificate.*REQUESTS_CA_BUNDLE"
        ):
            with_origin(kind.open(), listing)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        with_origin(kind.open(), work)


@pytest.mark.parametrize(("name", "package", "extra"), [("gs", "google", "gs"), ("az", "azure", "az")])
def test_a_package_that_is_not_installed_is_one_clear_line(
    name: str, package: str, extra: str, servers: dict[str, StoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    for module in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    for module in ("google.auth", "azure.core.exceptions", "azure.core", "azure.identity"):
        monkeypatch.setitem(sys.modules, module, None)

    async def work(origin: Origin) -> None:
        with pytest.raises(ConfigError, match=re.escape(install_command(extra))):
            await listing(origin)

    with_origin(Kind(name, servers).open(anonymous=False), work)


@pytest.mark.parametrize(
    "url", ["hf://datasets", "hf://datasets/a", "hf://models/a/b", "hf://datasets/a/b@", "gs://", "az://"]
)
def test_a_url_that_names_nothing(url: str) -> None:
    with pytest.raises(ConfigError, match="must look like"):
        open_origin(url, OriginOptions(), SETTINGS)


def test_credentials_are_not_sent_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's name is never looked up."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    origin = open_origin("hf://datasets/a/b", OriginOptions(endpoint_url="http://hub.invalid"), SETTINGS)
    with pytest.raises(ConfigError, match="without TLS") as caught:
        with_origin(origin, listing)
    assert "hf_secret" not in str(caught.value)
