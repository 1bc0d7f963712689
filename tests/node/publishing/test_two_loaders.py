"""Two loaders of one dataset class, or of one dataset: each publishes what it reads itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy

from cachefs.job_messages import ConsumerView, JobEpoch, JobName, JobPublication
from cachefs.rpc import JOB_SHOW
from cachefs.snapshot import Snapshot
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.node.publishing.said import complaints
from tests.node.publishing.two_loaders import EPOCHS, hashed
from tests.recording import Recording, recording
from tests.waiting import until
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).with_name("two_loaders.py")
CACHEFS = Path(sys.executable).with_name("cachefs")
FILES = 160
SECONDS = 100.0


def test_each_loader_publishes_what_it_reads_itself(torch_jobs: WarmPython, tmp_path: Path) -> None:
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
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            with torch_jobs.start(list(map(str, line)), **pipes) as job:
                assert job.stdout is not None
                read: dict[str, list[list[int]]] = {}
                for printed in job.stdout:
                    if printed == "all are read\n":
                        break
                    said = json.loads(printed)
                    read.setdefault(said["loader"], []).append(said["read"])
                views = wait_for_the_end(daemon)
                _, stderr = job.communicate("go on\n", timeout=SECONDS)
        assert job.returncode == 0, stderr
        notes = complaints(stderr)  # one for each line that makes such a loader
        assert notes
        for note in notes:
            assert note.startswith("cachefs: loader Subset (")
            assert "not understood: the order of Unruly becomes known only while the loader draws it" in note
        found = published(record, snapshot)
        snapshot.close()
    assert len(views) == len(found) == len(read)
    # Loaders become consumers in the order in which they begin, and each is shown where it is itself.
    for (name, of_epochs), (consumer, said) in zip(read.items(), sorted(found.items()), strict=True):
        for epoch, order in said.items():
            if name == "split train":
                assert order in parts(of_epochs), "its order is published as it is drawn, in parts"
            else:
                assert order == of_epochs[epoch] if epoch < EPOCHS else set(order) == set(of_epochs[0]), name
        assert views[consumer].epoch == EPOCHS - 1, name
        # Reads of the loader for training, whose order is not known before, are none of the other's.
        assert "train" in name or views[consumer].mismatched < 5, name


def parts(epochs: list[list[int]]) -> list[list[int]]:
    """All runs of samples within one of the epochs."""
    return [epoch[begin:end] for epoch in epochs for begin in range(len(epoch)) for end in range(len(epoch) + 1)]


def wait_for_the_end(daemon: Daemon) -> dict[str, ConsumerView]:
    """The job's consumers by name, once all are shown in the last epoch."""
    return until(
        lambda: {one.consumer: one for one in daemon.client.call(JOB_SHOW, JobName(job="two")).consumers},
        is_right=lambda views: all(one.epoch == EPOCHS - 1 for one in views.values()),
    )


def published(record: Recording, snapshot: Snapshot) -> dict[str, dict[int, list[int]]]:
    """What the job has said that each consumer reads: by epoch, what the files say that they are."""
    numbers = {hashed(number): number for number in range(FILES)}
    files: dict[str, list[int]] = {}
    found: dict[str, dict[int, list[int]]] = {}
    for message in record.requests:
        if isinstance(message, JobPublication) and message.map is not None:
            entries = numpy.frombuffer(message.map.entries, "<u4").tolist()
            files[message.consumer] = [numbers[os.fsdecode(snapshot.path(entry))] for entry in entries]
        elif isinstance(message, JobEpoch):
            order = numpy.frombuffer(message.order, "<u4").tolist()
            found.setdefault(message.consumer, {})[message.epoch] = [files[message.consumer][one] for one in order]
    return found
