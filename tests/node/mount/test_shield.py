"""Mounts behind a shield: ioctls are answered in the kernel, and nothing else is different."""

import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cachefs.inodes import read_mounted_snapshot
from cachefs.mount import kernel, shield
from cachefs.mount_spec import MountSpec
from cachefs.mount_table import MountPoint, mount_points
from tests.daemon import Daemon
from tests.mounting import counters, mount_pid, mounted, read_tree, run_mount
from tests.waiting import until

TCGETS = 0x5401
FILES = 20

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a shield takes root")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("origin")
    for number in range(FILES):
        path = top / f"class{number % 3}" / f"{number:03}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([number]) * (10_000 * number))
    return top


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node")) as running:
        running.add_dataset("tree", f"file://{tree}")
        yield running


@pytest.fixture(scope="module")
def mount(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(daemon.socket, "tree", tmp_path_factory.mktemp("mnt") / "a b", "shield=on") as directory:
        yield directory


def point_of(directory: Path) -> MountPoint:
    (found,) = (point for point in mount_points() if point.path == directory)
    return found


def ask_whether_terminals(directory: Path) -> None:
    for path in directory.rglob("*.bin"):
        with path.open("rb", buffering=0) as file, pytest.raises(OSError, match="Inappropriate ioctl") as caught:
            fcntl.ioctl(file, TCGETS, bytes(64))
        assert caught.value.errno == errno.ENOTTY


def test_no_ioctl_reaches_a_mount_with_a_shield(daemon: Daemon, mount: Path, tree: Path) -> None:
    assert read_tree(mount) == read_tree(tree)
    before = counters(daemon.client, mount)
    ask_whether_terminals(mount)
    for path in mount.rglob("*.bin"):
        path.read_bytes()
    after = counters(daemon.client, mount)
    assert after["ioctl"] == 0
    # The pusher and the kernel may ask for something of their own, but nobody once per file.
    assert after["requests"] - before["requests"] < FILES


def test_without_a_shield_each_one_does_and_is_counted(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "m", "shield=off") as directory:
        ask_whether_terminals(directory)
        counted = counters(daemon.client, directory)
        assert counted["ioctl"] == FILES
        assert counted["requests"] >= FILES
        script = "import pathlib, sys; [open(path).close() for path in pathlib.Path(sys.argv[1]).rglob('*.bin')]"
        command = [sys.executable, "-c", script, str(directory)]
        cachefs = Path(sys.executable).with_name("cachefs")
        subprocess.run([cachefs, "run", "--socket", daemon.socket, "--", *command], check=True)
        assert counters(daemon.client, directory)["ioctl"] == FILES


def test_the_table_of_mounts_shows_dataset_and_connection(mount: Path) -> None:
    point = point_of(mount)
    assert (point.source, point.spec) == ("cachefs:tree", "tree")
    assert point.shielded_connection == point.connection != int(point.device.partition(":")[2])
    assert Path(f"/sys/class/bdi/0:{point.connection}/read_ahead_kb").read_text() == "1024\n"
    shown = subprocess.run(["findmnt", "-no", "FSTYPE,SOURCE,OPTIONS", mount], capture_output=True, text=True)
    kind, source, options = shown.stdout.split(maxsplit=2)
    assert (kind, source) == ("overlay", "cachefs:tree")
    assert {"ro", "nosuid", "nodev"} <= set(options.split(","))


def test_numbers_and_attributes_are_those_of_a_mount_without(daemon: Daemon, mount: Path, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "m", "shield=off") as plain:
        for name in (".", "class1", "class1/004.bin", ".cachefs", ".cachefs/publish"):
            ours, theirs = os.stat(mount / name), os.stat(plain / name)
            for field in ("st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize"):
                assert getattr(ours, field) == getattr(theirs, field), (name, field)
            if not name.startswith(".cachefs"):
                assert ours.st_mtime_ns == theirs.st_mtime_ns
                assert read_mounted_snapshot(mount) == read_mounted_snapshot(plain)
        assert stat.S_ISFIFO((mount / ".cachefs" / "publish").stat().st_mode)
    assert len({path.stat().st_dev for path in (mount, *mount.rglob("*"))}) == 1


def test_another_user_reads_and_may_write_to_the_control_file(mount: Path) -> None:
    mount.parent.chmod(0o755)
    script = 'test -w "$0/.cachefs/publish" && exec cat "$0/class1/004.bin"'
    for directory in (*mount.parents,):
        if directory.stat().st_uid == os.getuid() and not directory.stat().st_mode & stat.S_IXOTH:
            directory.chmod(0o711)
    command = ["setpriv", "--reuid=4321", "--clear-groups", "sh", "-c", script, str(mount)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == bytes([4]) * 40_000


ENDS: list[list[str]] = [["umount"], ["umount", "-l"], ["fusermount3", "-u"]]


@pytest.mark.parametrize("command", ENDS, ids=" ".join)
def test_however_it_is_unmounted_all_of_it_ends(daemon: Daemon, tmp_path: Path, command: list[str]) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "m", "shield=on") as directory:
        supervisor = psutil.Process(mount_pid(daemon.client, directory))
        processes = [supervisor, *supervisor.children()]
        subprocess.run([*command, directory], check=True, timeout=20)
        assert psutil.wait_procs(processes, timeout=20)[1] == []
        assert not any(directory.iterdir())


def test_a_lazy_unmount_leaves_open_files_alone(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "m", "shield=on") as directory:
        supervisor = psutil.Process(mount_pid(daemon.client, directory))
        with (directory / "class1" / "010.bin").open("rb") as file:
            kernel.unmount(directory, lazy=True)
            assert file.read() == bytes([10]) * 100_000
            assert supervisor.is_running()
        supervisor.wait(60)


def test_a_killed_mount_answers_with_errors_and_is_recovered(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "tree", tmp_path / "m", "shield=on") as directory:
        os.kill(mount_pid(daemon.client, directory), signal.SIGKILL)
        until(lambda: kernel.is_dead(directory))
        with pytest.raises(OSError, match=r"Transport endpoint is not connected|Software caused connection abort"):
            (directory / "class1" / "004.bin").read_bytes()
        with mounted(daemon.socket, "tree", directory, "shield=on") as again:
            assert (again / "class1" / "004.bin").read_bytes() == bytes([4]) * 40_000
            assert point_of(directory).shielded_connection


def test_below_a_shared_mount_too(daemon: Daemon, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", shared], check=True)
    subprocess.run(["mount", "--make-shared", shared], check=True)
    try:
        with mounted(daemon.socket, "tree", shared / "m", "shield=on") as directory:
            assert point_of(directory).shielded_connection
            assert (directory / "class1" / "004.bin").read_bytes() == bytes([4]) * 40_000
    finally:
        subprocess.run(["umount", "-R", "-l", shared], check=True)


def test_where_mounts_cannot_be_put_beneath_others(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_on_top(mount: int, directory: bytes, *, beneath: bool = False) -> None:
        if beneath:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        kernel.attach_mount(mount, directory)

    monkeypatch.setattr(shield, "attach_mount", only_on_top)
    with mounted(daemon.socket, "tree", tmp_path / "m", "shield=off") as directory:
        number = kernel.connection_number(directory)
        assert number is not None
        assert shield._put_up_in_child(MountSpec.parse("tree"), directory, number, ("nosuid",)) is None
        assert point_of(directory).shielded_connection == number
        assert (directory / "class1" / "004.bin").read_bytes() == bytes([4]) * 40_000


def test_a_container_and_an_overlay_may_stand_on_it(mount: Path, tmp_path: Path) -> None:
    bound, upper, work, merged = (tmp_path / name for name in ("bound", "upper", "work", "merged"))
    for directory in (bound, upper, work, merged):
        directory.mkdir()
    with contextlib.ExitStack() as unmounts:
        subprocess.run(["mount", "--bind", mount, bound], check=True)
        unmounts.callback(subprocess.run, ["umount", bound], check=True)
        assert (bound / "class1" / "004.bin").read_bytes() == bytes([4]) * 40_000
        options = f"lowerdir={bound},upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], check=True)
        unmounts.callback(subprocess.run, ["umount", merged], check=True)
        (merged / "class1" / "004.bin").write_bytes(b"changed")
        assert (merged / "class1" / "004.bin").read_bytes() == b"changed"
        assert (mount / "class1" / "004.bin").stat().st_size == 40_000


def test_a_mount_of_several_datasets_has_none_and_says_so(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "all", tmp_path / "m") as directory:
        assert point_of(directory).shielded_connection is None
        log = Path(f"{directory}.log").read_text()
        assert log.count("no shield over") == 1
        assert "several datasets" in log
    (tmp_path / "n").mkdir()
    refused = run_mount(daemon.socket, "all", tmp_path / "n", "shield=on")
    assert refused.returncode == 32
    assert "several datasets" in refused.stderr
    assert not any(point.path == tmp_path / "n" for point in mount_points())


def test_a_path_longer_than_a_layer_may_be(daemon: Daemon, tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 200) / ("y" * 200)
    directory.parent.mkdir()
    with mounted(daemon.socket, "tree", directory, "shield=on"):
        assert point_of(directory).shielded_connection
