"""Ports for servers whose configuration names them: no two processes get the same, however close together they ask."""

import subprocess
import sys
from pathlib import Path

from cachefs_bench.lab.ports import free_port

ROOT = Path(__file__).parents[3]
CLAIM = "from cachefs_bench.lab.ports import free_ports; print(*(free_ports(2)[1] for _ in range(20))); input()"


def test_processes_that_ask_at_the_same_time_get_different_ports() -> None:
    asking = [
        subprocess.Popen([sys.executable, "-c", CLAIM], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    own = {free_port() for _ in range(20)}
    theirs = [set(map(int, process.stdout.readline().split())) for process in asking if process.stdout]
    for process in asking:
        process.communicate(b"\n", timeout=60)
    assert [len(ports) for ports in (own, *theirs)] == [20] * 4
    assert len(own.union(*theirs)) == 80
