"""The fault campaign: everything that the node depends on fails, again and again, and readers only wait.

Promise 3: nothing wrong is read, nothing hangs. `make soak` runs it for an hour; every test run, a few events once.
$CACHEFS_CAMPAIGN names a directory for what was measured: campaign.json, campaign.png and campaign.log;
$CACHEFS_CAMPAIGN_SECONDS is another length than an hour.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil
import pytest

from cachefs.errors import CachefsError
from cachefs.job_messages import JobName
from cachefs.mount import kernel
from cachefs.mount.push import blocks
from cachefs.rpc import JOB_CANCEL
from tests.faults.campaign_node import FILES, READERS, CampaignNode, Tiers, UnreliableProxy
from tests.faults.campaign_samples import MOST_MORE_BYTES, MOST_MORE_DESCRIPTORS, Sampler, growth, save
from tests.faults.test_push_torture import control_group, limit_of
from tests.mounting import drop_pages
from tests.pushing import cloned_device
from tests.servers import faulty
from tests.servers.faulty import Fault
from tests.servers.s3 import S3Server
from tests.waiting import until

SOAK_SECONDS: Final = float(os.environ.get("CACHEFS_CAMPAIGN_SECONDS", "3600"))
# Events of the short campaign: one of each kind.
FEW: Final = ("kill_supervisor", "kill_daemon", "stop_worker", "origin_away", "damage_memory", "replace_objects")
# What happens (nothing: all events), seconds of the campaign, and the longest that anything is stopped, full or away.
LENGTHS: Final = [
    pytest.param(FEW, 0.0, 0.5, id="small"),
    pytest.param((), SOAK_SECONDS, 30.0, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(SOAK_SECONDS + 1800)]),
]
# An outage that is shorter than the deadline is a wait.
READ_DEADLINE: Final = 60.0
LONGEST_OUTAGE: Final = 20.0


class Campaign:
    """What may happen. Each event ends with everything in place again."""

    def __init__(self, node: CampaignNode, rng: random.Random, longest: float) -> None:
        self._node = node
        self._rng = rng
        self._longest = longest

    @property
    def events(self) -> list[Callable[[], None]]:
        return [
            self.kill_worker, self.kill_pusher, self.kill_supervisor, self.kill_daemon, self.restart_daemon,
            self.stop_daemon, self.stop_worker, self.stop_pusher, self.stop_supervisor, self.step_clock,
            self.fill_memory, self.fill_disk, self.squeeze_mount, self.squeeze_daemon, self.origin_away,
            self.origin_silent, self.replace_objects, self.damage_memory, self.damage_ssd, self.forget_pages,
            self.publish, self.cancel,
        ]  # fmt: skip

    def pass_time(self, seconds: float) -> None:
        """Watch the readers meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._node.check()
            time.sleep(0.05)

    # --- processes ------------------------------------------------------------------------------------------------

    def kill_worker(self) -> None:
        self._signal("worker", signal.SIGKILL)

    def kill_pusher(self) -> None:
        self._signal("pusher", signal.SIGKILL)

    def kill_supervisor(self) -> None:
        self._signal("supervisor", signal.SIGKILL)
        self._node.mount_again()

    def kill_daemon(self) -> None:
        self._node.daemon.kill9()
        self.pass_time(self._some() / 3)
        self._node.daemon.start()

    def restart_daemon(self) -> None:
        assert self._node.daemon.stop() == 0
        self._node.daemon.start()

    def stop_daemon(self) -> None:
        self._freeze("daemon")

    def stop_worker(self) -> None:
        self._freeze("worker")

    def stop_pusher(self) -> None:
        self._freeze("pusher")

    def stop_supervisor(self) -> None:
        self._freeze("supervisor")

    # --- the machine ----------------------------------------------------------------------------------------------

    def step_clock(self) -> None:
        """As an NTP client does, or a virtual machine that wakes up. The steps leave the clock right."""
        step = self._rng.choice([-1, 1]) * self._rng.uniform(2, 300)
        _step(step)
        try:
            self.pass_time(self._some() / 3)
        finally:
            _step(-step)

    def fill_memory(self) -> None:
        self._fill(self._node.tiers.memory.parent)

    def fill_disk(self) -> None:
        self._fill(self._node.tiers.ssd.parent)

    def squeeze_mount(self) -> None:
        self._squeeze(("supervisor", "worker", "pusher"), (256, 128))

    def squeeze_daemon(self) -> None:
        self._squeeze(("daemon",), (512, 256))

    def forget_pages(self) -> None:
        drop_pages(self._node.mount)

    # --- the origin -----------------------------------------------------------------------------------------------

    def origin_away(self) -> None:
        self._outage(Fault("", times=None, drop=True))

    def origin_silent(self) -> None:
        self._outage(Fault("", times=None, delay=120.0))

    def replace_objects(self) -> None:
        self._node.replace(self._rng.sample(range(FILES), 5))

    # --- what is cached, and jobs ---------------------------------------------------------------------------------

    def damage_memory(self) -> None:
        self._damage(self._node.tiers.memory)

    def damage_ssd(self) -> None:
        self._damage(self._node.tiers.ssd)

    def publish(self) -> None:
        self._node.publish(self._rng.randrange(READERS))

    def cancel(self) -> None:
        with contextlib.suppress(CachefsError):
            self._node.daemon.client.call(JOB_CANCEL, JobName(job=f"job{self._rng.randrange(READERS)}"))

    # --- how ------------------------------------------------------------------------------------------------------

    def _some(self) -> float:
        return self._rng.uniform(self._longest / 10, self._longest)

    def _chosen(self, kind: str) -> psutil.Process | None:
        found = self._node.processes().get(kind)
        return self._rng.choice(found) if found else None

    def _signal(self, kind: str, number: signal.Signals) -> None:
        process = self._chosen(kind)
        if process is not None:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
                if number == signal.SIGKILL and kind == "supervisor":
                    process.wait(60)

    def _freeze(self, kind: str) -> None:
        process = self._chosen(kind)
        if process is None:
            return
        with contextlib.suppress(psutil.Error):
            process.suspend()
        try:
            self.pass_time(self._some())
        finally:
            with contextlib.suppress(psutil.Error):
                process.resume()

    def _fill(self, directory: Path) -> None:
        path = directory / "somebody-elses"
        with path.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        try:
            self.pass_time(self._some())
        finally:
            path.unlink()

    def _squeeze(self, kinds: tuple[str, ...], megabytes: tuple[int, ...]) -> None:
        with control_group() as group:
            for process in [one for kind in kinds for one in self._node.processes().get(kind, [])]:
                with contextlib.suppress(OSError):
                    (group / "cgroup.procs").write_text(str(process.pid))
            for limit in megabytes:
                with contextlib.suppress(OSError):
                    limit_of(group).write_text(str(limit << 20))
                self.pass_time(self._some() / 2)

    def _outage(self, fault: Fault) -> None:
        self._node.proxy.add(fault)
        try:
            self.pass_time(min(self._some(), LONGEST_OUTAGE))
        finally:
            self._node.proxy.clear()

    def _damage(self, tier: Path) -> None:
        """Some bytes of some segments are other ones."""
        for path in self._rng.sample(segments := sorted(tier.glob("*.seg")), min(2, len(segments))):
            with contextlib.suppress(OSError), path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                for _ in range(20):
                    file.seek(self._rng.randrange(max(size, 1)))
                    file.write(self._rng.randbytes(64))


