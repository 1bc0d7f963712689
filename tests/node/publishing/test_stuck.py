"""Where a job is stuck or fails, every place says why, in the same words; and its own stderr does."""

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cachefs.messages import OriginOptions, WarmupRequest
from cachefs.rpc import WARMUP
from cachefs_bench.lab.ports import free_ports
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import run_throttle
from tests.daemon import Daemon
from tests.mounting import drop_pages, mounted
from tests.node.daemon.test_cluster_datasets import datasets
from tests.servers import faulty
from tests.servers.faulty import Fault, FaultyProxy
from tests.servers.s3 import S3Server
from tests.seven_places import SCRIPT, Job, Places, until_found
from tests.warm_python import WarmPython

# Seven of them fill a segment of 1 MiB: a tier counts as full from 95 % of its room on.
FILES = {f"{number:03}": random.Random(number).randbytes(146_000) for number in range(28)}
# A proxy or a gateway may have the URL that it was asked for, or its own, in what it says of a refusal.
REFUSAL = (
    b"<Error><Code>AccessDenied</Code><Message>no right to GET https://me:hunter2@gate/a.bin?X-Amz-Signature=hunter2"
    b"&amp;sig=hunter2&amp;token=hunter2</Message></Error>"
)
# Where it is set, what all places have said is written there, for the documentation.
REPORT = os.environ.get("STUCK_REPORT", "")


@dataclass(frozen=True)
class Node:
    daemon: Daemon
    web_port: int


@dataclass(frozen=True)
class Dataset:
    """A bucket, mounted. Requests go through a proxy of its own, which can break them."""

    daemon: Daemon
    torch_jobs: WarmPython
    name: str
    proxy: FaultyProxy
    mount: Path
    places: Places

    def job(self, *arguments: str | Path, name: str = "") -> Job:
        return Job(self.torch_jobs, self.daemon, name or self.name, arguments)


Mount = Callable[[str], contextlib.AbstractContextManager[Dataset]]


@contextlib.contextmanager
def running(home: Path, rclone: S3Server, settings: Mapping[str, Any] | None = None) -> Iterator[Node]:
    [port] = free_ports(1)
    given = settings or {}
    # Longer than all places take to be asked, on a machine that is busy.
    daemon_section = {"read_deadline": 180, **given.get("daemon", {})}
    sections = {"web": {"listen": f"127.0.0.1:{port}"}, **given, "daemon": daemon_section}
    with Daemon(home, sections, rclone.environment) as daemon:
        yield Node(daemon, port)


@contextlib.contextmanager
def dataset(
    node: Node, rclone: S3Server, torch_jobs: WarmPython, home: Path, name: str, endpoint: str = ""
) -> Iterator[Dataset]:
    rclone.create_bucket(name)
    rclone.put(name, FILES)
    with faulty.running(rclone.endpoint) as proxy:
        options = OriginOptions(endpoint_url=endpoint or proxy.endpoint, region="us-east-1", addressing_style="path")
        node.daemon.add_dataset(name, f"s3://{name}", options)
        with mounted(node.daemon.socket, name, home / "mnt") as mount:
            yield Dataset(node.daemon, torch_jobs, name, proxy, mount, Places(node.daemon, node.web_port, name))


