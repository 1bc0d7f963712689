"""The piece of C that `cachefs run` loads into Pythons: programs that are no children, and a quiet isatty."""

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

try:
    from cachefs import _process
except ImportError:
    if shutil.which("cc") or shutil.which("gcc"):
        pytest.fail("cachefs/_process.c is not built: `python setup.py build_ext --inplace`", pytrace=False)
    pytest.skip("there is no C compiler", allow_module_level=True)

SAY = "import os, sys; os.write({fd}, repr(({what})).encode())"
SPARE = "from cachefs import _process; _process.spare_isatty(); "
ASK = "import os, sys; print(*(os.isatty(int(fd)) for fd in sys.argv[1:]))"


def said_by(what: str, environment: tuple[bytes, ...] = ()) -> str:
    """What a program says that is no child."""
    reader, writer = os.pipe()
    code = SAY.format(fd=writer, what=what)
    arguments = (sys.executable, "-I", "-S", "-c", code)
    number = _process.start(os.fsencode(sys.executable), tuple(map(os.fsencode, arguments)), environment, (writer,) * 4)
    os.close(writer)
    with os.fdopen(reader) as pipe, contextlib.suppress(ProcessLookupError):
        text = pipe.read().replace(str(number), "NUMBER").replace(str(os.getpid()), "THIS")
    return text


def check_that_no_child_is_seen() -> None:
    came: list[int] = []
    signal.signal(signal.SIGCHLD, lambda number, frame: came.append(number))
    assert said_by("os.getpid(), os.getsid(0), os.getppid() != THIS".replace("THIS", str(os.getpid()))) == (
        "(NUMBER, NUMBER, True)"
    )
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(-1, 0) == (child, 0)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert came == [signal.SIGCHLD], "of the job's own child"


def test_a_program_is_no_child_and_its_end_no_signal() -> None:
    """In a process without children: the one that runs tests may have some."""
    fresh = os.fork()
    if not fresh:
        status = 1
        try:
            check_that_no_child_is_seen()
            status = 0
        finally:
            traceback.print_exc()
            os._exit(status)
    assert os.waitpid(fresh, 0) == (fresh, 0)


def test_a_program_has_nothing_of_the_job(tmp_path: Path) -> None:
    kept = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(kept, True)
    signals = "[line for line in open('/proc/self/status') if line[:6] in ('SigBlk', 'SigCgt')][0].split()[1]"
    links = "[os.readlink('/proc/self/fd/%d' % fd) for fd in range(3)], len(os.listdir('/proc/self/fd'))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        assert said_by(f"{links}, {signals}, [name for name in os.environ if name != 'LC_CTYPE']", (b"A=1",)) == (
            "(['/dev/null', '/dev/null', '/dev/null'], 5, '0000000000000000', ['A'])"
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(kept)
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_what_cannot_be_run_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        _process.start(b"/nowhere/python", (b"python",), (), (0, 0, 0, 0))
    with pytest.raises(TypeError):
        _process.start(b"/bin/true", ("text",), (), (0, 0, 0, 0))


def answers(code: str, *descriptors: int) -> str:
    command = [sys.executable, "-c", code, *map(str, descriptors)]
    done = subprocess.run(command, pass_fds=descriptors, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout


def test_it_says_of_every_descriptor_what_the_own_isatty_says(tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    pipe, _ = os.pipe()
    _, terminal = pty.openpty()
    null, directory = os.open(os.devnull, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    asked = (file, pipe, terminal, null, directory)
    without = answers(ASK, *asked)
    assert without.split() == ["False", "False", "True", "False", "False"]
    assert answers(SPARE + ASK, *asked) == without
    for descriptor in asked:
        os.close(descriptor)


def test_it_needs_no_library_that_a_python_may_lack() -> None:
    done = subprocess.run(["readelf", "-d", _process.__file__], capture_output=True, text=True, check=True)
    assert "NEEDED" not in done.stdout
    assert "VERNEED" not in done.stdout
