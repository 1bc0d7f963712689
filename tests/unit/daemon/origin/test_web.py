"""Origins over HTTP with small servers that follow the stores' APIs: what all of them promise, and what each adds."""

import asyncio
import base64
import gzip
import hashlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from cachefs_daemon.origin import bearer, web_client
from cachefs_daemon.origin.base import ObjectRange, Origin, OriginSettings, open_origin
from cachefs_daemon.origin.patience import Patience

from cachefs.errors import (
    CachefsError,
    ConfigError,
    NotFound,
    ObjectChanged,
    OriginAccessDenied,
    OriginUnavailable,
)
from cachefs.messages import OriginOptions
from cachefs.snapshot_builder import ListedObject
from tests.servers import faulty
from tests.servers.faulty import Fault, FaultyProxy
from tests.servers.process import free_port
from tests.servers.stores import AzureServer, FilesServer, GoogleServer, HubServer, StoreServer, running

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
SETTINGS = OriginSettings(connect_timeout=2, read_timeout=5)

Result = TypeVar("Result")


class Kind:
    """A store with objects, and how to open it as an origin."""

    def __init__(self, name: str, servers: dict[str, StoreServer]) -> None:
        self.name = name
        self.server = servers[name]

    def fill(self, objects: dict[str, bytes]) -> None:
        """Replace everything by these objects."""
        self.server.objects.clear()
        if isinstance(self.server, HubServer):
            self.server.commit(objects)
            return
        for key, data in objects.items():
            self.server.put(f"set/{key}", data)
        if self.name == "http":
            self.server.put("set/index.jsonl", index_of(self.server, objects))

    def replace(self, key: str, data: bytes) -> None:
        """Upload another object with this key."""
        self.server.put(f"set/{key}", data)

    def url(self, endpoint: str) -> str:
        urls = {"gs": "gs://set", "az": "az://set", "hf": "hf://datasets/team/set", "http": f"{endpoint}/set/"}
        return urls[self.name]

    def open(self, endpoint: str = "", **options: object) -> Origin:
        endpoint = endpoint or self.server.endpoint
        of_server = f"{endpoint}/someaccount" if self.name == "az" else endpoint
        values = {"endpoint_url": of_server, "anonymous": self.name == "gs", **options}
        return open_origin(self.url(endpoint), OriginOptions(**values), SETTINGS)  # type: ignore[arg-type]


def index_of(server: StoreServer, objects: dict[str, bytes]) -> bytes:
    lines = [
        {"path": key, "size": len(data), "etag": f'"another {server.versions[f"set/{key}"]}"'}
        | {"sha256": hashlib.sha256(data).hexdigest()}
        for key, data in objects.items()
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, StoreServer]]:
    far = FilesServer()
    found = {"gs": GoogleServer(), "az": AzureServer(), "http": FilesServer(), "hf": HubServer(far=far), "far": far}
    with running(*found.values()):
        yield found


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AZURE_", "GOOGLE_", "HF_", "STORAGE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name, value in AzureServer().environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["gs", "az", "http", "hf"])
def kind(request: pytest.FixtureRequest, servers: dict[str, StoreServer]) -> Kind:
    return Kind(request.param, servers)


