"""What the fault campaign breaks: an S3 server behind a faulty proxy, a daemon, a mount that pushes, and readers."""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from cachefs.errors import CachefsError
from cachefs.job_messages import JobPublication
from cachefs.messages import OriginOptions
from cachefs.mount import kernel
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.rpc import JOB_PUBLISH
from tests.daemon import Daemon
from tests.faults.campaign_reader import HEARTBEAT, content_of, name_of
from tests.mounting import mount_again, mount_pid
from tests.servers.faulty import Fault, FaultyProxy
from tests.servers.s3 import S3Server

FILES: Final = 300
READERS: Final = 3
BUCKET: Final = "campaign"
# In 100 answers of the origin.
WRONG_ANSWERS: Final = 1
_OPTIONS: Final = ("workers=2", "page_cache_budget=24MiB")


class UnreliableProxy(FaultyProxy):
    """One answer in a hundred is wrong, in one of the ways in which a client can see it."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self._rng = random.Random(3)
        self.reliable = True

    def _fault_for(self, method: str, path: str, head: str) -> Fault:
        chosen = super()._fault_for(method, path, head)
        if self.reliable or chosen != Fault() or self._rng.randrange(100) >= WRONG_ANSWERS:
            return chosen
        return self._rng.choice(
            [
                Fault(drop=True),
                Fault(status=500),
                Fault(status=503),
                Fault(truncate=1000),
                Fault(extra=b"surplus"),
                Fault(replace=b"<html>captive portal</html>"),
                Fault(delay=2.0),
                Fault(drop=True, reset=True),
                Fault(truncate=1000, reset=True),
                Fault(status=408),
                Fault(before=b"HTTP/1.1 103 Early Hints\r\n\r\n"),
                Fault(chunked=True),
                Fault(astray=True),
                Fault(pace=0.2),
            ]
        )


@dataclass(frozen=True)
class Reader:
    process: "subprocess.Popen[str]"
    heartbeat: Path

    def state(self) -> tuple[float, int, int, int]:
        """When the read under way began, or 0; reads that were right; that met no mount; that met a new object."""
        began, right, away, replaced = HEARTBEAT.unpack(self.heartbeat.read_bytes())
        return began, right, away, replaced

    def check(self, longest: float) -> None:
        """longest: seconds that a read may take."""
        assert self.process.poll() is None, self.process.stdout.read() if self.process.stdout else ""
        began = self.state()[0]
        waited = time.monotonic() - began if began else 0.0
        assert waited < longest, f"a read of process {self.process.pid} waits for {waited:.0f} s"


class CampaignNode:
    """A node with everything that it needs, as it runs during the campaign."""

    def __init__(self, home: Path, server: S3Server, proxy: UnreliableProxy, tiers: "Tiers", deadline: float) -> None:
        self.proxy = proxy
        self.tiers = tiers
        self.deadline = deadline
        self.mount = home / "mnt"
        self.readers: list[Reader] = []
        self._server = server
        self._home = home
        self._versions = [0] * FILES
        sections = {
            "daemon": {"read_deadline": deadline, "block_size": "1MiB", "log_level": "info"},
            "memory": {"dir": str(tiers.memory), "budget": "32MiB", "segment_size": "4MiB"},
            "ssd": {"dir": str(tiers.ssd), "budget": "96MiB", "segment_size": "8MiB"},
            "origin": {"read_timeout": 5, "connect_timeout": 2},
            "prefetch": {"guess": True},
        }
        self.daemon = Daemon(home / "node", sections, server.environment)

    def start(self) -> None:
        self._server.create_bucket(BUCKET)
        self._put(range(FILES))
        self.daemon.start()
        options = OriginOptions(endpoint_url=self.proxy.endpoint, addressing_style="path")
        self.daemon.add_dataset("tree", f"s3://{BUCKET}/", options)
        self.proxy.reliable = False
        self.mount.mkdir()
        self.mount_again()
        for number in range(READERS):
            self.publish(number)
            heartbeat = self._home / f"heartbeat{number}"
            heartbeat.write_bytes(HEARTBEAT.pack(0.0, 0, 0, 0))
            script = Path(__file__).with_name("campaign_reader.py")
            command = [sys.executable, script, self.mount / "tree", FILES, number, heartbeat]
            process = subprocess.Popen(
                [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self.readers.append(Reader(process, heartbeat))

    def stop(self) -> None:
        for reader in self.readers:
            reader.process.kill()
            reader.process.wait(60)
        with contextlib.suppress(CachefsError):
            kernel.unmount(self.mount, lazy=True)
        self.daemon.__exit__(None, None, None)

    def publish(self, number: int) -> None:
        """The order is not that of any reader: most of what is prefetched is not what is read next."""
        spec = SamplerSpec(kind="numpy", size=FILES, seed=number, epochs=10_000)
        request = JobPublication(job=f"job{number}", dataset="tree", spec=spec, lease=3600)
        self.daemon.client.call(JOB_PUBLISH, request)

    def replace(self, numbers: list[int]) -> None:
        """The objects of these files get other bytes, and the dataset a new snapshot."""
        for number in numbers:
            self._versions[number] += 1
        self._put(numbers)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.daemon.refresh_dataset("tree")
                return
            except CachefsError:
                # A wrong answer may have hit the listing.
                if time.monotonic() > deadline:
                    raise

    def _put(self, numbers: "range | list[int]") -> None:
        self._server.put(BUCKET, {name_of(number): content_of(number, self._versions[number]) for number in numbers})

    def mount_again(self) -> None:
        mount_again(self.daemon.socket, "all", self.mount, *_OPTIONS)

    def check(self) -> None:
        for reader in self.readers:
            # A read is answered a little before its deadline; a machine under pressure may take a moment more.
            reader.check(self.deadline + 15)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All processes of the node that are there, by what they are."""
        found: dict[str, list[psutil.Process]] = {}
        with contextlib.suppress(psutil.Error, CachefsError, StopIteration):
            daemon = self.daemon.process
            if daemon is None:  # it is being restarted
                return found
            found["daemon"] = [psutil.Process(daemon.pid)]
            supervisor = psutil.Process(mount_pid(self.daemon.client, self.mount))
            found["supervisor"] = [supervisor]
            for child in supervisor.children():
                kind = "pusher" if child.name() == "pusher" else "worker"
                found.setdefault(kind, []).append(child)
        return found


@dataclass(frozen=True)
class Tiers:
    """File systems of their own, which can be filled without harm to the machine."""

    memory: Path
    ssd: Path

    @staticmethod
    @contextlib.contextmanager
    def mounted(home: Path) -> Iterator["Tiers"]:
        memory, ssd, image = home / "memory", home / "ssd", home / "ssd.img"
        memory.mkdir()
        ssd.mkdir()
        with image.open("wb") as file:
            os.truncate(file.fileno(), 256 << 20)
        run("mkfs.ext4", "-q", "-m", "0", str(image))
        with contextlib.ExitStack() as undo:
            run("mount", "-t", "tmpfs", "-o", "size=48m,mode=755", "cachefs-campaign", str(memory))
            undo.callback(run, "umount", "-l", str(memory))
            run("mount", "-o", "loop", str(image), str(ssd))
            undo.callback(run, "umount", "-l", str(ssd))
            yield Tiers(memory / "tier", ssd / "tier")


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)
