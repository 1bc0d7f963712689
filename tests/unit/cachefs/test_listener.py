"""Who listens at a socket, and whether he is stopped."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.listener import is_stopped, listening_process, why_silent


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
        assert why_silent(path) == ""
    assert listening_process(path) is None


def test_a_stopped_process_is_found_and_named(path: Path) -> None:
    program = "import socket as s, sys; a = s.socket(s.AF_UNIX); a.bind(sys.argv[1]); a.listen(); print(1); input()"
    with subprocess.Popen([sys.executable, "-u", "-c", program, path], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert f"kill -CONT {child.pid}" in why_silent(path)
        child.kill()


def test_a_name_may_have_blanks_and_brackets(tmp_path: Path) -> None:
    for number, (state, stopped) in enumerate((("T", True), ("S", False), ("t", True))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} (a) b) {state} 1 2 3")
        assert is_stopped(number, tmp_path) is stopped
    assert not is_stopped(99, tmp_path)
