"""Lines on the standard error of a job: never in its way."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cachefs.publishing import stderr
from cachefs.publishing.stderr import file_identity, without_sigpipe, write_line

BEGIN = "import os, signal, sys; signal.signal(signal.SIGPIPE, signal.SIG_DFL); "
WRITE = "from cachefs.publishing.stderr import write_line; write_line('a line'); print('goes on', flush=True)"


def run(script: str, stderr: int) -> str:
    """What a process with this standard error prints; it has to end, and well."""
    return subprocess.run(
        [sys.executable, "-c", BEGIN + script], stdout=subprocess.PIPE, stderr=stderr, timeout=60, check=True, text=True
    ).stdout


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)


def test_a_line_is_written(pipe: tuple[int, int]) -> None:
    assert run(WRITE, pipe[1]) == "goes on\n"
    assert os.read(pipe[0], 100) == b"a line\n"


def test_a_reader_that_is_gone_ends_no_job(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    assert run(WRITE, pipe[1]) == "goes on\n"


def test_a_reader_that_does_not_read_stops_no_job(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    while len(stderr.select.select([], [pipe[1]], [], 0)[1]):
        os.write(pipe[1], bytes(4096))
    os.set_blocking(pipe[1], True)
    assert run(WRITE, pipe[1]) == "goes on\n"


def test_another_file_under_the_number_gets_no_line(pipe: tuple[int, int]) -> None:
    """The job's own, since the process began."""
    script = "import cachefs.publishing.stderr; r, w = os.pipe(); os.dup2(w, 2); "
    more = "; os.set_blocking(r, False)\ntry: print(os.read(r, 9))\nexcept BlockingIOError: print('nothing')"
    assert run(script + WRITE + more, pipe[1]) == "goes on\nnothing\n"


@pytest.mark.parametrize("close", ["os.close(2); ", "os.closerange(0, 3); os.dup2(os.open('/dev/null', 2), 1); "])
def test_a_standard_error_that_is_closed_gets_no_line(pipe: tuple[int, int], close: str) -> None:
    run(close + WRITE, pipe[1])


def test_what_the_job_has_put_in_place_of_sys_stderr_is_not_asked(pipe: tuple[int, int]) -> None:
    assert run("sys.stderr = None; " + WRITE, pipe[1]) == "goes on\n"
    assert os.read(pipe[0], 100) == b"a line\n"


def test_a_line_has_an_end(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe takes so many bytes as a whole."""
    before = os.dup(2)
    os.dup2(pipe[1], 2)
    try:
        monkeypatch.setattr(stderr, "initial_identity", file_identity(2))
        write_line("x" * 9000)
    finally:
        os.dup2(before, 2)
        os.close(before)
    assert os.read(pipe[0], 9999) == b"x" * 4095 + b"\n"


def test_a_broken_pipe_is_an_error_and_no_signal() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    came: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, frame: came.append(number))
    try:
        with pytest.raises(BrokenPipeError), without_sigpipe():
            os.write(writer, b"x")
        assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
        signal.raise_signal(signal.SIGPIPE)
        with without_sigpipe():
            pass
        assert signal.SIGPIPE in signal.sigpending(), "the job's own SIGPIPE is left to it"
        assert signal.SIGPIPE in signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])
        assert came == [signal.SIGPIPE]
    finally:
        signal.signal(signal.SIGPIPE, before)
        os.close(writer)


def test_sigpipe_is_not_kept_blocked_where_a_handler_of_the_job_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> set[signal.Signals]:
        raise KeyboardInterrupt

    pending = [set, interrupted]
    monkeypatch.setattr(signal, "sigpending", lambda: pending.pop(0)())
    with pytest.raises(KeyboardInterrupt), without_sigpipe():
        pass
    assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
