"""Runs `cachectl` and the programs of `cachefs_bench` in the process of the test.

There they cost a fiftieth of a process of their own.

`cachectl_process` is for tests whose sentence has a process in it: a terminal, a pipe, a signal, files that are open,
or `mount`, which becomes another program. `CachectlOfUser` runs cachectl as another user, in one process for all calls.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
from click.testing import CliRunner

from cachefs_tools.cachectl import main
from tests.as_user import as_user

CACHECTL = Path(sys.executable).with_name("cachectl")
Word = str | bytes | Path


def run_here(
    program: click.Command,
    name: str,
    words: list[str],
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program in this process. Returns the same as a process of its own; what it raises is raised here."""
    with _signals_stay():
        done = CliRunner().invoke(program, words, input=stdin, env=environment, prog_name=name, catch_exceptions=False)
    return subprocess.CompletedProcess([name, *words], done.exit_code, done.stdout, done.stderr)


def cachectl(
    socket: Path, *words: Word, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run cachectl in this process, with a daemon at *socket*."""
    assert words[0] != "mount", "cachectl mount replaces its process; use cachectl_process"
    return run_here(main, "cachectl", [*map(os.fsdecode, words), "--socket", str(socket)], stdin, environment)


def cachectl_says(socket: Path, *words: Word) -> str:
    """What cachectl prints. It must succeed."""
    done = cachectl(socket, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cachectl_process(
    socket: Path, *words: Word, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run cachectl as users do, with a daemon at *socket*."""
    done = subprocess.run(
        [CACHECTL, *words, "--socket", socket], input=stdin, capture_output=True, timeout=100, check=False,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


class CachectlOfUser:
    """A process of another user that runs one cachectl command after the other, until the end of a `with` block."""

    def __init__(self, socket: Path, uid: int) -> None:
        command = [*as_user(uid), sys.executable, "-m", __name__, str(socket)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "CachectlOfUser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run cachectl. Returns the same as a process of its own."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process has ended: {self._process.poll()}"
        return subprocess.CompletedProcess(["cachectl", *words], **json.loads(line))


@contextlib.contextmanager
def _signals_stay() -> Iterator[None]:
    """The handlers of signals and the hook for errors that nothing can catch are the test's again at the end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers, hook = [signal.getsignal(number) for number in numbers], sys.unraisablehook
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


if __name__ == "__main__":  # the process of CachectlOfUser
    for request in sys.stdin:
        result = cachectl(Path(sys.argv[1]), *json.loads(request))
        shown = {"returncode": result.returncode, "stdout": result.stdout, "stderr": result.stderr}
        print(json.dumps(shown), flush=True)
