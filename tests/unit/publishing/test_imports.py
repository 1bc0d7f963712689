"""What the modules load that run in a training process, and what the helper sets before it loads anything."""

import subprocess
import sys

LOADED = "{'grpc', 'cachefs.mount', 'cachefs_daemon'}"
SHOW = f"print(sorted({LOADED} & set(sys.modules)), os.environ.get('OPENBLAS_NUM_THREADS'))"


def imported(module: str) -> str:
    code = f"import os, sys; os.environ.pop('OPENBLAS_NUM_THREADS', None); import {module}; {SHOW}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_training_process_gets_neither_grpc_nor_the_mount_nor_its_settings() -> None:
    assert imported("cachefs.hooks.loader") == "[] None"
    assert imported("cachefs.publishing.sampler") == "[] None"


def test_the_helper_has_one_thread_for_numpy() -> None:
    assert imported("cachefs.publishing.helper") == "['grpc'] 1"