def _step(seconds: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME) + seconds)


@pytest.fixture
def node(tmp_path: Path, radosgw: S3Server) -> Iterator[CampaignNode]:
    proxy = UnreliableProxy(radosgw.endpoint)
    with faulty.serving(proxy), Tiers.mounted(tmp_path) as tiers:
        made = CampaignNode(tmp_path, radosgw, proxy, tiers, READ_DEADLINE)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.mark.parametrize(("few", "seconds", "longest"), LENGTHS)
def test_readers_only_wait(
    node: CampaignNode, tmp_path: Path, few: Sequence[str], seconds: float, longest: float
) -> None:
    rng = random.Random(int(seconds))
    campaign = Campaign(node, rng, longest)
    kept = Path(os.environ.get("CACHEFS_CAMPAIGN", tmp_path))
    kept.mkdir(parents=True, exist_ok=True)
    sampler = Sampler(node.processes)
    began = time.monotonic()
    try:
        with (kept / "campaign.log").open("w", buffering=1) as log:
            waiting = [
                event for event in rng.sample(campaign.events, len(campaign.events)) if not few or event.__name__ in few
            ]
            while waiting or time.monotonic() - began < seconds:
                event = waiting.pop() if waiting else rng.choice(campaign.events)
                log.write(f"{time.monotonic() - began:7.1f} {event.__name__} {[one.state() for one in node.readers]}\n")
                event()
                campaign.pass_time(rng.uniform(0, longest / 4))
            right = [reader.state()[1] for reader in node.readers]
            _wait_until(node, lambda: all(one.state()[1] > old for one, old in zip(node.readers, right, strict=True)))
            log.write(f"{time.monotonic() - began:7.1f} over {[one.state() for one in node.readers]}\n")
    finally:
        sampler.stop()
        save(sampler.samples, kept)
    assert all(count > 0 for count in right)
    if seconds:  # the first minutes of a process say nothing of its later ones
        for kind, (more_bytes, more_descriptors) in growth(sampler.samples).items():
            assert more_bytes < MOST_MORE_BYTES, kind
            assert more_descriptors < MOST_MORE_DESCRIPTORS, kind
    supervisors = node.processes()["supervisor"]
    device = cloned_device(supervisors[0].pid)
    try:
        kernel.unmount(node.mount, lazy=True)
        # The nodes of a test beside may have copied the mount into their mount namespaces: it ends with them.
        until(lambda: blocks.has_mount_ended(device, 0))
        _, alive = psutil.wait_procs(supervisors, 15)
    finally:
        os.close(device)
    assert not alive, "the processes of an unmounted mount are still there"


def _wait_until(node: CampaignNode, condition: Callable[[], bool]) -> None:
    def holds() -> bool:
        node.check()
        return condition()

    until(holds, "readers get something", seconds=node.deadline)
