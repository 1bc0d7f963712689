"""The `isatty` that `cachefs run` has programs load: what it says, and that no program notices it otherwise."""

import errno
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs import preload
from cachefs.preload import VARIABLE, preloaded

LIBRARY = preload.library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="it is built where there is a C compiler")
ASK = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for fd in map(int, sys.argv[1:]):
    ctypes.set_errno(0)
    print(libc.isatty(fd), ctypes.get_errno())
"""


def answers(*descriptors: int, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", ASK, *map(str, descriptors)]
    done = subprocess.run(command, env=environment, pass_fds=descriptors, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout


def test_it_says_of_every_descriptor_what_the_own_isatty_says(tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    pipe, _ = os.pipe()
    _, terminal = pty.openpty()
    null, directory = os.open(os.devnull, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    asked = (file, pipe, terminal, null, directory)
    without = answers(*asked, environment=dict(os.environ))
    assert without.splitlines()[0] == f"0 {errno.ENOTTY}"
    assert without.splitlines()[2] == "1 0"
    assert answers(*asked, environment={**os.environ, **preloaded(os.environ, [sys.executable])}) == without
    for descriptor in asked:
        os.close(descriptor)


def test_a_descriptor_that_is_not_open() -> None:
    environment = {**os.environ, **preloaded({}, [sys.executable])}
    done = subprocess.run([sys.executable, "-c", ASK, "99"], env=environment, capture_output=True, text=True)
    assert done.stdout == f"0 {errno.EBADF}\n"


def test_it_needs_no_library_that_a_program_may_lack() -> None:
    assert LIBRARY is not None
    done = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True)
    assert "NEEDED" not in done.stdout
    assert "VERNEED" not in done.stdout


def test_it_comes_last_and_once() -> None:
    first = preloaded({}, ["python"])
    assert first == {VARIABLE: str(LIBRARY)}
    assert preloaded({VARIABLE: "/a.so /b.so"}, ["python"]) == {VARIABLE: f"/a.so /b.so:{LIBRARY}"}
    assert preloaded(first, ["python"]) == {}


def test_a_program_for_another_machine_is_left_alone(tmp_path: Path) -> None:
    own = Path(sys.executable).resolve().read_bytes()[:64]
    for name, header in (("32-bit", own[:4] + b"\x01" + own[5:]), ("other", own[:18] + b"\xff\xff" + own[20:])):
        program = tmp_path / name
        program.write_bytes(header)
        program.chmod(0o755)
        assert preloaded({}, [str(program)]) == {}
    assert preloaded({}, [str(tmp_path / "absent")]) == {VARIABLE: str(LIBRARY)}


@pytest.mark.parametrize("directory", ["with space", "a:b", "$LIB"])
def test_a_path_that_the_loader_would_take_apart_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    monkeypatch.setattr(preload, "library", lambda: tmp_path / directory / "_isatty.so")
    assert preloaded({}, ["python"]) == {}
