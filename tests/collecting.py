"""Collects all tests when it is imported: in the process from which tests/forked_workers.py forks."""

import contextlib
import io
import os
import sys

import pytest

# `python -m pytest` looks for modules where it is started. The script of this process is beside this file.
sys.path[0] = os.getcwd()
# What cannot be imported fails again in each worker, which reports it.
with contextlib.redirect_stdout(io.StringIO()):
    pytest.main(["--collect-only", "-qq", "-p", "tests.second_chance", "-p", "no:cacheprovider"])
