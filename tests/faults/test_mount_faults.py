"""Mounts whose daemon, process or bytes are taken away under a reader."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachefs.messages import Empty, Selection
from cachefs.mount import kernel
from cachefs.mount_table import mount_points
from cachefs.rpc import EVICT, NODE
from tests.cachectl import CACHECTL, cachectl
from tests.daemon import Daemon, shared_daemon
from tests.mounting import COMMAND as MOUNT
from tests.mounting import counters, drop_pages, frozen, mount_pid, mounted, read_tree, run_mount
from tests.waiting import until


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(3)
    top = tmp_path_factory.mktemp("origin")
    for number in range(120):
        directory = top / f"class{number % 5}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:03}.bin").write_bytes(rng.randbytes(rng.randrange(1, 200_000)))
    (top / "large").write_bytes(rng.randbytes(9 << 20))
    return top


# A daemon that starts on a machine with a load of 20 takes longer than the 20 s of other tests.
PATIENT = {"daemon": {"read_deadline": 60}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node"), PATIENT) as running:
        yield running


@pytest.fixture
def daemon(request: pytest.FixtureRequest, running: Daemon, tmp_path: Path, tree: Path) -> Iterator[Daemon]:
    with shared_daemon(request, lambda: running, lambda: Daemon(tmp_path / "node", PATIENT)) as daemon:
        daemon.add_dataset("tree", f"file://{tree}")
        yield daemon


@pytest.mark.own_daemon
def test_a_waiting_reader_gets_its_bytes_from_the_restarted_daemon(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt") as mount:
        daemon.kill9()
        answers: list[bytes] = []
        reader = threading.Thread(target=lambda: answers.append((mount / "large").read_bytes()))
        reader.start()
        time.sleep(1)
        assert not answers
        daemon.start()
        reader.join(60)
        assert answers == [(tree / "large").read_bytes()]


@pytest.mark.own_daemon
def test_what_is_on_the_node_is_served_without_a_daemon(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "xattr") as mount:
        expected = read_tree(tree)
        assert read_tree(mount) == expected
        # The daemon commits what it has stored a few milliseconds later, or more on a loaded machine.
        files = [mount / os.fsdecode(name) for name, content in expected.items() if content]
        until(lambda: all(b"origin" not in os.getxattr(file, "user.cachefs.tier") for file in files))
        daemon.kill9()
        drop_pages(mount)
        assert read_tree(mount) == expected


def test_without_a_daemon_a_read_fails_at_its_deadline(tmp_path: Path, tree: Path) -> None:
    with Daemon(tmp_path / "node", {"daemon": {"read_deadline": 2}}) as daemon:
        daemon.add_dataset("tree", f"file://{tree}")
        with mounted(daemon.socket, "tree", tmp_path / "mnt") as mount:
            daemon.kill9()
            with pytest.raises(OSError, match="Input/output error") as caught:
                (mount / "large").read_bytes()
            assert caught.value.errno == errno.EIO
            assert "did not answer in time" in Path(f"{mount}.log").read_text()


@pytest.mark.own_daemon
def test_kills_of_the_daemon_under_readers_cost_no_byte(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    expected = read_tree(tree)
    with mounted(daemon.socket, "tree", tmp_path / "mnt") as mount:
        wrong: list[str] = []
        stop = threading.Event()

        def read_for_ever(seed: int) -> None:
            rng = random.Random(seed)
            names = [name for name, content in expected.items() if content is not None]
            while not stop.is_set():
                name = rng.choice(names)
                path = os.path.join(os.fsencode(mount), name)
                with open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    if file.read() != expected[name]:
                        wrong.append(repr(name))

        readers = [threading.Thread(target=read_for_ever, args=(seed,)) for seed in range(3)]
        for reader in readers:
            reader.start()
        for _ in range(2):
            daemon.client.call(EVICT, Selection(dataset="tree"))
            time.sleep(0.3)
            daemon.kill9()
            daemon.start()
        stop.set()
        for reader in readers:
            reader.join(60)
            assert not reader.is_alive()
        assert not wrong


def test_flipped_bytes_are_never_read_and_are_repaired(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    expected = read_tree(tree)
    with mounted(daemon.socket, "tree", tmp_path / "mnt") as mount:
        assert read_tree(mount) == expected
        repairs = daemon.status().repairs
        rng = random.Random(4)
        segments = [path for directory in (daemon.memory, daemon.ssd) for path in directory.glob("*.seg")]
        assert segments
        for _ in range(100):
            path = rng.choice(segments)
            with path.open("r+b") as file:
                file.seek(rng.randrange(path.stat().st_blocks * 512))  # the rest is a hole
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0xFF]))
        drop_pages(mount)
        assert read_tree(mount) == expected
        repaired = daemon.status().repairs - repairs
        assert repaired > 0
        # Two requests for parts of one block, at the same time, may both find it bad. It is repaired once.
        assert counters(daemon.client, mount)["bad"] >= repaired


def test_a_killed_mount_is_recovered_by_mounting_again(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt") as mount:
        os.kill(mount_pid(daemon.client, mount), signal.SIGKILL)
        until(lambda: kernel.is_dead(mount))
        with mounted(daemon.socket, "tree", mount) as again:
            assert (again / "large").read_bytes() == (tree / "large").read_bytes()


def test_a_mount_that_hangs_does_not_hang_who_mounts_there_again(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt") as mount:
        with frozen(daemon.client, mount):
            again = run_mount(daemon.socket, "tree", mount)
        assert again.returncode == 32
        assert f"cachectl umount {mount}" in again.stderr
        assert "does not answer" in again.stderr


def test_of_two_mounts_on_one_directory_one_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    directory.mkdir()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run_mount(daemon.socket, "tree", directory), range(2)))
    try:
        assert sorted(done.returncode for done in both) == [0, 32], both
        assert [point.path for point in mount_points()].count(directory) == 1
    finally:
        kernel.unmount(directory, lazy=True)


def test_readers_of_a_mount_that_ends_get_errors_and_no_empty_directory(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "mnt", "grace=1") as mount:
        pid = mount_pid(daemon.client, mount)
        errors: list[int | None] = []

        def read_until_it_fails() -> None:
            try:
                while True:
                    drop_pages(mount)
                    assert len(read_tree(mount)) == 126
            except OSError as error:
                errors.append(error.errno)

        reader = threading.Thread(target=read_until_it_fails)
        reader.start()
        os.kill(pid, signal.SIGTERM)
        reader.join(60)
        assert not reader.is_alive()
        assert set(errors) <= {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
        assert errors
        until(lambda: not Path(f"/proc/{pid}").exists())
        assert kernel.is_dead(mount)


def test_errors_of_the_command_are_one_line(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    absent = run_mount(daemon.socket, "tree", directory)
    assert absent.returncode == 32
    assert f"mkdir -p {directory}" in absent.stderr
    directory.mkdir()
    for socket, spec, options, says, status in (
        (daemon.socket, "other", (), "cachectl dataset add other", 32),
        (tmp_path / "no.sock", "tree", ("daemon_wait=0",), "start it with `cachefsd`", 32),
        (daemon.socket, "tree", ("colour=red",), "colour=red", 1),
        (daemon.socket, "tree", ("log=/nonexistent/log",), "log=/nonexistent/log: No such file", 1),
    ):
        done = run_mount(socket, spec, directory, *options)
        assert done.returncode == status
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
    view = daemon.client.call(NODE, Empty())
    for place, says, status in (
        ("", "DIRECTORY is empty", 1),
        ("/", "would cover the daemon's socket", 32),
        (str(Path(view.index).parent), "would cover the daemon's index", 32),
        (str(Path(view.datasets[0].path).parent), "would cover the snapshot of tree", 32),
        (str(tree), "would cover the origin of tree", 32),
    ):
        command = [*MOUNT, "-o", f"socket={daemon.socket}", "--", "tree", place]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (status, 1)
        assert says in done.stderr
    with mounted(daemon.socket, "tree", directory):
        again = run_mount(daemon.socket, "tree", directory)
        assert again.returncode == 32
        assert "already is a cachefs mount" in again.stderr


def test_a_mount_point_may_be_a_link(daemon: Daemon, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for link, target in (("one", "two"), ("two", "real")):
        (tmp_path / link).symlink_to(target)
    with mounted(daemon.socket, "tree", tmp_path / "one", "no_push"):
        assert [point.path for point in mount_points()].count(tmp_path / "real") == 1
        assert (tmp_path / "real" / "large").read_bytes() == (tree / "large").read_bytes()
        again = run_mount(daemon.socket, "tree", tmp_path / "two")
        assert "already is a cachefs mount" in again.stderr
        assert cachectl(daemon.socket, "umount", tmp_path / "one").returncode == 0
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic link to itself" in run_mount(daemon.socket, "tree", tmp_path / "loop").stderr


def test_names_may_begin_with_a_dash(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "-dash").mkdir()
    command = [CACHECTL, "mount", "--socket", daemon.socket, "-o", "no_push", "--", "tree", "-dash"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    try:
        assert done.returncode == 0, done.stderr
    finally:
        kernel.unmount(tmp_path / "-dash", lazy=True)


def test_a_mount_keeps_nothing_of_its_callers_open(daemon: Daemon, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    (tmp_path / "mnt").mkdir()
    command = [*MOUNT, "tree", str(tmp_path / "mnt"), "-o", f"socket={daemon.socket},no_push"]
    subprocess.run(command, pass_fds=(writer,), check=True, timeout=60)
    os.close(writer)
    try:
        os.set_blocking(reader, False)
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
        kernel.unmount(tmp_path / "mnt", lazy=True)


def test_sighup_unmounts(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    quick = "from cachefs.mount import mount_use; mount_use.WATCH_SECONDS = 0.2"
    mount_cachefs = [sys.executable, "-c", f"{quick}\nfrom cachefs.mount.cli import main\nmain()"]
    command = [*mount_cachefs, "tree", str(tmp_path / "mnt"), "-f", "-o", f"socket={daemon.socket},no_push"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as mount:
        assert mount.stdout is not None
        assert "mounted on" in mount.stdout.readline()
        mount.send_signal(signal.SIGHUP)
        assert mount.wait(60) == 0
    assert tmp_path / "mnt" not in [point.path for point in mount_points()]
