"""Ctrl-C, which goes to all processes of the command, ends cachefs-bench with one line, and nothing is left."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from cachefs_bench.own_process import in_own_process
from tests.waiting import until


# By what it can be seen that processes of theirs run: in Python, with a handler of their own for SIGINT.
@pytest.mark.parametrize(
    ("command", "begun"),
    [
        pytest.param("listing", "*/cachefsd.sock", id="listing", marks=pytest.mark.soak),
        pytest.param("origin --throttle 50", "*/limits/proxy.log", id="origin"),
        pytest.param("train --busy 1", "*", id="train", marks=pytest.mark.soak),
    ],
)
def test_an_interruption_is_one_line_and_leaves_nothing(command: str, begun: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from cachefs_bench.cli import main; main()", *command.split()]
    bench = subprocess.Popen(
        [*program, "--directory", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: any(tmp_path.glob(begun)))
        until(lambda: bool(psutil.Process(bench.pid).children()))
        children = psutil.Process(bench.pid).children(recursive=True)
        os.killpg(bench.pid, signal.SIGINT)
        said, errors = bench.communicate(timeout=40)
    finally:
        bench.kill()
    assert (bench.returncode, said) == (130, ""), errors
    assert errors.splitlines()[-1] == "cachefs-bench: interrupted; nothing is left mounted or running"
    assert "Traceback" not in errors
    # Python's own tracker of shared memory ends a moment after its parent.
    until(lambda: not any(runs(child) for child in children))
    assert not list(tmp_path.iterdir())


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_an_interruption_while_a_measurement_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new process ignores the signal, and starting it takes a while on a busy machine."""
    submit = ProcessPoolExecutor.submit

    def submit_and_interrupt(*arguments: Any, **options: Any) -> "Future[Any]":
        running = submit(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        return running

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        in_own_process(time.sleep, 1000)
    assert not multiprocessing.active_children()


def test_a_measurement_in_a_process_of_its_own() -> None:
    assert in_own_process(os.getppid) == os.getpid()
    with pytest.raises(FileNotFoundError):
        in_own_process(os.stat, "/nowhere")
