"""Somebody interrupts a command that is still being loaded."""

import signal
import subprocess
import sys

import pytest

from cachefs_tools.quiet_imports import quiet_imports

INTERRUPTED = """
import os, signal, sys
class Interruption:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interruption())
import cachefs_tools.cachectl
"""


@pytest.mark.parametrize("module", ["click", "grpc", "cachefs_tools.cachectl.status"])
def test_cachectl_ends_without_a_word(module: str) -> None:
    # Where the tests run in the background of a shell, SIGINT is ignored.
    command = ["env", "--default-signal=INT", sys.executable, "-c", INTERRUPTED, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_afterwards_interruptions_are_handled_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.default_int_handler, signal.SIG_IGN, lambda *_: None):
            signal.signal(signal.SIGINT, handler)
            with quiet_imports():
                pass
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
