"""Ending the connection of a mount that nobody serves: with the control files of fusectl, and without them."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from cachefs.mount import device, kernel
from cachefs.mount.device import FuseConnection
from cachefs.mount_table import mount_points
from tests.daemon import Daemon
from tests.mounting import mount_pid, mounted


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    tree = tmp_path_factory.mktemp("origin")
    (tree / "file").write_bytes(bytes(100_000))
    with Daemon(tmp_path_factory.mktemp("node")) as running:
        running.add_dataset("tree", f"file://{tree}")
        yield running


@pytest.fixture
def mount(daemon: Daemon, tmp_path: Path) -> Iterator[Path]:
    """Where all processes of the mount are stopped, so that only its end answers readers."""
    # Where there are no control files there is no shield either.
    with mounted(daemon.socket, "tree", tmp_path / "m", "no_push", "shield=off") as directory:
        supervisor = psutil.Process(mount_pid(daemon.client, directory))
        processes = [supervisor, *supervisor.children()]
        (directory / "file").stat()
        for process in processes:
            process.suspend()
        try:
            yield directory
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def connection(directory: Path) -> FuseConnection:
    number = kernel.connection_number(directory)
    assert number is not None
    return FuseConnection(number, directory)


def assert_it_can_be_ended(ours: FuseConnection, directory: Path) -> None:
    reader = subprocess.Popen(["cat", str(directory / "file")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        reader.wait(0.5)
    assert ours.has_waiting()
    ours.abort()
    said = reader.communicate(timeout=60)[1]
    assert any(os.strerror(code).encode() in said for code in (errno.ENOTCONN, errno.ECONNABORTED)), said
    assert kernel.is_dead(directory)
    assert [point.path for point in mount_points()].count(directory) == 1


def refuse(*_: object) -> NoReturn:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def control_mounts() -> list[str]:
    """The lines of fusectl file systems; other tests mount other things meanwhile."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - fusectl " in line]


def test_a_control_file_system_that_is_mounted_nowhere_is_used(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CONNECTIONS", mount.parent / "nowhere")
    before = control_mounts()
    ours = connection(mount)
    assert ours.has_abort
    assert not ours.has_waiting()
    assert control_mounts() == before
    assert_it_can_be_ended(ours, mount)


def test_without_any_control_files_a_forced_unmount_does(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CONNECTIONS", mount.parent / "nowhere")
    monkeypatch.setattr(device, "new_mount", refuse)
    ours = connection(mount)
    assert not ours.has_abort
    assert_it_can_be_ended(ours, mount)


def test_a_connection_that_is_gone_ends_no_other(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CONNECTIONS", mount.parent / "nowhere")
    monkeypatch.setattr(device, "new_mount", refuse)
    ours = connection(mount)
    FuseConnection(ours.number + 1, mount).abort()
    assert not kernel.is_stuck(mount.parent)
    assert_it_can_be_ended(ours, mount)


def test_a_forced_unmount_of_a_mount_that_nobody_serves_leaves_nothing(mount: Path) -> None:
    kernel.unmount(mount, lazy=True, force=True)
    assert mount not in [point.path for point in mount_points()]
    assert list(mount.iterdir()) == []
