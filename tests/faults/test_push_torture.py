"""Pages are pushed to readers while everything around them is killed, unmounted, replaced and squeezed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pytest
import xxhash

from cachefs.errors import CachefsError
from cachefs.job_messages import JobName, JobPublication
from cachefs.mount import kernel
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.rpc import JOB_CANCEL, JOB_PUBLISH
from tests.daemon import Daemon
from tests.faults.tortured_reader import HEARTBEAT
from tests.mounting import drop_pages, mount_again, mount_pid
from tests.page_cache_lock import try_to_empty_page_cache
from tests.waiting import until

# A read that takes longer hangs: everything that was killed is back by then, on a busy machine too.
LONGEST_READ: Final = 30.0
READERS: Final = 3
OPTIONS: Final = ("workers=2", "page_cache_budget=24MiB")
# More than the budget, and more than the memory tier.
FILES: Final = 500
EVENTS: Final = [
    pytest.param(10, id="small"),
    pytest.param(1000, id="full", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]


def write_tree(top: Path) -> dict[str, str]:
    """Digests by path."""
    rng = random.Random(7)
    digests = {}
    for number in range(FILES):
        size = rng.choice([0, 1, 4096, rng.randrange(300_000), 110_000])
        if number % 100 == 0:
            size = 9 << 20
        path = top / f"class{number % 7}" / f"{number:04}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = rng.randbytes(size)
        path.write_bytes(content)
        digests[str(path.relative_to(top))] = xxhash.xxh3_64_hexdigest(content)
    return digests


@dataclass(frozen=True)
class Reader:
    process: "subprocess.Popen[str]"
    seed: int
    heartbeat: Path

    def state(self) -> tuple[float, int, int]:
        """When the read under way began, or 0; reads that were right; reads that met no mount."""
        began, right, away = HEARTBEAT.unpack(self.heartbeat.read_bytes())
        return began, right, away

    def check(self) -> None:
        assert self.process.poll() is None, self.process.stdout.read() if self.process.stdout else ""
        began, _, _ = self.state()
        assert not began or time.monotonic() - began < LONGEST_READ, f"a read of reader {self.seed} hangs"


class Torture:
    """A node, a mount that pushes, readers that have published what they read, and what happens to them."""

    def __init__(self, daemon: Daemon, mount: Path, work: Path, digests: dict[str, str]) -> None:
        self.daemon = daemon
        self.mount = mount
        self.readers: list[Reader] = []
        self._work = work
        self._digests = work / "digests"
        self._digests.write_text(json.dumps(digests))
        self._rng = random.Random(11)
        self._seeds = list(range(READERS))

    def start(self) -> None:
        self._mount()
        for number in range(READERS):
            self._publish(number)
            heartbeat = self._work / f"heartbeat{number}"
            heartbeat.write_bytes(HEARTBEAT.pack(0.0, 0, 0))
            script = Path(__file__).with_name("tortured_reader.py")
            command = [sys.executable, script, self.mount, self._digests, str(number), heartbeat]
            process = subprocess.Popen(
                [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self.readers.append(Reader(process, number, heartbeat))

    def stop(self) -> None:
        for reader in self.readers:
            reader.process.kill()
            reader.process.wait(60)
        with contextlib.suppress(CachefsError):
            kernel.unmount(self.mount, lazy=True)

    @property
    def events(self) -> list[Callable[[], None]]:
        return [
            self.kill_pusher, self.kill_worker, self.kill_supervisor, self.unmount, self.restart_daemon,
            self.publish_another, self.publish_truth, self.cancel, self.forget_pages, self.squeeze,
        ]  # fmt: skip

    def after(self) -> None:
        """A moment passes, in which no reader may hang."""
        until = time.monotonic() + self._rng.random() / 2
        while time.monotonic() < until:
            for reader in self.readers:
                reader.check()
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """The mount's: the supervisor first. A daemon that has just started hears of it in a moment."""
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(StopIteration):
                supervisor = psutil.Process(mount_pid(self.daemon.client, self.mount))
                return [supervisor, *supervisor.children()]
            assert time.monotonic() < deadline, "the mount does not report"
            time.sleep(0.05)

    # --- what happens ---------------------------------------------------------------------------------------------

    def kill_pusher(self) -> None:
        self._kill(lambda process: process.name() == "pusher")

    def kill_worker(self) -> None:
        self._kill(lambda process: process.name() != "pusher")

    def kill_supervisor(self) -> None:
        process = self.processes()[0]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(LONGEST_READ)
        self._mount()

    def unmount(self) -> None:
        supervisor = self.processes()[0]
        kernel.unmount(self.mount, lazy=True)
        self.after()
        self._mount()
        _, alive = psutil.wait_procs([supervisor], LONGEST_READ)
        assert not alive, "the processes of a mount that was unmounted are still there"

    def restart_daemon(self) -> None:
        self.daemon.kill9()
        self.daemon.start()

    def publish_another(self) -> None:
        """What it reads is not what it publishes any more."""
        number = self._rng.randrange(READERS)
        self._seeds[number] += 1000
        self._publish(number)

    def publish_truth(self) -> None:
        number = self._rng.randrange(READERS)
        self._seeds[number] = number
        self._publish(number)

    def cancel(self) -> None:
        with contextlib.suppress(CachefsError):
            self.daemon.client.call(JOB_CANCEL, JobName(job=f"job{self._rng.randrange(READERS)}"))

    def forget_pages(self) -> None:
        """What memory pressure does: clean pages, names and inodes the kernel has cached are gone."""
        if self._rng.random() < 0.5 or not try_to_empty_page_cache():
            drop_pages(self.mount)

    def squeeze(self) -> None:
        """Memory pressure on the processes of the mount alone, in a control group of theirs."""
        with control_group() as group:
            with contextlib.suppress(CachefsError, psutil.Error):
                for process in self.processes():
                    with contextlib.suppress(ProcessLookupError):  # it has just been replaced
                        (group / "cgroup.procs").write_text(str(process.pid))
            for megabytes in (512, 256, 128):
                with contextlib.suppress(OSError):
                    limit_of(group).write_text(str(megabytes << 20))
                self.after()

    # --- how ------------------------------------------------------------------------------------------------------

    def _kill(self, which: Callable[[psutil.Process], bool]) -> None:
        with contextlib.suppress(psutil.Error):
            found = [process for process in self.processes()[1:] if which(process)]
            if found:
                self._rng.choice(found).kill()

    def _mount(self) -> None:
        mount_again(self.daemon.socket, "tree", self.mount, *OPTIONS)

    def _publish(self, number: int) -> None:
        spec = SamplerSpec(kind="numpy", size=FILES, seed=self._seeds[number], epochs=10_000)
        request = JobPublication(job=f"job{number}", dataset="tree", spec=spec, lease=3600)
        self.daemon.client.call(JOB_PUBLISH, request)


