"""Runs programs of `cachefs_tools` in the process of the test, where they cost a fiftieth of a process of their own.

`cachectl_process` is for tests whose sentence has a process in it: a terminal, a pipe, a signal, files that are open,
or `mount`, which becomes another program.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
from cachefs_tools.cachectl import main
from click.testing import CliRunner

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
