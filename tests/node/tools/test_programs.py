"""Programs of tests/programs compute the same with and without `cachefs run`, and their orders are published in time.

Those whose libraries the tests' environment has run here; all others with the marker `programs`: `make programs`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from cachefs.job_messages import JobEpoch, JobPublication
from cachefs_bench.programs.catalogue import PROGRAMS, Program
from cachefs_bench.programs.command import SCRIPTS
from tests.daemon import Daemon
from tests.mounting import mounted
from tests.recording import Recording, recording
from tests.waiting import until
from tests.warm_python import WarmPython

CACHEFS = Path(sys.executable).with_name("cachefs")
FILES = 64
# The interpreter of programs with the marker: `make programs` names one that has their libraries.
PYTHON = os.environ.get("PROGRAMS_PYTHON", sys.executable)
# Programs of which each shows another way to an order, and which `make test` therefore runs. Name -> the epoch, counted
# from 1, in which its order is published at the latest; 0: it never is.
QUICK = {"csv-pil": 1, "nanogpt": 0}
SECONDS = 240


@dataclass(frozen=True)
class Node:
    daemon: Daemon
    home: Path
    torch_jobs: WarmPython

    def dataset(self, kind: str, python: str = sys.executable) -> Path:
        """The directory of the dataset, which the daemon shows under its kind."""
        source = self.home / kind
        if not source.exists():
            made = [python, str(SCRIPTS / "make_dataset.py"), kind, str(source), "--files", str(FILES)]
            subprocess.run(made, check=True, capture_output=True, timeout=SECONDS)
            self.daemon.add_dataset(kind, f"file://{source}")
        return source


@pytest.fixture(scope="module")
def node(torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = tmp_path_factory.mktemp("node")
    with Daemon(home / "daemon") as daemon:
        yield Node(daemon, home, torch_jobs)


def command(program: Program, data: Path, *options: str, python: str = sys.executable) -> list[str]:
    script = str(SCRIPTS / f"{program.script}.py")
    return [python, script, str(data), *program.options, "--batch-size", "4", "--milliseconds", "0", *options]


def environment(work: Path) -> dict[str, str]:
    kept = {name: str(work / "cache") for name in ("HF_HOME", "XDG_CACHE_HOME", "YOLO_CONFIG_DIR")}
    return {**os.environ, **kept, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "USE_TF": "0"}


def digest_of(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 0, done.stderr
    return digest(done.stdout)


def digest(stdout: str) -> str:
    line = json.loads(stdout.splitlines()[-1])
    assert all(epoch["samples"] for epoch in line["epochs"])
    return str(line["digest"])


def epochs_published(record: Recording, job: str) -> set[int]:
    """The epochs, counted from 1, whose orders the job has published so far."""
    given = {message.epoch + 1 for message in record.of(JobEpoch, job)}
    return given | {1 for message in record.of(JobPublication, job) if message.spec is not None}


@pytest.mark.parametrize("name", ["csv-pil", pytest.param("nanogpt", marks=pytest.mark.soak)])
def test_a_program_computes_the_same_and_its_order_is_published(node: Node, tmp_path: Path, name: str) -> None:
    """The program waits, in the epoch in which its order is to be known, until it is."""
    program = next(one for one in PROGRAMS if one.name == name)
    assert all(find_spec(module) for module in program.needs)
    data = node.dataset(program.data)
    go, expected = tmp_path / "go", QUICK[name]
    with (
        recording(node.daemon.client, tmp_path / "s") as record,
        mounted(node.daemon.socket, program.data, tmp_path / "mnt") as mount,
    ):
        hold = ("--hold", f"{expected}:8:{go}")
        line = [CACHEFS, "run", "--job", name, "--socket", tmp_path / "s", "--", *command(program, mount, *hold)]
        process = node.torch_jobs.start(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path))
        try:
            until(
                lambda: process.poll() is not None or any(at <= expected for at in epochs_published(record, name)),
                "an order is published", seconds=SECONDS,
            )  # fmt: skip
            go.touch()
            stdout, stderr = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, stderr
        assert bool(epochs_published(record, name)) == bool(expected)
        assert not expected or min(epochs_published(record, name)) <= expected
    alone = node.torch_jobs.run(command(program, data), timeout=SECONDS, env=environment(tmp_path))
    assert digest(stdout) == digest_of(alone)


@pytest.mark.programs
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_program_computes_the_same(node: Node, tmp_path: Path, program: Program) -> None:
    data = node.dataset(program.data, PYTHON)
    with mounted(node.daemon.socket, program.data, tmp_path / "mnt") as mount:
        line = command(program, mount, python=PYTHON)
        run = [CACHEFS, "run", "--job", program.name, "--socket", node.daemon.socket, "--", *line]
        ways = {"native": command(program, data, python=PYTHON), "mounted": line, "cachefs run": run}
        found = {
            way: digest_of(
                subprocess.run(
                    list(map(str, each)), capture_output=True, text=True, timeout=SECONDS, env=environment(tmp_path)
                )
            )
            for way, each in ways.items()
        }
    assert len(set(found.values())) == 1, found
