"""The pusher process on a real mount: pages that are there, pages that are gone, and what it says of both."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty as NothingThere

import numpy as np
import pytest
from cachefs_tools.bench.resident_pages import resident_bytes

from cachefs.messages import DatasetView
from cachefs.mount import kernel
from tests.daemon import Daemon
from tests.mounting import counters, drop_pages, mount_pid, mounted
from tests.pushing import Orders, cloned_device, orders, pusher

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


# The SSD tier, and the memory tier, each hold everything.
@pytest.fixture(scope="module", params=["64MiB", "9MiB"], ids=["memory", "ssd"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node"), {"memory": {"budget": request.param}}) as running:
        yield running


@pytest.fixture(scope="module")
def view(daemon: Daemon, tree: Path) -> DatasetView:
    found = daemon.add_dataset("tree", f"file://{tree}")
    for name in (LARGE, *FILES):
        daemon.read(found, name)
    return found


@pytest.fixture
def mount(daemon: Daemon, view: DatasetView, tmp_path: Path) -> Iterator[Path]:
    with mounted(daemon.socket, "tree", tmp_path / "m", "no_push") as directory:
        yield directory


@pytest.fixture
def daemon_side(daemon: Daemon, tmp_path: Path) -> Iterator[Orders]:
    with orders(tmp_path / "push", daemon.client) as serving:
        yield serving


@pytest.fixture
def process(daemon: Daemon, mount: Path, daemon_side: Orders, tmp_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    device = cloned_device(mount_pid(daemon.client, mount))
    with pusher(device, tmp_path / "push", "tree", mount) as running:
        yield running


pytestmark = pytest.mark.usefixtures("process")


def whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_pushed_files_are_read_without_a_request(
    tree: Path, daemon: Daemon, view: DatasetView, mount: Path, daemon_side: Orders
) -> None:
    assert daemon_side.failed(daemon_side.give(view, FILES)) == []
    assert [resident_bytes([mount / name]) for name in FILES] == [whole_pages(size) for size in SIZES]
    before = counters(daemon.client, mount)
    assert all((mount / name).read_bytes() == (tree / name).read_bytes() for name in FILES)
    assert counters(daemon.client, mount)["read"] == before["read"]


def test_dropped_files_are_gone(tree: Path, view: DatasetView, mount: Path, daemon_side: Orders) -> None:
    daemon_side.give(view, FILES)
    assert daemon_side.failed(daemon_side.give(view, FILES[::2], drop=True)) == []
    assert resident_bytes([mount / name for name in FILES[::2]]) == 0
    assert resident_bytes([mount / name for name in FILES[1::2]]) == sum(map(whole_pages, SIZES[1::2]))
    assert all((mount / name).read_bytes() == (tree / name).read_bytes() for name in FILES)


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


def test_what_cannot_be_pushed_is_named(daemon: Daemon, view: DatasetView, mount: Path, daemon_side: Orders) -> None:
    assert daemon_side.failed(daemon_side.give(view, [FILES[0], "no such file", FILES[1]])) == [1]
    assert daemon_side.failed(daemon_side.give(view, [LARGE, LARGE], numbers=[7, 1])) == [0]
    assert daemon_side.failed(daemon_side.give_entries(view.snapshot, [0], [0])) == [0]
    assert daemon_side.failed(daemon_side.give_entries("0" * 32, [1, 2], [0, 0])) == [0, 1]
    assert resident_bytes([mount / FILES[0]]) == PAGE


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


def test_readers_of_files_that_are_pushed_get_the_right_bytes(
    tree: Path, view: DatasetView, mount: Path, daemon_side: Orders
) -> None:
    expected = {name: (tree / name).read_bytes() for name in FILES}
    for _ in range(30):
        daemon_side.give(view, FILES)
        last = daemon_side.give(view, FILES, drop=True)
        assert all((mount / name).read_bytes() == content for name, content in expected.items())
    assert daemon_side.failed(last) == []


def test_it_ends_with_the_mount(
    view: DatasetView, mount: Path, daemon_side: Orders, process: "subprocess.Popen[bytes]"
) -> None:
    assert daemon_side.failed(daemon_side.give(view, FILES)) == []
    kernel.unmount(mount, lazy=True)
    assert process.wait(20) == 0


def test_it_does_not_keep_a_mount_alive_whose_process_was_killed(
    daemon: Daemon, view: DatasetView, mount: Path, daemon_side: Orders, process: "subprocess.Popen[bytes]"
) -> None:
    assert daemon_side.failed(daemon_side.give(view, FILES[:1])) == []
    drop_pages(mount)
    process.kill()  # as the kernel does when its parent dies
    os.kill(mount_pid(daemon.client, mount), signal.SIGKILL)
    with pytest.raises(OSError, match="not connected"):
        (mount / FILES[5]).read_bytes()


def test_a_stopped_reader_does_not_stop_other_pushes(view: DatasetView, mount: Path, daemon_side: Orders) -> None:
    fd = os.open(mount / FILES[5], os.O_RDONLY)
    assert daemon_side.failed(daemon_side.give(view, FILES)) == []
    os.close(fd)
    with pytest.raises(NothingThere):
        daemon_side.reports.get(timeout=0.1)