def with_origin(origin: Origin, work: Callable[[Origin], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        try:
            return await work(origin)
        finally:
            await origin.close()

    return asyncio.run(run())


async def listing(origin: Origin) -> dict[str, ListedObject]:
    def fail(key: bytes, reason: str) -> None:
        pytest.fail(f"{key!r} {reason}")

    return {found.key.decode(): found async for batch in origin.list(fail) for found in batch}


def part_of(listed: ListedObject, offset: int, length: int) -> ObjectRange:
    return ObjectRange(listed.key, listed.version, listed.size, offset, length)


def whole(listed: ListedObject) -> ObjectRange:
    return part_of(listed, 0, listed.size)


async def read(origin: Origin, wanted: ObjectRange, seconds: float = 10) -> bytes:
    return bytes(await origin.read(wanted, Patience.of(seconds)))


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
        Fault(truncate=100),
        Fault(truncate=0),
        Fault(replace=b"0123456789" * 29 + b"012345678X"),
    ],
    ids=["dropped", "503", "429", "cut short", "no body", "one wrong byte"],
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


def test_wrong_bytes_that_stay_are_never_delivered(fault_kind: tuple[Kind, FaultyProxy]) -> None:
    kind, proxy = fault_kind

    async def work(origin: Origin) -> None:
        listed = (await listing(origin))["file"]
        proxy.add(Fault(path="file", replace=b"x" * 300, times=None))
        with pytest.raises(ObjectChanged, match="file"):
            await read(origin, whole(listed))
        proxy.clear()
        proxy.add(Fault(path="file", extra=b"y", times=None))
        with pytest.raises(ObjectChanged, match="file"):
            await read(origin, whole(listed))
        with pytest.raises(ObjectChanged, match="file"):
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
            await read(origin, ObjectRange(b"file", version.encode(), 5, 0, 5), 0.3)
        assert origin.errors > 1

    with_origin(kind.open(f"http://127.0.0.1:{free_port()}"), work)


def test_what_cannot_be_listed_is_one_clear_line(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    kind.server.objects.clear()

    async def work(origin: Origin) -> None:
        with pytest.raises(CachefsError) as caught:
            await listing(origin)
        assert isinstance(caught.value, NotFound)
        assert "\n" not in str(caught.value)

    with_origin(kind.open(), work)


# --- gs:// -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service_account(servers: dict[str, StoreServer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its file. The server knows its public key, and gives it tokens."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    server = servers["gs"]
    assert isinstance(server, GoogleServer)
    server.public_key = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    path = tmp_path_factory.mktemp("google") / "account.json"
    facts = {"type": "service_account", "client_email": "a@b", "private_key": private.decode()}
    path.write_text(json.dumps(facts | {"token_uri": f"{server.endpoint}/token"}))
    return path


def test_a_google_token_is_renewed_when_it_is_refused(
    servers: dict[str, StoreServer], service_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(service_account))
    monkeypatch.setattr(bearer, "RENEW_SECONDS", 0)
    kind, server = Kind("gs", servers), servers["gs"]
    assert isinstance(server, GoogleServer)
    kind.fill({"file": b"secret"})
    monkeypatch.setattr(server, "tokens", {"another"})

    async def work(origin: Origin) -> None:
        listed = (await listing(origin))["file"]
        assert await read(origin, whole(listed)) == b"secret"
        before = origin.errors
        server.tokens = {"yet another", "and another"}
        assert await read(origin, whole(listed)) == b"secret"
        assert origin.errors == before + 1

    with_origin(kind.open(anonymous=False), work)

    async def refused(origin: Origin) -> None:
        with pytest.raises(OriginAccessDenied, match="without --anonymous"):
            await listing(origin)

    with_origin(kind.open(), refused)


def test_missing_google_credentials_are_one_clear_line(
    servers: dict[str, StoreServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none"))

    async def work(origin: Origin) -> None:
        with pytest.raises(OriginAccessDenied, match="GOOGLE_APPLICATION_CREDENTIALS"):
            await listing(origin)

    with_origin(Kind("gs", servers).open(anonymous=False), work)


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
        with pytest.raises(ConfigError, match=rf"pip install 'cachefs\[{extra}\]'"):
            await listing(origin)

    with_origin(Kind(name, servers).open(anonymous=False), work)


# --- az:// -----------------------------------------------------------------------------------------------------------


def test_azure_takes_a_shared_access_signature_and_an_identity(
    servers: dict[str, StoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, server = Kind("az", servers), servers["az"]
    assert isinstance(server, AzureServer)
    kind.fill({"file": b"bytes"})

    async def work(origin: Origin) -> None:
        assert await read(origin, whole((await listing(origin))["file"])) == b"bytes"

    monkeypatch.delenv("AZURE_STORAGE_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"?{server.signature}")
    with_origin(kind.open(), work)
    monkeypatch.delenv("AZURE_STORAGE_SAS_TOKEN")
    monkeypatch.setenv("IDENTITY_ENDPOINT", f"{server.endpoint}/identity")
    monkeypatch.setenv("IDENTITY_HEADER", "secret")
    with_origin(kind.open(), work)


def test_an_azure_key_is_used_for_its_own_account_only(
    servers: dict[str, StoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, server = Kind("az", servers), servers["az"]
    kind.fill({"file": b"bytes"})
    monkeypatch.setenv("AZURE_STORAGE_KEY", base64.b64encode(b"wrong").decode())
    with pytest.raises(OriginAccessDenied, match=r"403 AuthenticationFailed.*AZURE_STORAGE_KEY"):
        with_origin(kind.open(), listing)
    before = len(server.requests)
    with pytest.raises(OriginAccessDenied, match="Azure identity"):
        with_origin(kind.open(account="foreign"), listing)
    assert len(server.requests) == before
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    with pytest.raises(ConfigError, match="--account"):
        kind.open()


# --- http(s):// ------------------------------------------------------------------------------------------------------


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
        {"path": "good", "size": 5 << 20, "etag": "x"},
        {"path": "small", "size": 5, "sha256": digest, "mtime": 1.5, "unknown": 1},
    ]
    found, problems = problems_of(kind, "\n\n".join(json.dumps(line) for line in lines).encode())
    assert set(found) == {"good", "small"}
    assert found["small"].mtime_ns == 1_500_000_000
    assert set(problems) == {"nothing", "weak", "odd", "split", "large", "minus"}
    assert "cachectl index --url" in problems["large"]


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


@pytest.mark.parametrize("url", ["http://u:p@h/x", "https://h/x?token=1", "https://h/#x", "http://"])
def test_a_url_that_would_show_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must look like") as caught:
        open_origin(url, OriginOptions(), SETTINGS)
    assert "u:p" not in str(caught.value)
    assert "token" not in str(caught.value)


def test_a_redirect_that_leads_nowhere_ends(servers: dict[str, StoreServer]) -> None:
    kind = Kind("http", servers)
    kind.fill({"file": b"bytes"})

    async def work(origin: Origin) -> None:
        listed = (await listing(origin))["file"]
        proxy.add(Fault(path="file", status=302, headers={"Location": "/set/file"}, times=None))
        with pytest.raises(OriginUnavailable, match="redirects more than 5 times"):
            await read(origin, whole(listed), 0.2)

    with faulty.running(kind.server.endpoint) as proxy:
        with_origin(kind.open(proxy.endpoint), work)


@pytest.mark.parametrize("where", ["http://h/x", "ftp://h/x", "https://u:p@h/x", "file:///etc/passwd"])
def test_a_redirect_that_is_not_followed(where: str) -> None:
    with pytest.raises(web_client.BrokenAnswer, match="it redirects to"):
        web_client.redirected("https://h/", where)


# --- hf:// -----------------------------------------------------------------------------------------------------------


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
    with pytest.raises(OriginAccessDenied, match="is gated: accept its conditions"):
        with_origin(kind.open(), listing)


def test_a_revision_that_is_not_there(servers: dict[str, StoreServer]) -> None:
    kind = Kind("hf", servers)
    kind.fill({"file": b"x"})
    origin = open_origin("hf://datasets/team/set@v9", OriginOptions(endpoint_url=kind.server.endpoint), SETTINGS)
    with pytest.raises(NotFound, match="no revision v9"):
        with_origin(origin, listing)


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


def test_a_token_is_found_once_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def find() -> bearer.Token:
        found.append(f"token-{len(found)}")
        return bearer.Token(found[-1])

    async def work() -> None:
        tokens = bearer.Bearer(find)
        first, other = await asyncio.gather(tokens.headers(), tokens.headers())
        assert first == other == {"Authorization": "Bearer token-0"}
        assert not tokens.refused(first)  # it was found just now
        monkeypatch.setattr(bearer, "RENEW_SECONDS", 0)
        assert tokens.refused(first)
        second = await tokens.headers()
        monkeypatch.setattr(bearer, "RENEW_SECONDS", 1e9)
        assert tokens.refused(first)  # whoever sent the first one finds the second
        assert not tokens.refused(second)
        assert found == ["token-0", "token-1"]

    asyncio.run(work())


def test_a_token_is_not_used_at_its_end() -> None:
    ends = iter([time.time() + 30, time.time() + 3600])

    async def work() -> None:
        tokens = bearer.Bearer(lambda: bearer.Token("t", next(ends)))
        for _ in range(3):
            await tokens.headers()
        assert list(ends) == []

    asyncio.run(work())
