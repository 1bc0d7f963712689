"""`cachefs run`: files that a library in C opens are found out from what a mount sees of cold reads."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from cachefs.job_messages import JobEpoch, JobPublication
from cachefs.snapshot import Snapshot
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.node.publishing.said import complaints
from tests.recording import Recording, recording
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).with_name("c_datasets.py")
CACHEFS = Path(sys.executable).with_name("cachefs")
FILES = 160
FEW_FILES = 48
LAST_EPOCH = 1
INFERRED = ["table", "table-here"]
LEARNED = ["hashed"]
UNLEARNED = ["ahead", "pairs", "raced"]
TOGETHER = [*INFERRED, *LEARNED, *UNLEARNED]


@dataclass(frozen=True)
class Run:
    """What the daemon was told while all scenarios ran, and what they read in each epoch, alone and watched."""

    record: Recording
    snapshot: Snapshot
    numbers: dict[str, int]  # by path in the dataset: what is in the file
    alone: str
    watched: str
    stderr: str

    def orders(self, scenario: str) -> list[tuple[int, list[int]]]:
        """Epochs that were published, and what is in the files that they consist of, in that order."""
        number = TOGETHER.index(scenario)
        found, entries = [], numpy.zeros(0, "<u4")
        for said in self.record.requests:
            if not isinstance(said, (JobPublication, JobEpoch)):
                continue
            if not (said.consumer.endswith(f".{number}") if number else "." not in said.consumer):
                continue
            if isinstance(said, JobEpoch):
                chosen = entries[numpy.frombuffer(said.order, "<u4")].tolist()
                found.append((said.epoch, [self.numbers[os.fsdecode(self.snapshot.path(one))] for one in chosen]))
            elif said.map is not None:
                entries = numpy.frombuffer(said.map.entries, "<u4")
        return found

    def read(self, scenario: str, epoch: int) -> list[int]:
        for line in self.watched.splitlines()[:-1]:
            said = json.loads(line)
            if (said["scenario"], said["epoch"]) == (scenario, epoch):
                return [int(value) for value in said["read"]]
        raise AssertionError(f"{scenario} has no epoch {epoch}")


def make_files(top: Path) -> dict[str, int]:
    """Files for all scenarios. By path: what is in each."""
    numbers = {}
    for scenario in TOGETHER:
        (top / scenario).mkdir()
        if scenario in INFERRED:
            rows = [(f"{number:04}", f"class{number * 7 % 5}") for number in range(FILES)]
            (top / scenario / "table.csv").write_text("".join(f"{name},{kind}\n" for name, kind in rows))
            names = [f"{kind}/{name}.bin" for name, kind in rows]
        else:
            names = [_hashed(number) for number in range(FILES if scenario in LEARNED else FEW_FILES)]
        for number, name in enumerate(names):
            (top / scenario / name).parent.mkdir(exist_ok=True)
            (top / scenario / name).write_text(str(number))
            numbers[f"{scenario}/{name}"] = number
    return numbers


@pytest.fixture(scope="module")
def run(torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    top = tmp_path_factory.mktemp("origin")
    numbers = make_files(top)
    home = tmp_path_factory.mktemp("node")
    with Daemon(home) as daemon:
        view = daemon.add_dataset("numbers", f"file://{top}")
        snapshot = Snapshot(Path(view.path))
        with (
            mounted(daemon.socket, "numbers", tmp_path_factory.mktemp("mnt") / "numbers") as mount,
            recording(daemon.client, home / "recorded") as record,
        ):
            script = [sys.executable, str(SCRIPT), str(mount), *TOGETHER]
            watching = [str(CACHEFS), "run", "--job", "c", "--socket", str(home / "recorded"), "--"]
            alone = _started(torch_jobs, [sys.executable, str(SCRIPT), str(top), *TOGETHER], {})
            watched = _started(torch_jobs, [*watching, *script], {"TOLD": str(record.notes)})
            (said, problems), (expected, _) = watched.communicate(timeout=400), alone.communicate(timeout=400)
            assert watched.returncode == 0, problems
            yield Run(record, snapshot, numbers, expected, said, problems)
        snapshot.close()


def _hashed(index: int) -> str:
    """As c_datasets.py names its files."""
    return hashlib.sha1(b"%d" % index).hexdigest()


def _started(torch_jobs: WarmPython, line: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    env = {**os.environ, **environment}
    return torch_jobs.start(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_watching_changes_nothing(run: Run) -> None:
    assert run.watched == run.alone
    assert complaints(run.stderr) == []


@pytest.mark.parametrize("scenario", INFERRED)
def test_the_first_epoch_is_published_while_it_is_read(run: Run, scenario: str) -> None:
    first = [order for epoch, order in run.orders(scenario) if epoch == 0]
    assert first[-1] == run.read(scenario, 0)


@pytest.mark.parametrize("scenario", LEARNED)
def test_what_no_rule_says_is_learned_where_every_sample_has_one_file(run: Run, scenario: str) -> None:
    last = [order for epoch, order in run.orders(scenario) if epoch == LAST_EPOCH][-1]
    assert len(last) > FILES // 8  # what was read before the mount knew that somebody asks is not known
    assert is_part(last, run.read(scenario, LAST_EPOCH))


@pytest.mark.parametrize("scenario", UNLEARNED)
def test_what_may_be_wrong_is_not_published(run: Run, scenario: str) -> None:
    # Nothing reads the epoch after the last one, which may be published ahead.
    for epoch, order in [said for said in run.orders(scenario) if said[0] <= LAST_EPOCH]:
        read = run.read(scenario, epoch)
        # Of a pair, the second file is not told of by what was read.
        assert is_part([one for one in order if scenario != "pairs" or one in read], read)


def is_part(some: list[int], of: list[int]) -> bool:
    """Does *of* have these, in the same order?"""
    rest = iter(of)
    return all(one in rest for one in some)
