"""Starts real servers as child processes. They never outlive the tests."""

import ctypes
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.waiting import until

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def start(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a command with its output in *log*. The kernel kills it when the thread that started it ends."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, preexec_fn=_die_with_parent
        )


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 30) -> None:
    """Wait until the process accepts connections. A failure has the end of the log."""

    def log_end() -> str:
        return f"{process.args!r} listens on port {port}:\n{log.read_text(errors='replace')[-2000:]}"

    def listens() -> bool:
        assert process.poll() is None, log_end()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(listens, log_end, seconds=seconds)


def stop(process: subprocess.Popen[bytes], seconds: float = 5) -> None:
    """End the process with SIGTERM, or with SIGKILL if that takes longer than so many seconds."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
