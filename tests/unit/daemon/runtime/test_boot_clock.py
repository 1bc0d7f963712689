"""Processes are known by a clock that nobody sets."""

import ctypes
import os
import subprocess
import threading

import psutil
import pytest

from cachefs.messages import MountReport
from cachefs_daemon.jobs.liveness import PublisherLiveness
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.runtime.boot_clock import birth_of, now


def test_jobs_and_mounts_live_on_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    liveness, mounts = PublisherLiveness(os.getpid(), 60, 0.0), MountRegistry()
    mounts.add_report(MountReport(id="m", mountpoint="/m", spec="train", pid=os.getpid()))
    # The kernel says when it started by the clock of now, so the start of every process moves with it.
    started = psutil._pslinux.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: started + 5)
    assert liveness.end_reason(0.0) == ""
    assert mounts.is_alive("m")


def test_a_process_began_before_now_and_after_its_parent() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        own, its = birth_of(os.getpid()), birth_of(child.pid)
        assert own is not None
        assert its is not None
        assert own.seconds <= its.seconds <= now().seconds
        assert own.boot == its.boot == now().boot != ""
        assert birth_of(child.pid) == its
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert birth_of(child.pid) is None, "a zombie counts as gone"


def test_no_process_has_no_birth() -> None:
    assert birth_of(0) is birth_of(-1) is birth_of(1 << 30) is None


def test_a_name_with_blanks_and_parentheses_does_no_harm() -> None:
    born = birth_of(os.getpid())
    names: list[object] = []

    def run() -> None:
        ctypes.CDLL(None).prctl(15, b") R 1 (")  # PR_SET_NAME
        names.append(birth_of(threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    [found] = names
    assert found is not None
    assert found != born
