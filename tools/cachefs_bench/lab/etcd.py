"""An etcd for a lab: one member, with its data in a directory."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachefs_tools.child_programs import KILL_WITH_PARENT, Child, wait_or_kill, wait_until

from cachefs.errors import CachefsError
from cachefs_bench.lab.host import LabHost

_READY: Final = b"serving client traffic"
_INSTALL: Final = "etcd is missing; install it with: apt-get install etcd-server"


class Etcd:
    """A one-member etcd that can be stopped, and restarted with its data."""

    def __init__(self, host: LabHost, work: Path) -> None:
        self._work = work
        self._command = _command(host, work)
        self.endpoint = self._command[self._command.index("--advertise-client-urls") + 1]
        self._process: Child | None = None

    def start(self) -> None:
        """Start etcd, and wait until it responds. Raises CachefsError with the end of its log."""
        log = self._work / "etcd.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*KILL_WITH_PARENT, *self._command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        wait_until(lambda: _READY in log.read_bytes(), self._process, log)

    def stop(self) -> None:
        """Kill etcd."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            wait_or_kill(self._process)
            self._process = None


@contextmanager
def run_etcd(host: LabHost, work: Path) -> Iterator[Etcd]:
    """Run an etcd on the host; its data is in the new directory *work*."""
    work.mkdir(parents=True, exist_ok=True)
    etcd = Etcd(host, work)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.stop()


def _command(host: LabHost, work: Path) -> list[str]:
    found = shutil.which("etcd")
    if found is None:
        raise CachefsError(_INSTALL)
    clients, peers = (f"http://{host.address}:{port}" for port in host.free_ports(2))
    return [
        *host.enter_command, found, "--name", "lab", "--data-dir", str(work / "data"),
        "--listen-client-urls", clients, "--advertise-client-urls", clients,
        "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"lab={peers}",
        "--logger", "zap", "--log-outputs", "stderr",
    ]  # fmt: skip
