"""What is special about az://."""

import base64

import pytest

from cachefs.errors import (
    ConfigError,
    OriginAccessDenied,
)
from cachefs_daemon.origin.base import Origin
from tests.servers.stores import AzureServer, StoreServer
from tests.stores import Kind, listing, read, whole, with_origin

pytestmark = pytest.mark.usefixtures("clean_environment")


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
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")  # looks nowhere else
    with pytest.raises(OriginAccessDenied, match="Azure identity"):
        with_origin(kind.open(account="foreign"), listing)
    assert len(server.requests) == before
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    with pytest.raises(ConfigError, match="--account"):
        kind.open()
