"""Pushing as the daemon plans it, on real mounts."""

import ctypes
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from cachefs.block import MEMORY
from cachefs.job_messages import ConsumerView, JobName, JobProgress, JobPublication
from cachefs.messages import Empty, MountView, Selection, WarmupRequest
from cachefs.mount import kernel
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order
from cachefs.rpc import CACHED, EVICT, JOB_CANCEL, JOB_PROGRESS, JOB_PUBLISH, JOB_SHOW, STATUS, WARMUP
from cachefs_bench.push_paced import resident_bytes
from tests.daemon import Daemon
from tests.mounting import counters, mounted
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("steady_page_cache")

FILES = 600
SIZE = 50_000
PAGE = 4096
PAGES = -(-SIZE // PAGE) * PAGE
SPEC = SamplerSpec(kind="torch-distributed", size=FILES, seed=3, epochs=4)
# kcmp(2) tells whether two descriptors are one open file.
SYS_KCMP = 312
KCMP_FILE = 0
# A FUSE request per tripwire, of 32 reads, or 8 where the rate is low.
SHORTEST_INTERVAL = 8


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("origin")
    for number in range(FILES):
        (top / f"{number:05d}").write_bytes(np.random.default_rng(number).bytes(SIZE))
    return top


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node"), {"memory": {"budget": "128MiB"}}) as running:
        running.add_dataset("images", f"file://{tree}")
        for _ in running.client.stream_responses(WARMUP, WarmupRequest(dataset="images", paths=[])):
            pass
        yield running


class Training:
    """A mount with a pusher, and one consumer that has published SPEC."""

    def __init__(self, daemon: Daemon, directory: Path) -> None:
        self.daemon = daemon
        self.directory = directory
        # Pages that the kernel had taken out of files that were read (tests/taken_pages.py). A file is pushed whole, so
        # what is missing of one that is there in part was taken, and may cost a request.
        self.taken = 0
        self.job = directory.name
        request = JobPublication(job=self.job, dataset="images", spec=SPEC, pid=os.getpid())
        daemon.client.call(JOB_PUBLISH, request)

    @property
    def mount(self) -> MountView:
        mounts = self.daemon.client.call(STATUS, Empty()).mounts
        return next(mount for mount in mounts if mount.mountpoint == str(self.directory))

    @property
    def consumer(self) -> ConsumerView:
        [view] = self.daemon.client.call(JOB_SHOW, JobName(job=self.job)).consumers
        return view

    def paths(self, epoch: int) -> list[Path]:
        return [self.directory / f"{sample:05d}" for sample in epoch_order(SPEC, epoch)]

    def read(self, paths: list[Path], pause: float = 0.002) -> None:
        for path in paths:
            there = resident_bytes([path])
            self.taken += (PAGES - there) // PAGE if there else 0
            assert len(path.read_bytes()) == SIZE
            time.sleep(pause)

    def resident(self) -> int:
        return resident_bytes(self.paths(0))

    def eventually(self, is_so: Callable[[], bool]) -> None:
        until(lambda: is_so(), lambda: (self.mount.counters, self.consumer))


@pytest.fixture
def training(request: pytest.FixtureRequest, daemon: Daemon, tmp_path: Path) -> Iterator[Training]:
    budget = getattr(request, "param", "256MiB")
    directory = tmp_path / f"m{os.urandom(4).hex()}"
    with mounted(daemon.socket, "images", directory, f"page_cache_budget={budget}"):
        training = Training(daemon, directory)
        try:
            yield training
        finally:
            daemon.client.call(JOB_CANCEL, JobName(job=training.job))


def settled(training: Training) -> int:
    """Resident bytes, once they do not change any more."""
    seen = -1
    while (now := training.resident()) != seen or not now:
        seen = now
        time.sleep(0.7)
    return seen


def pushed(training: Training) -> int:
    """Files that are in the page cache, but for what the kernel has taken."""
    return sum(bool(resident_bytes([path])) for path in training.paths(0))


def requests(training: Training) -> int:
    """Requests for pages, without those for pages that the kernel had taken."""
    return counters(training.daemon.client, training.directory)["read"] - training.taken


def test_all_but_tripwires_is_read_without_a_request(training: Training) -> None:
    settled(training)
    assert FILES * (1 - 1 / SHORTEST_INTERVAL) <= pushed(training) < FILES
    training.read(training.paths(0))
    assert requests(training) <= FILES // SHORTEST_INTERVAL
    assert training.mount.counters["read"] > 0
    view = training.consumer
    assert (view.epoch, view.mismatched) in ((0, 0), (1, 0))
    assert view.position >= FILES - 2 * 32 or view.epoch == 1
    # A page that the kernel has taken back in that moment, on a busy machine.
    assert training.mount.counters["push_late"] <= FILES // 50
    # As the rate becomes known, tripwires are set where pages were.
    assert training.mount.counters["push_wasted"] <= FILES // SHORTEST_INTERVAL + FILES // 50


def test_heartbeats_need_no_tripwires(training: Training) -> None:
    def tell(epoch: int, position: int) -> None:
        beat = JobProgress(job=training.job, consumer="0", epoch=epoch, position=position)
        training.daemon.client.call(JOB_PROGRESS, beat)

    training.eventually(lambda: training.consumer.epoch_length > 0)

    def is_pushed() -> bool:
        tell(0, 0)
        return training.mount.counters.get("push_stored_blocks", 0) >= FILES

    training.eventually(is_pushed)
    paths = training.paths(0)
    for start in range(0, FILES, 25):
        tell(0, start)
        training.read(paths[start : start + 25])
    assert requests(training) <= FILES // 50
    assert training.consumer.position >= FILES - 25


@pytest.mark.parametrize("training", ["12MiB"], indirect=True)
def test_pages_stay_within_the_budget(training: Training) -> None:
    settled(training)
    budget = 1.1 * (12 << 20)
    paths, most = training.paths(0) + training.paths(1), 0
    for start in range(0, len(paths), 50):
        training.read(paths[start : start + 50], 0.004)
        most = max(most, training.resident())
        # On a busy machine reads themselves bring pages until somebody is told of them, and drops others.
        training.eventually(lambda: training.resident() <= budget)
    assert 6 << 20 < most <= budget + 50 * PAGES
    assert requests(training) <= len(paths) / 4
    assert training.mount.counters["push_dropped_blocks"] > FILES
    training.eventually(lambda: training.consumer.epoch == 1)


def test_what_fits_is_pushed_once(training: Training) -> None:
    for epoch in range(3):
        training.read(training.paths(epoch))
        training.eventually(lambda: (training.consumer.epoch, training.consumer.position) >= (epoch, FILES - 64))  # noqa: B023
    counted = training.mount.counters
    assert counted["push_stored_blocks"] <= FILES * (1 + 2 / SHORTEST_INTERVAL)
    assert counted["push_budget"] == 256 << 20


def test_two_consumers_of_one_mount_have_their_own_tripwires(training: Training, daemon: Daemon) -> None:
    other = dataclasses.replace(SPEC, seed=4)
    publish = JobPublication(job=training.job, consumer="1", dataset="images", spec=other, pid=os.getpid())
    daemon.client.call(JOB_PUBLISH, publish)
    settled(training)
    theirs = [training.directory / f"{sample:05d}" for sample in epoch_order(other, 0)]
    for one, two in zip(training.paths(0)[:500], theirs[:500], strict=True):
        training.read([one, two])

    def places() -> dict[str, tuple[int, int]]:
        views = daemon.client.call(JOB_SHOW, JobName(job=training.job)).consumers
        return {view.consumer: (view.epoch, view.position // 100) for view in views}

    training.eventually(lambda: min(places().values()) >= (0, 4))
    assert max(places().values()) <= (0, 5)
    assert requests(training) <= 1000 / 4


@pytest.mark.parametrize("training", ["12MiB"], indirect=True)
def test_who_pauses_or_begins_again_is_found(training: Training) -> None:
    settled(training)
    training.read(training.paths(0), 0.004)
    second = training.paths(1)
    training.read(second[:300], 0.004)
    training.eventually(lambda: (1, 240) <= (training.consumer.epoch, training.consumer.position) <= (1, 300))
    time.sleep(3.0)
    before = training.consumer
    assert (1, 240) <= (before.epoch, before.position) <= (1, 300)
    training.read(second[300:500], 0.004)
    training.eventually(lambda: training.consumer.position >= 440)
    assert training.consumer.state == "following"
    first = training.paths(0)
    training.read(first[:300], 0.01)
    training.eventually(lambda: (0, 200) <= (training.consumer.epoch, training.consumer.position) <= (0, 300))
    training.read(first[300:500], 0.004)
    training.eventually(lambda: (0, 440) <= (training.consumer.epoch, training.consumer.position) <= (0, 500))


def pushers_of(mount: MountView) -> list[psutil.Process]:
    children = [one for one in psutil.Process(mount.pid).children() if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in children if one.name() == "pusher"]


def inherited(child: psutil.Process) -> set[str]:
    """What a child of a mount's supervisor has open in common with it, as /proc/PID/fd names it."""
    links = {
        process.pid: {int(link.name): os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
        for process in (child, child.parent())
    }
    theirs, ours = links.values()
    pids = tuple(links)
    same = ctypes.CDLL(None).syscall
    return {
        name for number, name in theirs.items()
        if any(other == name and same(SYS_KCMP, *pids, KCMP_FILE, number, at) == 0 for at, other in ours.items())
    }  # fmt: skip


def test_a_pusher_keeps_only_what_it_needs_of_its_supervisor(training: Training) -> None:
    """Else what the supervisor closes would live on in the pusher: sockets, and descriptors of processes."""
    [pusher] = until(lambda: pushers_of(training.mount), "a pusher")
    until(lambda: pusher.num_threads() > 1, "it has not begun")
    needed = {"/dev/null", f"{training.directory}.log", "/memfd:cachefs-read-marks (deleted)"}
    control_files = f"/{kernel.connection_number(training.directory)}"  # of the FUSE connection
    assert {name for name in inherited(pusher) - needed if control_files not in name} == set()


def test_signals_of_a_terminal_are_for_the_supervisor_alone(training: Training) -> None:
    """It unmounts, and its children serve until then."""
    for child in psutil.Process(training.mount.pid).children():
        until(lambda: child.num_threads() > 1 or child.name() != "pusher", "it has not begun")  # noqa: B023
        (ignored,) = [line for line in Path(f"/proc/{child.pid}/status").read_text().splitlines() if "SigIgn" in line]
        for number in (signal.SIGINT, signal.SIGHUP):
            assert int(ignored.split()[1], 16) >> (number - 1) & 1, (child, number)


@pytest.mark.parametrize("training", ["12MiB"], indirect=True)
def test_a_killed_pusher_comes_back_to_a_budget_that_is_spent(training: Training) -> None:
    """And counters go on where they were."""
    settled(training)
    paths, most = training.paths(0), 0
    for start in (0, 250):
        stored = training.mount.counters["push_stored_blocks"]
        [killed] = until(lambda: pushers_of(training.mount), "a pusher")
        killed.kill()
        training.eventually(lambda: [one.pid for one in pushers_of(training.mount)] not in ([], [killed.pid]))  # noqa: B023
        training.read(paths[start : start + 100], 0.004)
        training.eventually(lambda: training.mount.counters["push_stored_blocks"] > stored + 20)  # noqa: B023
        most = max(most, settled(training))
        training.read(paths[start + 100 : start + 250], 0.004)
    assert 6 << 20 < most <= 1.1 * (12 << 20)


def test_a_mount_gets_pages_only_of_what_it_shows(training: Training, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_bytes(b"text")
    daemon.add_dataset("texts", f"file://{tmp_path}/texts")
    with mounted(daemon.socket, "texts", tmp_path / "other"), mounted(daemon.socket, "all", tmp_path / "both"):
        shown = Training(daemon, tmp_path / "both")
        shown.directory /= "images"
        settled(shown)
        settled(training)
        mounts = {mount.spec: mount.counters for mount in daemon.status().mounts}
        assert min(mounts[spec]["push_held_bytes"] for spec in ("images", "all")) > FILES * SIZE / 2
        assert mounts["texts"]["push_held_bytes"] == 0
        daemon.client.call(JOB_CANCEL, JobName(job=shown.job))


def test_what_pages_hold_makes_room_in_memory_for_the_rest(tree: Path, tmp_path: Path) -> None:
    """Blocks that come anew are read later than what is in memory, but that is in the page cache as well."""
    with Daemon(tmp_path / "node", {"memory": {"budget": "12MiB", "segment_size": "5MiB"}}) as daemon:
        daemon.add_dataset("images", f"file://{tree}")
        for _ in daemon.client.stream_responses(WARMUP, WarmupRequest(dataset="images", paths=[])):
            pass
        training = Training(daemon, tmp_path / "mount")
        # What is in the page cache does not come into memory as well, so memory is first.
        until(lambda: len(in_memory(daemon)) > 200)
        with mounted(daemon.socket, "images", training.directory, "page_cache_budget=12MiB"):
            training.eventually(lambda: len(doubly_cached(training)) > 200)
            settled(training)
            before = doubly_cached(training)
            far = [path.name.encode() for path in training.paths(0)[350:500]]
            daemon.client.call(EVICT, Selection(dataset="images", paths=far))
            training.eventually(lambda: len(doubly_cached(training)) <= max(10, len(before) - 120))


def in_memory(daemon: Daemon) -> list[str]:
    """The files that the memory tier has."""
    pages = daemon.client.stream_responses(CACHED, Selection(dataset="images"))
    return [file.path.decode() for page in pages for file in page.files if file.cached[MEMORY]]


def doubly_cached(training: Training) -> list[Path]:
    """Files whose pages are resident, and which the memory tier has as well."""
    return [path for name in in_memory(training.daemon) if resident_bytes([path := training.directory / name])]


def test_who_reads_through_one_mount_gets_no_pages_in_another(
    training: Training, daemon: Daemon, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    with mounted(daemon.socket, "images", other, "page_cache_budget=256MiB"):
        elsewhere = [other / path.name for path in training.paths(0)]
        training.eventually(lambda: resident_bytes(elsewhere) > FILES * PAGES // 2)
        elsewhere[0].read_bytes()  # proves nothing
        training.read(training.paths(0))
        training.eventually(lambda: resident_bytes(elsewhere) <= 2 * PAGES)
        training.read(training.paths(1)[:200])
        assert resident_bytes(elsewhere) <= 2 * PAGES
        training.eventually(lambda: training.resident() >= FILES * PAGES * (1 - 1 / SHORTEST_INTERVAL))
