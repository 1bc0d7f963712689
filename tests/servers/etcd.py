"""etcd, with its data in memory. It starts in half a second."""

import base64
import json
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cachefs_bench.lab.ports import free_port
from cachefs_bench.lab.scratch_node import memory_directory
from tests.servers.process import start, stop
from tests.waiting import until

_INSTALL = "apt-get install -y --no-install-recommends etcd-server"


class Etcd:
    """A server on loopback ports. Its URL stays the same when it is restarted."""

    def __init__(self, home: Path, options: Sequence[str] = ()) -> None:
        """options: more of them, such as those for TLS, which make the URL one of https."""
        self.home = home
        self._options = options
        self._port = free_port()
        self._is_secret = "--cert-file" in options
        self.url = f"https://localhost:{self._port}" if self._is_secret else f"http://127.0.0.1:{self._port}"
        self._peers = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers; with TLS, until it listens."""
        command = [
            "etcd", "--name", "test", "--data-dir", str(self.home / "data"),
            "--listen-client-urls", self.url.replace("localhost", "127.0.0.1"), "--advertise-client-urls", self.url,
            "--listen-peer-urls", self._peers, "--initial-advertise-peer-urls", self._peers,
            "--initial-cluster", f"test={self._peers}", "--log-level", "warn", "--unsafe-no-fsync",
            "--heartbeat-interval", "20", "--election-timeout", "200", *self._options,
        ]  # fmt: skip
        log = self.home / "etcd.log"
        self._process = start(command, log)

        def answers() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, log.read_text(errors="replace")[-2000:]
            return self._answers()

        until(answers, lambda: f"etcd answers:\n{log.read_text(errors='replace')[-2000:]}")

    def _answers(self) -> bool:
        if self._is_secret:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self._port)) == 0
        try:
            return bool(self.ask("maintenance/status", {}).get("leader"))
        except OSError:
            return False

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def pause(self) -> None:
        """Stop it in its tracks: it still accepts connections, and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def wipe(self) -> None:
        """Forget everything. It must not run."""
        shutil.rmtree(self.home / "data")

    def stop(self) -> None:
        if self._process is not None:
            self.resume()
            stop(self._process, 0.5)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    # --- the JSON gateway: the same calls in words that are not ours -------------------------------------------------

    def ask(self, call: str, request: dict[str, Any]) -> dict[str, Any]:
        """Raises OSError."""
        asked = urllib.request.Request(f"{self.url}/v3/{call}", json.dumps(request).encode())
        with urllib.request.urlopen(asked, timeout=20) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def keys(self, prefix: str) -> dict[str, str]:
        """What is below a prefix."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        found = self.ask("kv/range", {"key": _base64(prefix), "range_end": _base64(end)})
        return {_text(each["key"]): _text(each.get("value", "")) for each in found.get("kvs", [])}

    def put(self, key: str, value: str) -> int:
        """Returns the revision."""
        answer = self.ask("kv/put", {"key": _base64(key), "value": _base64(value)})
        return int(answer["header"]["revision"])

    def delete(self, key: str) -> None:
        self.ask("kv/deleterange", {"key": _base64(key)})

    def compact(self, revision: int) -> None:
        self.ask("kv/compaction", {"revision": str(revision), "physical": True})

    def revoke_all(self) -> None:
        """End every lease."""
        for lease in self.ask("lease/leases", {}).get("leases", []):
            self.ask("kv/lease/revoke", {"ID": lease["ID"]})


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(value: str) -> str:
    return base64.b64decode(value).decode()


@contextmanager
def running(options: Sequence[str] = ()) -> Iterator[Etcd]:
    """An empty server."""
    if shutil.which("etcd") is None:
        raise RuntimeError(f"etcd missing: {_INSTALL}")
    with memory_directory("cachefs-tests-etcd-") as home:
        server = Etcd(home, options)
        try:
            server.start()
            yield server
        finally:
            server.stop()
