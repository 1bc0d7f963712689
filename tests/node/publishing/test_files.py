"""`cachefs run`: of datasets of one's own it is known in the first epoch which files the samples are."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from cachefs.job_messages import JobEpoch, JobProgress, JobPublication
from cachefs.snapshot import Snapshot
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.node.publishing.said import complaints
from tests.recording import Recording, recording
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).with_name("own_datasets.py")
CACHEFS = Path(sys.executable).with_name("cachefs")
FILES = 160
BATCH = 4  # of its loaders
UNDERSTOOD = ["table", "table-here", "table-spawned", "records", "numbered", "nested", "part"]
WRONG = ["chance", "listed-chance", "changing"]
TOGETHER = [*UNDERSTOOD, *WRONG]


@dataclass(frozen=True)
class Run:
    """What the daemon was told while all scenarios ran, and what they read in each epoch, alone and watched."""

    record: Recording
    snapshot: Snapshot
    alone: str
    watched: str
    stderr: str

    def of(self, scenario: str) -> list[JobPublication | JobEpoch | JobProgress]:
        """What was said of the scenario, in that order."""
        number = TOGETHER.index(scenario)
        return [
            said
            for said in self.record.requests
            if isinstance(said, (JobPublication, JobEpoch, JobProgress))
            and (said.consumer.endswith(f".{number}") if number else "." not in said.consumer)
        ]

    def read(self, scenario: str, epoch: int) -> list[int]:
        for line in self.watched.splitlines()[:-1]:
            said = json.loads(line)
            if (said["scenario"], said["epoch"]) == (scenario, epoch):
                return [int(value) for value in said["read"]]
        raise AssertionError(f"{scenario} has no epoch {epoch}")

    def content(self, publish: JobPublication, order: bytes) -> list[int]:
        """What the files of this order have in them."""
        assert publish.map is not None
        entries = numpy.frombuffer(publish.map.entries, "<u4")[numpy.frombuffer(order, "<u4")]
        paths = [Path(os.fsdecode(self.snapshot.path(int(entry)))) for entry in entries]
        return [_content(path) for path in paths]


def _content(path: Path) -> int:
    return int(path.stem) + (1000 if path.parent.name == "masks" else 0)


@pytest.fixture(scope="module")
def run(torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    top = tmp_path_factory.mktemp("origin")
    (top / "masks").mkdir()
    rows = []
    for number in range(FILES):
        path = top / f"class{number * 7 % 5}" / f"{number:04}.bin"
        path.parent.mkdir(exist_ok=True)
        for one in (path, top / "masks" / path.name):
            one.write_text(str(_content(one)))
        rows.append(f"{path.stem},{path.parent.name}\n")
    (top / "table.csv").write_text("".join(rows[::-1]))
    home = tmp_path_factory.mktemp("node")
    with Daemon(home) as daemon:
        view = daemon.add_dataset("numbers", f"file://{top}")
        snapshot = Snapshot(Path(view.path))
        with (
            mounted(daemon.socket, "numbers", tmp_path_factory.mktemp("mnt") / "numbers") as mount,
            recording(daemon.client, home / "recorded") as record,
        ):
            script = [sys.executable, str(SCRIPT), str(mount), *TOGETHER]
            watching = [str(CACHEFS), "run", "--job", "own", "--socket", str(home / "recorded"), "--"]
            watched = _done(torch_jobs, [*watching, *script], {"TOLD": str(record.notes)})
            alone = _done(torch_jobs, script, {"SPAWN": "fork"})
            yield Run(record, snapshot, alone.stdout, watched.stdout, watched.stderr)
        snapshot.close()


def _done(torch_jobs: WarmPython, line: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    done = torch_jobs.run(line, timeout=400, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done


def test_watching_changes_nothing(run: Run) -> None:
    assert run.watched == run.alone
    # Of the loaders whose files are others than their datasets list, a note may say so.
    said = complaints(run.stderr)
    assert all(line.startswith(("cachefs: loader Chance (", "cachefs: loader Listed (")) for line in said), said


@pytest.mark.parametrize("scenario", UNDERSTOOD)
def test_the_first_epoch_is_published_while_it_is_read(run: Run, scenario: str) -> None:
    said = run.of(scenario)
    first = [message for message in said if isinstance(message, JobEpoch) and message.epoch == 0][-1]
    publish = [message for message in said[: said.index(first)] if isinstance(message, JobPublication)][-1]
    # Whatever was said of the next epoch came after it.
    read = run.read(scenario, 0)
    content = run.content(publish, first.order)
    if scenario == "records":  # each sample has two files, and their sum is what was read
        content = [image + mask for image, mask in zip(content[::2], content[1::2], strict=True)]
    # Its `__len__` is not run: how long an epoch is, is seen once its first batch has been drawn.
    unseen = BATCH if scenario == "numbered" else 0
    assert content == read[unseen:]
    assert not any(isinstance(message, JobProgress) and message.ended for message in said[: said.index(first)])


@pytest.mark.parametrize("scenario", WRONG)
def test_what_was_wrong_is_taken_back(run: Run, scenario: str) -> None:
    said = run.of(scenario)
    if scenario == "chance":
        # No rule was adopted: what is published is what was learned, in which some files are twice and others not. That
        # is wrong in the next epoch, so that it may be taken back, and learned anew.
        maps = [
            numpy.frombuffer(message.map.entries, "<u4")
            for message in said
            if isinstance(message, JobPublication) and message.map and message.map.entries
        ]
        # A part of an epoch may have no file twice.
        assert not maps or any(len(set(entries.tolist())) < len(entries) for entries in maps)
        return
    publishes = [place for place, message in enumerate(said) if isinstance(message, JobPublication)]
    ends = [place for place, message in enumerate(said) if isinstance(message, JobProgress) and message.ended]
    assert publishes
    assert publishes[0] < ends[0]
    at = said[ends[0]]
    assert isinstance(at, JobProgress)
    # It was so within 100 samples of the epoch in which it was wrong.
    assert (at.epoch, at.position <= 100) == (1 if scenario == "changing" else 0, True)