@contextlib.contextmanager
def control_group() -> Iterator[Path]:
    """A memory control group; who is in it at the end goes back to the root's."""
    v1 = Path("/sys/fs/cgroup/memory")
    root = v1 if v1.is_dir() else Path("/sys/fs/cgroup")
    group = root / f"cachefs-test-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (root / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            group.rmdir()


def limit_of(group: Path) -> Path:
    v1 = group / "memory.limit_in_bytes"
    return v1 if v1.exists() else group / "memory.max"


@pytest.mark.parametrize("count", EVENTS)
def test_no_event_makes_a_reader_hang_or_read_wrong_bytes(tmp_path: Path, count: int) -> None:
    digests = write_tree(tmp_path / "origin")
    mount = tmp_path / "mnt"
    mount.mkdir()
    sections = {"memory": {"budget": "32MiB"}, "ssd": {"budget": "512MiB"}, "daemon": {"read_deadline": 4}}
    with Daemon(tmp_path / "node", sections) as daemon:
        daemon.add_dataset("tree", f"file://{tmp_path / 'origin'}")
        torture = Torture(daemon, mount, tmp_path, digests)
        try:
            torture.start()
            rng = random.Random(count)
            for number in range(count):
                # Each at least once, then at random.
                event = torture.events[number] if number < len(torture.events) else rng.choice(torture.events)
                event()
                torture.after()
            before = [reader.state()[1] for reader in torture.readers]
            until(lambda: all(reader.state()[1] > old for reader, old in zip(torture.readers, before, strict=True)))
            processes = torture.processes()
        finally:
            torture.stop()
        gone, alive = psutil.wait_procs(processes, 15)
        assert not alive, [(process.pid, process.status(), process.cmdline()) for process in alive]
        assert len(gone) >= 3  # supervisor, workers, pusher
