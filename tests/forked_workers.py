"""A plugin of pytest for the process that starts xdist's workers: it forks each from one process that has collected.

That process imports all test files and what they use, torch for example, once. A worker then collects in 1.2 s of a
processor. It takes 6 s where each worker imports them for itself.
"""

import functools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from execnet import gateway_io

from tests.warm_python import WarmPython


class ForkedWorker(gateway_io.Popen2IOMaster):
    """The connection to a worker that is forked. execnet would start Python anew."""

    def __init__(self, _: Sequence[str], execmodel: Any) -> None:
        command = [sys.executable, "-c", gateway_io.popen_bootstrapline]
        self.popen = _collected().start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False)
        gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)


@functools.cache
def _collected() -> WarmPython:
    return WarmPython(["collecting"])


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        gateway_io.Popen2IOMaster = ForkedWorker
