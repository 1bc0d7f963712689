"""The pusher process on a real mount: pages that are there, pages that are gone, and what it says of both."""

import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from cachefs.messages import DatasetView
from cachefs.mount import kernel
from cachefs.mount.push import blocks
from cachefs_bench.push_paced import resident_bytes
from tests.daemon import Daemon
from tests.mounting import counters, mount_pid, mounted
from tests.pushing import Orders, Pusher, cloned_device, orders, push_command, pusher
from tests.waiting import until

PAGE = 4096
SIZES = [1, 100, 4095, 4096, 4097, 110_000, 131_073, (1 << 20) - 1, (1 << 20) + 5]
LARGE = "large"
BLOCK = 4 << 20
FILES = [f"d{number % 3}/{number}" for number in range(len(SIZES))]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("origin")
    rng = random.Random(5)
    for name, size in zip(FILES, SIZES, strict=True):
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_bytes(rng.randbytes(size))
    (top / LARGE).write_bytes(rng.randbytes(2 * BLOCK + 12_345))
    return top


# The smaller one is too small, and the files are in the SSD tier.
TIERS = [pytest.param("64MiB", id="memory"), pytest.param("9MiB", id="ssd")]


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Iterator[Daemon]:
    budget = getattr(request, "param", "64MiB")
    with Daemon(tmp_path_factory.mktemp("node"), {"memory": {"budget": budget}}) as running:
        yield running


@pytest.fixture(scope="module")
def view(daemon: Daemon, tree: Path) -> DatasetView:
    small = daemon.status().tiers[0].budget < 2 * BLOCK + sum(SIZES)
    found = daemon.add_dataset("tree", f"file://{tree}")
    for name in (LARGE, *FILES):
        daemon.read(found, name)
    _, ssd = daemon.status().tiers
    assert bool(ssd.blocks) == small
    return found


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "tree")


@pytest.fixture
def mount(daemon: Daemon, view: DatasetView, spec: str, tmp_path: Path) -> Iterator[Path]:
    with mounted(daemon.socket, spec, tmp_path / "m", "no_push") as directory:
        yield directory


@pytest.fixture
def daemon_side(daemon: Daemon, tmp_path: Path) -> Iterator[Orders]:
    with orders(tmp_path / "push", daemon.client) as serving:
        yield serving


@pytest.fixture
def process(daemon: Daemon, mount: Path, spec: str, daemon_side: Orders, tmp_path: Path) -> Iterator[Pusher]:
    device = cloned_device(mount_pid(daemon.client, mount))
    with pusher(device, tmp_path / "push", spec, mount) as running:
        yield running


pytestmark = pytest.mark.usefixtures("steady_page_cache", "process")


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def waits_for_a_page(pid: int) -> bool:
    return any("folio" in (task / "wchan").read_text() for task in Path(f"/proc/{pid}/task").iterdir())


@pytest.mark.parametrize("daemon", TIERS, indirect=True)
def test_pushed_files_are_read_without_a_request(
    tree: Path, daemon: Daemon, view: DatasetView, mount: Path, daemon_side: Orders
) -> None:
    before = counters(daemon.client, mount)  # which takes seconds
    assert daemon_side.failed(daemon_side.give(view, FILES)) == []
    assert [resident_bytes([mount / name]) for name in FILES] == [whole_pages(size) for size in SIZES]
    assert all((mount / name).read_bytes() == (tree / name).read_bytes() for name in FILES)
    assert counters(daemon.client, mount)["read"] == before["read"]
    # The kernel had not heard of the files before.
    assert daemon_side.counters["unknown_inodes"] == len(FILES)


def test_dropped_files_are_gone(tree: Path, view: DatasetView, mount: Path, daemon_side: Orders) -> None:
    daemon_side.give(view, FILES)
    assert daemon_side.failed(daemon_side.give(view, FILES[::2], drop=True)) == []
    assert resident_bytes([mount / name for name in FILES[::2]]) == 0
    assert resident_bytes([mount / name for name in FILES[1::2]]) == sum(map(whole_pages, SIZES[1::2]))
    assert all((mount / name).read_bytes() == (tree / name).read_bytes() for name in FILES)


@pytest.mark.parametrize("daemon", TIERS, indirect=True)
def test_a_large_file_goes_block_by_block(tree: Path, view: DatasetView, mount: Path, daemon_side: Orders) -> None:
    assert daemon_side.failed(daemon_side.give(view, [LARGE, LARGE], numbers=[1, 2])) == []
    assert resident_bytes([mount / LARGE]) == BLOCK + whole_pages(12_345)
    assert daemon_side.failed(daemon_side.give(view, [LARGE], numbers=[1], drop=True)) == []
    assert resident_bytes([mount / LARGE]) == whole_pages(12_345)
    assert (mount / LARGE).read_bytes() == (tree / LARGE).read_bytes()
    assert (mount / LARGE).stat().st_size == (tree / LARGE).stat().st_size


