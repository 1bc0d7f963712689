"""What `mount.cachefs` checks itself, before and after the mount is made."""

import os
import signal
from pathlib import Path

import pytest

from cachefs.errors import CachefsError
from cachefs.mount import kernel
from tests.mounting import run_mount

# In place of the whole mount.
NO_MOUNT = "import sys, cachefs.mount.cli as cli; cli.serve = lambda *given: (given[-2](), given[-1]())"
DIES = """
import os, time, cachefs.mount.cli as cli
def serve(*_):
    if other := os.fork():
        print(other, flush=True)
        os.kill(os.getpid(), 9)
    cli.detach_terminal()
    time.sleep(100)
cli.serve = serve
"""


@pytest.mark.parametrize(
    "place", ["/proc/self", "/proc", "/proc/self/cwd", "/sys/fs", "/dev", "/dev/shm", "/tmp/../proc"]
)
def test_directories_of_the_kernel_are_refused(tmp_path: Path, place: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(place)
    for directory in (place, f"{link}"):
        done = run_mount(tmp_path / "none", "ds", Path(directory))
        assert done.returncode == 32
        [line] = done.stderr.splitlines()
        assert line.startswith(f"mount.cachefs: {directory} ")


def test_links_that_only_this_process_sees_so_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(f"/proc/{os.getpid()}/root{tmp_path}")
    with pytest.raises(CachefsError, match="leads through a link of /proc"):
        kernel.check_mount_point(tmp_path / "link")
    (tmp_path / "ordinary").symlink_to(tmp_path)
    assert kernel.check_mount_point(tmp_path / "ordinary") == tmp_path
    assert kernel.check_mount_point(Path("/dev/shm/x")) == Path("/dev/shm/x")


@pytest.mark.parametrize("option", ["", "-f"])
def test_it_fails_where_nothing_is_mounted_after_all(tmp_path: Path, option: str) -> None:
    """As where somebody moved the directory, or unmounted it, in that moment."""
    patch = f"{NO_MOUNT}; sys.argv += {option.split()}"
    done = run_mount(Path("/none"), "ds", tmp_path, patch=patch)
    assert (done.returncode, done.stdout) == (32, "")
    assert f"{tmp_path} was unmounted, moved or removed" in done.stderr


def test_a_mount_that_dies_while_it_starts_is_told(tmp_path: Path) -> None:
    """Another process of it has the pipe open, through which it would have answered."""
    done = run_mount(Path("/none"), "ds", tmp_path, patch=DIES)
    os.kill(int(done.stdout), signal.SIGKILL)  # it is still there
    assert done.returncode == 32
    assert "died while starting" in done.stderr


def test_paths_that_lead_nowhere_are_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for below, says in (
        ("loop/x", "circle"),
        ("n" * 300, "too long"),
        ("file/x", "Not a directory"),
        ("no/x", "mkdir"),
    ):
        done = run_mount(tmp_path / "loop/s", "ds", tmp_path / below)
        assert done.returncode == 32, below
        [line] = done.stderr.splitlines()
        assert says in line
