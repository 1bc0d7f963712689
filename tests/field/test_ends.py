"""How programs, mounts and nodes end while others go on."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.mounting import mounted
from tests.waiting import until

FILES = 100
SECONDS = 100.0
# `python -c READER ROOT`: reads all files for each line that it gets, and says how many were right, or the error.
READER = """
import os, sys
for _ in sys.stdin:
    right = 0
    for name in sorted(os.listdir(sys.argv[1])):
        with open(f"{sys.argv[1]}/{name}") as file: right += file.read() == name * 1000
    print(right, flush=True)
"""


class Reader:
    """A program that reads all files when it is told to."""

    def __init__(self, mount: Path, wrapper: list[str]) -> None:
        command = [*wrapper, sys.executable, "-c", READER, str(mount)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def end(self) -> None:
        self._process.communicate(timeout=SECONDS)


@contextmanager
def reader(mount: Path, *wrapper: str) -> Iterator[Reader]:
    one = Reader(mount, [*wrapper])
    try:
        yield one
    finally:
        one.end()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("ends")
    (home / "origin").mkdir()
    for number in range(FILES):
        (home / "origin" / f"{number:04}").write_text(f"{number:04}" * 1000)
    with Daemon(home / "n") as daemon:
        daemon.add_dataset("files", f"file://{home / 'origin'}")
        yield daemon


def test_a_container_keeps_the_mount_that_is_unmounted_outside(daemon: Daemon, tmp_path: Path) -> None:
    mount = tmp_path / "mnt"
    with mounted(daemon.socket, "files", mount), reader(mount, "unshare", "-m", "--propagation", "private") as inside:
        assert inside.read() == f"{FILES}\n"
        subprocess.run(["umount", mount], check=True)
        assert not os.path.ismount(mount)
        assert inside.read() == f"{FILES}\n"
    mount.rmdir()


def test_a_daemon_that_is_told_to_end_and_comes_again(daemon: Daemon, tmp_path: Path) -> None:
    with mounted(daemon.socket, "files", tmp_path / "mnt") as mount, reader(mount) as outside:
        assert outside.read() == f"{FILES}\n"
        daemon.stop()
        assert outside.read() == f"{FILES}\n", "what is on the node is read without the daemon"
        daemon.start()
        assert outside.read() == f"{FILES}\n"
        until(lambda: [one.alive for one in daemon.status().mounts], is_right=lambda found: found == [True])
