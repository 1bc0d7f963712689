"""Datasets of gs://, az://, https:// and hf:// as a user has them: added, mounted, read, and read after a change."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cachectl import cachectl_says
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.servers import nginx
from tests.servers.stores import AzureServer, FilesServer, GoogleServer, HubServer, running

BLOCK = 1 << 20
LARGE = os.urandom(2 * BLOCK + 5)
FILES = {"small": b"small", "dir/large": LARGE, "replaced": b"before"}
TOKEN = "hf_topsecret"


class Servers:
    """One of each kind, with the same files. What is written to *web* is served by nginx."""

    def __init__(self, web: Path) -> None:
        self.google, self.azure, self.far = GoogleServer(), AzureServer(), FilesServer()
        self.hub = HubServer(far=self.far, token=TOKEN)
        self.web, self.web_url = web, ""

    def fill(self) -> None:
        for path, data in FILES.items():
            self.google.put(f"bucket/set/{path}", data)
            self.azure.put(f"box/set/{path}", data)
            (self.web / path).parent.mkdir(exist_ok=True)
            (self.web / path).write_bytes(data)
        self.hub.commit(FILES)

    def replace(self) -> None:
        """The file `replaced` has other bytes, and as many."""
        self.google.put("bucket/set/replaced", b"after!")
        self.azure.put("box/set/replaced", b"after!")
        (self.web / "replaced").unlink()
        (self.web / "replaced").write_bytes(b"after!")
        os.utime(self.web / "replaced", (1, 1))
        self.hub.commit(FILES | {"replaced": b"after!"})


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    web = tmp_path_factory.mktemp("web")
    found = Servers(web)
    with running(found.google, found.azure, found.far, found.hub), nginx.running(web) as found.web_url:
        found.fill()
        yield found


@pytest.fixture(scope="module")
def daemon(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    environment = {**servers.azure.environment, "HF_TOKEN": TOKEN}
    with Daemon(tmp_path_factory.mktemp("d") / "n", {"daemon": {"block_size": "1MiB"}}, environment) as found:
        yield found


ADD: dict[str, Callable[[Servers], list[str]]] = {
    "gs": lambda servers: ["gs://bucket/set", "--anonymous", "--endpoint-url", servers.google.endpoint],
    "az": lambda servers: ["az://box/set", "--endpoint-url", servers.azure.blobs],
    "http": lambda servers: [servers.web_url],
    "hf": lambda servers: ["hf://datasets/team/set", "--endpoint-url", servers.hub.endpoint],
}


def test_added_mounted_read_replaced_and_read_again(daemon: Daemon, servers: Servers, tmp_path: Path) -> None:
    cachectl_says(daemon.socket, "index", servers.web, "--url", servers.web_url)
    for name, options in ADD.items():
        assert "3 files" in cachectl_says(daemon.socket, "dataset", "add", name, *options(servers))
    with mounted(daemon.socket, "all", tmp_path / "m") as top:
        for name in ADD:
            assert (top / name / "small").read_bytes() == b"small"
            assert (top / name / "dir/large").read_bytes() == LARGE
        servers.replace()
        for name in ("gs", "az", "http"):
            with pytest.raises(OSError, match="Stale") as caught:
                (top / name / "replaced").read_bytes()
            assert caught.value.errno == errno.ESTALE
        assert (top / "hf/replaced").read_bytes() == b"before"  # the commit that was listed
        cachectl_says(daemon.socket, "index", servers.web, "--url", servers.web_url)
        for name in ADD:
            last = daemon.refresh_dataset(name)
            assert last.diff is not None
            assert last.dataset is not None
            assert (last.diff.changed, last.diff.unchanged) == (1, 2)
            assert daemon.read(last.dataset, "replaced") == b"after!"
    shown = cachectl_says(daemon.socket, "dataset", "list") + daemon.log.read_text()
    assert "hf://datasets/team/set" in shown
    for secret in (TOKEN, servers.azure.environment["AZURE_STORAGE_KEY"]):
        assert secret not in shown
