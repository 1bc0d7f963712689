"""What tests of origins share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.stores import AzureServer, FilesServer, GoogleServer, HubServer, StoreServer, running


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, StoreServer]]:
    far = FilesServer()
    found = {"gs": GoogleServer(), "az": AzureServer(), "http": FilesServer(), "hf": HubServer(far=far), "far": far}
    with running(*found.values()):
        yield found


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AZURE_", "GOOGLE_", "HF_", "STORAGE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name, value in AzureServer().environment.items():
        monkeypatch.setenv(name, value)