def test_a_drop_comes_after_the_store_before_it(view: DatasetView, mount: Path, daemon_side: Orders) -> None:
    for _ in range(50):
        daemon_side.give(view, FILES)
        last = daemon_side.give(view, FILES, drop=True)
    assert daemon_side.failed(last) == []
    assert resident_bytes([mount / name for name in FILES]) == 0


@pytest.mark.parametrize("daemon", TIERS, indirect=True)
def test_what_cannot_be_pushed_is_named(daemon: Daemon, view: DatasetView, mount: Path, daemon_side: Orders) -> None:
    assert daemon_side.failed(daemon_side.give(view, [FILES[0], "no such file", FILES[1]])) == [1]
    assert daemon_side.failed(daemon_side.give(view, [LARGE, LARGE], numbers=[7, 1])) == [0]
    assert daemon_side.failed(daemon_side.give_entries(view.snapshot, [0], [0])) == [0]
    assert daemon_side.failed(daemon_side.give_entries("0" * 32, [1, 2], [0, 0])) == [0, 1]
    assert resident_bytes([mount / FILES[0]]) == PAGE
    assert daemon_side.counters == {
        "stored_blocks": 3, "stored_bytes": SIZES[0] + SIZES[1] + BLOCK, "dropped_blocks": 0, "dropped_bytes": 0,
        "unknown_inodes": 3, "not_in_tier": 1, "read_first": 0, "left": 0, "taken_back": 0, "errors": 2,
    }  # fmt: skip


def test_a_new_daemon_is_told_what_is_held(view: DatasetView, mount: Path, daemon_side: Orders) -> None:
    first = daemon_side.subscribed.get(timeout=30)
    assert first.held == []
    assert first.budget > 0
    daemon_side.give(view, FILES)
    daemon_side.give(view, [LARGE], numbers=[1])
    daemon_side.give(view, FILES[:3], drop=True)
    daemon_side.hang_up()
    (held,) = daemon_side.subscribed.get(timeout=30).held
    assert held.snapshot == view.snapshot
    numbers = np.frombuffer(held.numbers, "<u4")
    assert sorted(numbers.tolist()) == [0] * (len(FILES) - 3) + [1]
    assert len(np.unique(np.frombuffer(held.entries, "<u8"))) == len(FILES) - 2
    assert resident_bytes([mount / name for name in FILES[3:]]) == sum(map(whole_pages, SIZES[3:]))
    assert daemon_side.failed(daemon_side.give(view, FILES[:3])) == []


@pytest.mark.parametrize("daemon", TIERS, indirect=True)
def test_readers_of_files_that_are_pushed_get_the_right_bytes(
    tree: Path, view: DatasetView, mount: Path, daemon_side: Orders
) -> None:
    expected = {name: (tree / name).read_bytes() for name in FILES}
    for _ in range(30):
        daemon_side.give(view, FILES)
        last = daemon_side.give(view, FILES, drop=True)
        assert all((mount / name).read_bytes() == content for name, content in expected.items())
    assert daemon_side.failed(last) == []


@pytest.mark.parametrize("spec", ["all"], indirect=True)
def test_a_mount_of_several_datasets(
    tree: Path, daemon: Daemon, view: DatasetView, mount: Path, daemon_side: Orders
) -> None:
    other = daemon.add_dataset("other", f"file://{tree}/d0")
    daemon.read(other, "0")
    assert daemon_side.failed(daemon_side.give(view, FILES)) == []
    until(lambda: daemon_side.failed(daemon_side.give(other, ["0"])) == [], "the mount does not show the other")
    assert resident_bytes([mount / "tree" / name for name in FILES]) == sum(map(whole_pages, SIZES))
    assert resident_bytes([mount / "other" / "0"]) == whole_pages(SIZES[0])
    assert (mount / "other" / "0").read_bytes() == (tree / FILES[0]).read_bytes()


