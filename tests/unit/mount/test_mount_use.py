"""Which processes use a directory, found within a bound."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachefs import _process
from cachefs.mount import mount_use
from cachefs.mount.mount_use import MAX_USERS, describe_users


def test_a_process_in_the_directory_is_named(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], cwd=tmp_path, stdin=subprocess.PIPE) as process:
        assert f"cat (process {process.pid}: is in {tmp_path})" in describe_users(tmp_path, seconds=600)
        assert process.stdin is not None
        process.stdin.close()


def test_a_look_ends_with_its_time(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], cwd=tmp_path, stdin=subprocess.PIPE) as process:
        assert not describe_users(tmp_path, seconds=0)
        assert process.stdin is not None
        process.stdin.close()


def test_no_more_processes_are_looked_at_than_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def without_end(*_: object) -> Iterator[tuple[int, str, str]]:
        for pid in itertools.count(1):
            looked_at.append(pid)
            yield pid, "python", "is in it"

    monkeypatch.setattr(mount_use, "_find_users", without_end)
    assert describe_users(tmp_path).endswith("python (process 5: is in it), and more")
    assert len(looked_at) == MAX_USERS + 1


def test_a_process_is_named_once_and_those_that_have_only_mapped_a_file_last(tmp_path: Path) -> None:
    path = shutil.copy(_process.__file__, tmp_path / "library")
    maps = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); "
    waits = "print(flush=True); sys.stdin.read()"
    with ExitStack() as stack:

        def start(script: str) -> int:
            command = [sys.executable, "-S", "-c", script, path]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(process.communicate)
            assert process.stdout is not None
            process.stdout.readline()
            return process.pid

        mapping = start(f"{maps}{waits}")
        both = start(f"{maps}file = open(sys.argv[1]); {waits}")
        expected = f"python (process {both}: has {path} open), python (process {mapping}: has {path} mapped)"
        assert describe_users(tmp_path, seconds=600) == expected
