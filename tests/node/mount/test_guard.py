"""The process that ends a connection when the supervisor is gone, as the supervisor keeps it."""

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachefs.mount import child_process
from cachefs.mount.device import FuseConnection
from cachefs.mount.processes import supervisor
from cachefs.mount.processes.supervisor import ConnectionGuard

# In a process of its own, as pytest's has threads, and a guard is a fork.
SUPERVISOR = """
import os, signal, time
from pathlib import Path
import psutil
from cachefs.mount.device import FuseConnection
from cachefs.mount.processes.supervisor import ConnectionGuard

guard = ConnectionGuard(FuseConnection(0, Path("/nowhere")))
[first] = psutil.Process().children()
os.kill(first.pid, signal.SIGKILL)
while first.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
guard.keep_running()
while not (others := psutil.Process().children()):
    time.sleep(0.1)
    guard.keep_running()
[second] = others
guard.kill_process()
os.waitpid(second.pid, 0)
print(first.pid != second.pid)
"""


def test_one_that_is_killed_is_replaced() -> None:
    done = subprocess.run([sys.executable, "-c", SUPERVISOR], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_while_none_can_be_forked_the_mount_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    forks: list[str] = []

    def fork(name: str, directory: Path, work: object, *, ends_with_parent: bool) -> int:
        forks.append(name)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    seconds = itertools.count()
    monkeypatch.setattr(supervisor, "fork", fork)
    monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    ours = ConnectionGuard(FuseConnection(0, Path("/nowhere")))
    ours.keep_running()
    ours.kill_process()
    assert forks == ["guard", "guard"]
