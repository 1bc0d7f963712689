"""Collects all tests when it is imported: in the process from which tests/forked_workers.py forks.

It starts the servers that all workers need, and they share them: an S3 server, and those that fork daemons, mounts,
schedulers and jobs with torch (tests/warm_python.py).
"""

import contextlib
import io
import os
import sys

import pytest
import torch

# A process that is forked has none of OpenMP's threads, and would wait for them in its first large computation.
torch.set_num_threads(1)
# `python -m pytest` looks for modules where it is started. The script of this process is beside this file.
sys.path[0] = os.getcwd()
# What cannot be imported fails again in each worker, which reports it.
with contextlib.redirect_stdout(io.StringIO()):
    pytest.main(["--collect-only", "-qq", "-p", "tests.second_chance", "-p", "no:cacheprovider"])

from tests import daemon, mounting  # noqa: E402
from tests.scheduler import running as scheduler  # noqa: E402
from tests.servers import radosgw  # noqa: E402
from tests.warm_python import warm, warm_torch  # noqa: E402

SHARED = warm(*daemon.MODULES), warm(*mounting.MODULES), warm(scheduler.MODULE), warm_torch()
sys.modules["__main__"].inherited.extend(server.link for server in SHARED)
radosgw.shared()
