"""Certificates that are replaced while all runs: of the API over TCP, and of the service towards daemons."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.errors import CachefsError, ConfigError
from cachefs.scheduling_messages import STATUS_PATH, SchedulerStatus
from cachefs_bench.lab.ports import free_port, free_ports
from cachefs_cluster.peers.tls import TlsFiles
from cachefs_scheduler.config import ObservedClusterSection
from cachefs_scheduler.view.observer_client import NodeRequestFailed, ObserverClient
from cachefs_tools.cachectl.sched import SchedulerClient
from tests.certificates import Authority
from tests.daemon import Daemon
from tests.scheduler.observed import SCHEDULER
from tests.scheduler.running import scheduler
from tests.waiting import until

CACHECTL = Path(sys.executable).with_name("cachectl")


class Files:
    """Three files that are replaced as a whole, as the kubelet does it."""

    def __init__(self, directory: Path, issued: TlsFiles) -> None:
        directory.mkdir()
        self.ca, self.cert, self.key = (directory / name for name in ("ca.pem", "cert.pem", "key.pem"))
        self.put(issued)

    def put(self, issued: TlsFiles) -> None:
        for path, new in ((self.ca, issued.ca), (self.cert, issued.cert), (self.key, issued.key)):
            beside = path.with_suffix(".new")
            beside.write_bytes(new.read_bytes())
            beside.replace(path)

    @property
    def settings(self) -> dict[str, str]:
        return {"tls_ca": str(self.ca), "tls_cert": str(self.cert), "tls_key": str(self.key)}


def test_the_api_over_tcp_uses_new_certificates_without_a_restart(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    files = Files(tmp_path / "service", first.issue("localhost"))
    address = f"localhost:{free_port()}"

    def client(authority: Authority) -> tuple[str, str, str]:
        issued = authority.issue("admin")
        return str(issued.ca), str(issued.cert), str(issued.key)

    def answers(authority: Authority) -> bool:
        try:
            SchedulerClient(f"https://{address}", client(authority)).get(STATUS_PATH, SchedulerStatus)
        except CachefsError:
            return False
        return True

    section = {"service": {"listen": address, **files.settings}}
    with scheduler(tmp_path / "s", [f"127.0.0.1:{free_port()}"], section) as running:
        assert answers(first)
        assert not answers(second)
        command = [CACHECTL, "sched", "status", "--scheduler", f"https://{address}", "--tls", *client(first)]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "nodes" in shown.stdout
        # Only the key is there yet: the former three stay.
        key = files.key.read_bytes()
        files.key.write_bytes(second.issue("localhost").key.read_bytes())
        until(lambda: "new certificates cannot be used yet" in running.log.read_text() or not answers(first))
        assert answers(first)
        files.key.write_bytes(key)
        files.put(second.issue("localhost"))
        until(lambda: answers(second))
        # Its clients' authority is another one too.
        assert not answers(first)
        assert not running.process.poll()  # type: ignore[union-attr]


def test_daemons_are_asked_with_new_certificates_without_a_restart(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    port = free_ports(2)[0]
    node = Files(tmp_path / "node", first.issue("node1"))
    own = Files(tmp_path / "own", first.issue(SCHEDULER))
    cluster = {
        "membership": "static", "name": "node1", "listen": f"127.0.0.1:{port}", "nodes": [f"node1=127.0.0.1:{port}"],
        "schedulers": [SCHEDULER], **node.settings,
    }  # fmt: skip

    async def asked() -> None:
        asking = ObserverClient(
            ObservedClusterSection(name=SCHEDULER, tls_ca=own.ca, tls_cert=own.cert, tls_key=own.key)
        )

        async def names() -> list[str]:
            try:
                return [member.name for member in (await asking.fetch_members("127.0.0.1", port + 1)).members]
            except NodeRequestFailed:
                return []

        try:
            assert await names() == ["node1"]
            own.put(second.issue(SCHEDULER))
            async with asyncio.timeout(60):
                while await names():  # noqa: ASYNC110 - the node does not believe it, nor it the node
                    await asyncio.sleep(0.1)
                node.put(second.issue("node1"))
                while await names() != ["node1"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        finally:
            await asking.close()

    with Daemon(tmp_path / "d", {"cluster": cluster}):
        asyncio.run(asked())


def test_certificates_of_cachectl_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files = Authority(tmp_path / "one").issue("admin")
    client = SchedulerClient("https://localhost:1", (str(files.ca), str(files.cert), str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"^--tls: CERT = '.*', KEY = '.*/none': No such file or directory$"):
        client.get(STATUS_PATH, SchedulerStatus)