@pytest.fixture(scope="module")
def node(rclone: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running(tmp_path_factory.mktemp("node"), rclone) as node:
        yield node


@pytest.fixture
def mount(node: Node, rclone: S3Server, torch_jobs: WarmPython, tmp_path: Path) -> Mount:
    """Mounts a new dataset of this name, which is that of its job and of its bucket too."""
    return lambda name: dataset(node, rclone, torch_jobs, tmp_path, name)


@pytest.fixture(scope="module")
def refused(
    node: Node, rclone: S3Server, torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dataset]:
    """A dataset whose server refuses every read."""
    with dataset(node, rclone, torch_jobs, tmp_path_factory.mktemp("refused"), "refused") as here:
        here.proxy.add(Fault(status=403, times=None, body=REFUSAL))
        yield here


@pytest.fixture(scope="module")
def changed(
    node: Node, rclone: S3Server, torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dataset]:
    """A dataset with an object, 007, that is another one by now."""
    with dataset(node, rclone, torch_jobs, tmp_path_factory.mktemp("changed"), "changed") as here:
        rclone.put("changed", {"007": b"other bytes"})
        yield here


@contextlib.contextmanager
def training(of: Dataset, epochs: int | Path = 2, workers: int = 2) -> Iterator[Job]:
    job = of.job(SCRIPT, of.mount, str(epochs), str(workers))
    try:
        yield job
    finally:
        job.end()


def all_say(of: Dataset, wanted: str, *, fails: bool = False) -> dict[str, str]:
    """What each place says. fails: have a read fail anew before a place is asked, as failures are shown for a minute,
    in which a busy machine does not ask all places."""

    def asked(ask: Callable[[], str]) -> str:
        if fails:
            have_a_read_fail(of.mount)
        return ask()

    return {place: until_found(functools.partial(asked, ask), wanted) for place, ask in of.places.all().items()}


@contextlib.contextmanager
def cold_again_and_again(mount: Path) -> Iterator[None]:
    """Has the kernel forget what is read: a node whose readers have all pages has no trouble with its tiers."""
    over = threading.Event()

    def forget() -> None:
        while not over.wait(0.2):
            with contextlib.suppress(OSError):
                drop_pages(mount)

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    try:
        yield
    finally:
        over.set()
        forgetting.join()


def have_a_read_fail(mount: Path) -> None:
    for path in sorted(mount.iterdir()):
        try:
            path.read_bytes()
        except OSError:
            return
    raise AssertionError("all files can be read")


def note(cause: str, said: Mapping[str, str]) -> None:
    if REPORT:
        with open(REPORT, "a") as file:
            for place, text in said.items():
                file.write(f"=== {cause}: {place}\n{text.rstrip()}\n")


def test_an_origin_that_does_not_answer(mount: Mount) -> None:
    with mount("outage") as here:
        here.proxy.add(Fault(drop=True, times=None))
        with training(here, workers=0) as job:
            wanted = r"S3 at \S+ has not answered for \d+ s; \d+ reads? waits? for it, (the first )?for \d+ s"
            said = {"stderr": until_found(job.said, f"cachefs: {wanted}"), **all_say(here, wanted)}
            assert until_found(lambda: here.places.ctl("stalls"), "origin")
            here.proxy.clear()
            until_found(job.said, r"cachefs: S3 at \S+ answers again, after \d+ s")
            summary = job.finish()
        assert job.process.returncode == 0
        assert "bandwidth" not in summary
        assert "did not answer for" in summary.splitlines()[-1], summary
        note("origin down", {**said, "summary": summary})


def test_credentials_that_are_refused(refused: Dataset, tmp_path: Path) -> None:
    """No place repeats credentials that a server repeats."""
    with training(refused) as job:
        summary = job.finish()
    wanted = (
        r"reads? of refused failed: s3://refused/\S+ at \S+ is refused "
        r"\(403 AccessDenied: no right to GET https://gate/a\.bin\?X-Amz-Signature=\[removed\]"
    )
    assert job.process.returncode == 1
    lines = summary.splitlines()
    traceback = max(number for number, line in enumerate(lines) if line.startswith("PermissionError"))
    assert any(line.startswith("cachefs: ") and re.search(wanted, line) for line in lines[traceback + 1 :]), summary
    said = {"stderr": summary, **all_say(refused, wanted, fails=True)}
    note("credentials refused", said)
    ctl = refused.places.ctl
    assert re.search(wanted, ctl("doctor"))
    until_found(refused.places.job_show, "refused: ended")  # its helper tells the daemon a moment after its end
    bundle = tmp_path / "bundle.tar.gz"
    ctl("debug-bundle", "-o", str(bundle), "--log", str(refused.daemon.log))
    with tarfile.open(bundle) as tar:
        texts = [file.read().decode() for member in tar if (file := tar.extractfile(member)) is not None]
    assert texts
    texts += [ctl("status", "--json"), ctl("job", "show", refused.name, "--json")]
    texts += [Path(f"{refused.mount}.log").read_text(), refused.daemon.log.read_text()]
    for text in (*said.values(), *texts):
        assert "hunter2" not in text


def test_a_program_without_a_loader_is_told_too(refused: Dataset) -> None:
    job = refused.job("-c", f"open({str(refused.mount / '003')!r}, 'rb').read()", name="plain")
    text = job.finish()
    assert job.process.returncode == 1
    # It is no job, so reads of other programs count too: whose read is told is in
    # tests/unit/publishing/test_read_failure.py.
    wanted = r"cachefs: \d+ reads? of refused failed: s3://refused/\d+ at \S+ is refused \(403"
    assert re.match(wanted, text.splitlines()[-1]), text
    elsewhere = refused.job("-c", "raise PermissionError(13, 'no', '/etc/shadow')", name="plain")
    assert "of refused failed" not in elsewhere.finish()


def test_an_object_that_has_changed(changed: Dataset) -> None:
    with training(changed) as job:
        summary = job.finish()
    wanted = r"reads? of changed failed: .*has changed since it was listed"
    said = {"stderr": summary, **all_say(changed, wanted, fails=True)}
    assert job.process.returncode == 1
    after = summary[summary.index("Stale file handle") :]
    assert "has changed since it was listed" in after
    note("object changed", said)


def test_failed_reads_are_those_of_the_job_that_has_read(changed: Dataset, tmp_path: Path) -> None:
    well = changed.job(SCRIPT, changed.mount, "1000", "0", "007", name="well")
    try:
        until_found(well.said, "epoch 1")
        go_on = tmp_path / "go on"
        broken = changed.job(SCRIPT, changed.mount, "1", "0", "", go_on, name="broken")
        # A program that dies of its first read may be gone before it has published.
        until_found(lambda: changed.places.ctl("job", "show", "broken"), "broken")
        go_on.touch()
        # Where it was fetched ahead just before, that is what has failed.
        assert re.search(r"cachefs: .* of changed failed: .*has changed since", broken.finish())
        # The mount reports the failed read within a moment.
        until_found(lambda: changed.places.ctl("job", "show", "broken"), r"of changed failed: .*has changed")
        assert "of changed failed" not in changed.places.ctl("job", "show", "well")
    finally:
        well.end()
    assert "of changed failed" not in well.said()


def test_a_disk_that_others_fill(rclone: S3Server, torch_jobs: WarmPython, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], check=True)
    try:
        settings = {
            "daemon": {"block_size": "256KiB"},
            "memory": {"budget": "2MiB", "segment_size": "1MiB"},
            "ssd": {"dir": str(disk / "ssd"), "budget": "20MiB", "segment_size": "1MiB"},
        }
        with (
            running(tmp_path / "n", rclone, settings) as node,
            dataset(node, rclone, torch_jobs, tmp_path, "full") as here,
        ):
            (disk / "others").write_bytes(bytes(23 << 20))
            list(here.daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="full")))
            over = tmp_path / "over"
            with training(here, epochs=over) as job, cold_again_and_again(here.mount):
                wanted = r"the ssd tier (takes no new blocks|has no more room)"
                said = {"stderr": until_found(job.said, f"cachefs: {wanted}"), **all_say(here, wanted)}
                over.touch()
                summary = job.finish()
            assert summary.count("cachefs: the ssd tier") >= 2
            note("disk full", {**said, "summary": summary})
    finally:
        subprocess.run(["umount", "--lazy", disk], check=False)


