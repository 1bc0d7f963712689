"""What is special about gs://."""

import json
from pathlib import Path

import pytest

from cachefs.errors import ConfigError, OriginAccessDenied
from cachefs_daemon.origin.base import Origin
from cachefs_daemon.origin.web import bearer
from tests.servers.stores import GoogleServer, StoreServer
from tests.stores import Kind, listing, part_of, read, whole, with_origin

pytestmark = pytest.mark.usefixtures("clean_environment")


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


def test_who_pays_for_a_bucket_is_named_and_asked_for(
    servers: dict[str, StoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, server = Kind("gs", servers), servers["gs"]
    kind.fill({"file": b"bytes"})
    monkeypatch.setattr(server, "payer", "my-project")

    async def work(origin: Origin) -> None:
        listed = (await listing(origin))["file"]
        assert await read(origin, whole(listed)) == b"bytes"
        assert await read(origin, part_of(listed, 1, 2)) == b"yt"

    with_origin(kind.open(user_project="my-project"), work)
    with pytest.raises(OriginAccessDenied, match=r"is a requester pays bucket but no user project.*--user-project"):
        with_origin(kind.open(), listing)
    with pytest.raises(ConfigError, match="--user-project"):
        kind.open(requester_pays=True)


def test_missing_google_credentials_are_one_clear_line(
    servers: dict[str, StoreServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none"))

    async def work(origin: Origin) -> None:
        with pytest.raises(OriginAccessDenied, match="GOOGLE_APPLICATION_CREDENTIALS"):
            await listing(origin)

    with_origin(Kind("gs", servers).open(anonymous=False), work)
