"""A job that is forked from a process with torch (tests/warm_python.py) is like one that a user starts."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon
from tests.mounting import mounted
from tests.warm_python import WarmPython

CACHEFS = Path(sys.executable).with_name("cachefs")
FILES = 20
SECONDS = 240.0
# Ends of a job that trains first, with torch, which takes a new process 2 s to import. The helper of a job that a
# signal ends may say something of the training or not.
TRAINED = ("return", "raise")
# Prints what a job sees of its process, reads all files twice itself and twice with a worker, and ends as told.
SCRIPT = (
    f"TRAINED = {TRAINED}"
    + """
import atexit, json, os, random, signal, sys, threading
from pathlib import Path

def train(root):
    import numpy, torch
    from torch.utils.data import DataLoader
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    files = sorted(map(str, Path(root).iterdir()))
    for options in {}, {"num_workers": 1, "persistent_workers": True}:
        loader = DataLoader(files, 4, shuffle=True, collate_fn=read, **options)
        for _ in range(2):
            print(list(loader), flush=True)
    print(torch.rand(()), random.random(), numpy.random.rand(), file=sys.stderr)

def read(paths):
    return [int(open(path).read()) for path in paths]

if __name__ == "__main__":
    atexit.register(print, "at the end", flush=True)
    others = ("CACHEFS_RUN", "CACHEFS_TOP", "CACHEFS_JOB", "CACHEFS_PYTHON")
    ours = {name: value for name, value in os.environ.items() if name not in others}
    print(sys.argv, sys.path, sys.orig_argv, __name__, __file__, __spec__, os.getcwd())
    print(open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"))
    print(json.dumps(ours, sort_keys=True))
    print([signal.getsignal(number) for number in sorted(signal.valid_signals())])
    print([one.name for one in threading.enumerate()], sorted(os.listdir("/proc/self/fd"))[:3])
    print(os.getpgid(0), os.getsid(0), os.nice(0))
    print(os.environ.get("CACHEFS_TOP") in (None, str(os.getpid())), repr(sys.stdin.read()), flush=True)
    if sys.argv[2] in TRAINED:
        train(sys.argv[1])
    match sys.argv[2:]:
        case ["raise"]: raise OSError(5, "no luck")
        case ["exit"]: sys.exit("gone")
        case ["kill"]: os.kill(os.getpid(), signal.SIGTERM)
        case ["interrupt"]: os.kill(os.getpid(), signal.SIGINT)
"""
)


@dataclass(frozen=True)
class Node:
    socket: Path
    mount: Path
    script: Path


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = tmp_path_factory.mktemp("warm")
    top = home / "origin"
    top.mkdir()
    for number in range(FILES):
        (top / f"{number:03}").write_text(str(number))
    (home / "script.py").write_text(SCRIPT)
    with Daemon(home / "n") as daemon:
        daemon.add_dataset("numbers", f"file://{top}")
        with mounted(daemon.socket, "numbers", home / "mnt") as mount:
            yield Node(daemon.socket, mount, home / "script.py")


@pytest.mark.parametrize("end", ["return", "raise", "exit", "kill", "interrupt"])
def test_a_forked_job_is_like_one_of_a_user(torch_jobs: WarmPython, node: Node, tmp_path: Path, end: str) -> None:
    def command(job: str) -> list[str]:
        run = [CACHEFS, "run", "--job", job, "--socket", node.socket, "--"]
        return [*map(str, [*run, sys.executable, node.script, node.mount]), end]

    # Python's readline gives variables to processes that are started without an environment.
    pipes: dict[str, Any] = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "cwd": tmp_path}
    pipes["env"] = dict(os.environ)
    forked = torch_jobs.start(command("forked"), **pipes)
    started = subprocess.Popen(command("started"), text=True, **pipes)
    said = [job.communicate("a line\n", timeout=SECONDS) for job in (forked, started)]
    assert forked.returncode == started.returncode
    wanted = {"return": 0, "raise": 1, "exit": 1, "kill": -signal.SIGTERM, "interrupt": -signal.SIGINT}
    assert started.returncode == wanted[end]
    assert said[0][0].splitlines() == said[1][0].splitlines()
    # Of a job that never imports torch, cachefs names the mounts and nothing else.
    forked_said, started_said = (steady(stderr, end in TRAINED) for _, stderr in said)
    assert forked_said == started_said


def steady(stderr: str, is_trained: bool) -> list[str]:
    """Lines without what is different in each run: since which epoch a loader is read ahead, how long a loop waited,
    and what would help. Lines of cachefs come in any order: a helper says them."""
    lines = stderr.splitlines()
    ours = [
        re.split(" in |, read ahead", line)[0]
        for line in lines
        if re.match(r"cachefs: (mounted|loader|\d+ epochs)" if is_trained else "cachefs: mounted", line)
    ]
    return [line for line in lines if not line.startswith("cachefs: ")] + sorted(ours)


def test_a_job_can_be_killed_and_waited_for(torch_jobs: WarmPython) -> None:
    with torch_jobs.start([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(100)"],
                          stdout=subprocess.PIPE) as job:  # fmt: skip
        assert job.stdout is not None
        assert job.stdout.readline() == "1\n"
        assert job.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(0.01)
        job.kill()
        assert job.wait(SECONDS) == -signal.SIGKILL