def test_another_snapshot_s_bytes_never_get_into_the_mount_s_files(
    tree: Path, daemon: Daemon, view: DatasetView, mount: Path, daemon_side: Orders
) -> None:
    (tree / "a new one").write_bytes(b"which moves the numbers of the others")
    try:
        newer = daemon.refresh_dataset("tree").dataset
    finally:
        (tree / "a new one").unlink()
    assert newer is not None
    assert daemon_side.failed(daemon_side.give(newer, FILES)) == list(range(len(FILES)))
    assert daemon_side.failed(daemon_side.give(view, FILES)) == []
    assert all((mount / name).read_bytes() == (tree / name).read_bytes() for name in FILES)
    daemon.refresh_dataset("tree")


def test_a_kernel_that_takes_no_pages_is_named_once(
    daemon: Daemon, view: DatasetView, mount: Path, tmp_path: Path
) -> None:
    log = tmp_path / "m.push.log"
    log.touch()
    with (
        orders(tmp_path / "other", daemon.client) as side,
        select.epoll() as refuses,
        pusher(os.dup(refuses.fileno()), tmp_path / "other", "tree", mount) as idle,
    ):
        side.give(view, FILES)
        until(lambda: "takes no pages" in log.read_text(), "it does not say so")
        side.give(view, FILES)
        time.sleep(0.5)
        assert idle.process.is_running()
        assert (mount / FILES[1]).stat().st_size == SIZES[1]
    assert log.read_text().count("takes no pages") == 1


def test_where_numpy_is_gone_that_is_said_once_and_no_order_is_taken(
    daemon: Daemon, view: DatasetView, mount: Path, tmp_path: Path
) -> None:
    """As after an update of the environment under a mount that has got no order yet."""
    device = cloned_device(mount_pid(daemon.client, mount))
    log = tmp_path / "m.push.log"
    with (
        orders(tmp_path / "other", daemon.client) as side,
        pusher(device, tmp_path / "other", "tree", mount, patch="sys.modules['numpy'] = None") as idle,
    ):
        side.subscribed.get(timeout=30)
        side.give(view, FILES)
        until(lambda: "mount again" in log.read_text(), "it does not say so")
        side.hang_up()
        time.sleep(0.5)
        assert idle.process.is_running()
        assert side.subscribed.empty()
    assert log.read_text().count("mount again") == 1


def test_it_ends_with_the_mount(view: DatasetView, mount: Path, daemon_side: Orders, process: Pusher) -> None:
    assert daemon_side.failed(daemon_side.give(view, FILES)) == []
    kernel.unmount(mount, lazy=True)
    assert process.supervisor.wait(60) == 0


def test_one_that_starts_when_its_mount_has_died_harms_no_later_mount(
    daemon: Daemon, view: DatasetView, tmp_path: Path, tree: Path
) -> None:
    """A slow start: meanwhile the supervisor was killed, and the user has mounted again."""
    directory = tmp_path / "mnt"
    with mounted(daemon.socket, "tree", directory, "no_push", "shield=off"):
        device = cloned_device(mount_pid(daemon.client, directory))
        kernel.unmount(directory)
    try:
        # A test beside may have copied the mount into a mount namespace of its own.
        until(lambda: blocks.has_mount_ended(device, 0))
        with mounted(daemon.socket, "tree", directory, "no_push", "shield=off"):
            command = push_command(device, daemon.socket, "tree", directory, parent=1)
            assert subprocess.run(command, pass_fds=(device,), timeout=60, check=False).returncode == 1
            assert (directory / FILES[0]).read_bytes() == (tree / FILES[0]).read_bytes()
            os.statvfs(directory)
    finally:
        os.close(device)


def test_a_mount_that_dies_takes_readers_and_a_waiting_pusher_along(
    daemon: Daemon, view: DatasetView, mount: Path, daemon_side: Orders, process: Pusher
) -> None:
    """The pusher waits for a page that is locked for a request which nobody has taken."""
    serving = psutil.Process(mount_pid(daemon.client, mount))
    servers = [serving, *serving.children(recursive=True)]
    (mount / FILES[0]).read_bytes()
    (mount / LARGE).stat()
    daemon_side.failed(daemon_side.give(view, [FILES[0]]))  # by then it knows what the mount shows
    for server in servers:
        server.suspend()
    reader = subprocess.Popen(["cat", str(mount / LARGE)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until(lambda: waits_for_a_page(reader.pid), "the reader has no page locked")
    daemon_side.give(view, [LARGE])
    until(lambda: waits_for_a_page(process.process.pid), "the pusher does not wait")
    os.kill(process.supervisor.pid, signal.SIGKILL)
    for server in servers:
        server.kill()
    assert b"not connected" in reader.communicate(timeout=60)[1]
    until(lambda: not Path(f"/proc/{process.process.pid}").exists(), "the pusher lives on")
