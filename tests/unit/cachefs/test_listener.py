"""Who listens at a socket, and whether he is stopped."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs import listener
from cachefs.listener import is_stopped, listening_process, silence_reason, stopped_reason


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def test_the_kernel_tells_who_listens(path: Path) -> None:
    assert listening_process(path) is None
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert listening_process(path) is None  # a socket at which nobody listens
        server.listen()
        assert listening_process(path) == os.getpid()
        assert silence_reason(path) == ""
    assert listening_process(path) is None


@pytest.fixture
def stopped(path: Path) -> Iterator[int]:
    """A process that listens at the path, and is stopped."""
    program = "import socket as s, sys; a = s.socket(s.AF_UNIX); a.bind(sys.argv[1]); a.listen(); print(1); input()"
    with subprocess.Popen([sys.executable, "-u", "-c", program, path], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stop(child.pid)
        yield child.pid
        child.kill()


def stop(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    os.waitpid(process, os.WUNTRACED)


def test_a_stopped_process_is_found_and_named(path: Path, stopped: int) -> None:
    assert f"kill -CONT {stopped}" in silence_reason(path)
    assert f"kill -CONT {stopped}" in stopped_reason(path)


def test_a_process_that_runs_between_two_looks_may_answer(
    path: Path, stopped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is with cpulimit, which stops and continues a process many times a second."""

    def run_for_a_moment(_: float) -> None:
        os.kill(stopped, signal.SIGCONT)
        os.waitpid(stopped, os.WCONTINUED)
        stop(stopped)

    monkeypatch.setattr(listener.time, "sleep", run_for_a_moment)
    assert stopped_reason(path) == ""


def test_a_traced_process_may_answer(path: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        (tmp_path / str(os.getpid())).mkdir()
        for state, is_named in (("t (tracing stop)", False), ("T (stopped)", True)):
            (tmp_path / str(os.getpid()) / "status").write_text(f"Name:\ta\nState:\t{state}\nPid:\t7\n")
            assert bool(stopped_reason(path, tmp_path)) is is_named


def test_a_name_may_have_blanks_and_brackets(tmp_path: Path) -> None:
    for number, (state, stopped) in enumerate((("T", True), ("S", False), ("t", True))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} (a) b) {state} 1 2 3")
        assert is_stopped(number, tmp_path) is stopped
    assert not is_stopped(99, tmp_path)