def test_reads_that_wait_for_a_slot(rclone: S3Server, torch_jobs: WarmPython, tmp_path: Path) -> None:
    with run_throttle(rclone.endpoint, LinkLimits(), tmp_path / "log") as throttle:
        settings = {"origin": {"max_connections": 1}, "prefetch": {"enabled": False}}
        with (
            running(tmp_path / "n", rclone, settings) as node,
            dataset(node, rclone, torch_jobs, tmp_path, "slots", throttle.endpoint) as here,
        ):
            throttle.set_limits(LinkLimits(latency=4))
            with training(here, workers=4) as job:
                wanted = r"\d reads? waits? for a free request to S3 at \S+, .*for \d+ s \(it gets 1 of 1 requests"
                said = {"stderr": until_found(job.said, f"cachefs: {wanted}"), **all_say(here, wanted)}
                throttle.set_limits(LinkLimits())
                summary = job.finish()
            assert "for a free request to S3 at" in summary
            note("waiting for a slot", {**said, "summary": summary})


def test_another_node_that_is_away(rclone: S3Server, torch_jobs: WarmPython, tmp_path: Path) -> None:
    ports = [free_ports(2)[0] for _ in range(2)]
    nodes = [f"{name}=127.0.0.1:{port}" for name, port in zip("ab", ports, strict=True)]
    own = [
        {"membership": "static", "name": name, "listen": f"127.0.0.1:{port}", "nodes": nodes}
        for name, port in zip("ab", ports, strict=True)
    ]
    with (
        Daemon(tmp_path / "b", {"cluster": own[1]}, rclone.environment) as other,
        running(tmp_path / "n", rclone, {"cluster": own[0]}) as node,
        dataset(node, rclone, torch_jobs, tmp_path, "away") as here,
    ):
        until_found(lambda: str(list(datasets(other))), "away")
        assert other.process is not None
        processes = [other.process.pid, *_children(other.process.pid)]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            over = tmp_path / "over"
            with training(here, epochs=over) as job:
                wanted = r"node b has not answered for \d+ s"
                said = {"stderr": until_found(job.said, f"cachefs: {wanted}"), **all_say(here, wanted)}
                over.touch()
                summary = job.finish()
            assert "node b did not answer for" in summary
            note("peer away", {**said, "summary": summary})
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGCONT)


def _children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
