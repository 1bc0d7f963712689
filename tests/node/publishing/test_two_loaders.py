"""Two loaders of one dataset class, or of one dataset: each publishes what it reads itself, and each read is its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy

from cachefs.job_messages import JobEpoch, JobName, JobPublish
from cachefs.rpc import JOB_SHOW
from cachefs.snapshot import Snapshot
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.node.publishing.two_loaders import EPOCHS, hashed
from tests.recording import Recording, recording

SCRIPT = Path(__file__).with_name("two_loaders.py")
CACHEFS = Path(sys.executable).with_name("cachefs")
FILES = 160
SECONDS = 100.0


def test_each_loader_publishes_what_it_reads_itself(tmp_path: Path) -> None:
    top = tmp_path / "origin"
    top.mkdir()
    for number in range(FILES):
        (top / hashed(number)).write_text(str(number))
    with Daemon(tmp_path / "node") as daemon:
        snapshot = Snapshot(Path(daemon.add_dataset("numbers", f"file://{top}").path))
        with (
            mounted(daemon.socket, "numbers", tmp_path / "mnt") as mount,
            recording(daemon.client, tmp_path / "s") as record,
        ):
            line = [CACHEFS, "run", "--job", "two", "--socket", tmp_path / "s", "--", sys.executable, SCRIPT, mount]
            with subprocess.Popen(
                list(map(str, line)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as job:
                assert job.stdout is not None
                read: dict[str, list[list[int]]] = {}
                for printed in job.stdout:
                    if printed == "all are read\n":
                        break
                    said = json.loads(printed)
                    read.setdefault(said["loader"], []).append(said["read"])
                time.sleep(3)
                for c in daemon.client.call(JOB_SHOW, JobName(job="two")).consumers:
                    print(c)
                _, stderr = job.communicate("go on\n", timeout=SECONDS)
    assert job.returncode == 0, stderr
    print(stderr)
    for name, found in published(record, snapshot).items():
        print(name, len(found))
    assert 0
