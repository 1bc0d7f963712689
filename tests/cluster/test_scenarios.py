"""The scenarios of `cachefs-bench cluster`, small: four nodes in network namespaces, under load."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PROGRAM = [sys.executable, "-c", "from cachefs_bench.cli import main; main()", "cluster"]


def measure(work: Path, scenario: str, *options: str) -> dict[str, Any]:
    """What the scenario measured."""
    done = subprocess.run(
        [*PROGRAM, "--scenario", scenario, "--files", "800", "--directory", str(work), *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert list(work.iterdir()) == []
    return document


def run(work: Path, scenario: str, *options: str) -> dict[str, Any]:
    """What the scenario measured; all that it has to be was met."""
    document = measure(work, scenario, *options)
    assert not [check for check in document["checks"] if not check["met"]]
    return document


def test_a_dataset_that_fits_leaves_the_origin_once(tmp_path: Path) -> None:
    document = run(tmp_path, "m1", "--epochs", "4")
    assert sum(epoch["reads"] for epoch in document["epochs"]) == 4 * 800


def test_several_jobs_read_until_the_slowest_is_done(tmp_path: Path) -> None:
    """The figures are those of benchmarks; this is about what is counted for whom."""
    options = ("--epochs", "2", "--job-ranks", "4", "--job-ranks", "2@25", "--rate", "50")
    document = measure(tmp_path, "m1", *options)
    assert [(one["job"], one["epoch"]) for one in document["epochs"] if one["job"] == "job2"] == [
        ("job2", 1),
        ("job2", 2),
    ]
    assert sum(one["reads"] for one in document["epochs"] if one["job"] == "job1") == 8 * 800
    assert sum(one["reads"] for one in document["epochs"] if one["job"] == "job2") == 2 * 800
    assert sum(one["errors"] + one["wrong"] for one in document["epochs"]) == 0
    assert {check["what"] for check in document["checks"]} >= {
        "reads served locally from epoch 2 on, job1 of 4 ranks", "reads served locally from epoch 2 on, job2 of 2 ranks"
    }  # fmt: skip


def test_a_dataset_that_does_not_fit_leaves_it_as_rarely_as_can_be(tmp_path: Path) -> None:
    document = run(tmp_path, "m2", "--epochs", "4")
    assert document["least_possible"] < document["least_of_separate_caches"]


def test_a_node_is_killed_and_comes_back(tmp_path: Path) -> None:
    """An epoch takes 10 s: others wait 6 s for a silent node. Within 2 s the node would be back before they follow, and
    all of an epoch would be what is read next, which takes the room of blocks that no other node has."""
    run(tmp_path, "m3", "--epochs", "6", "--rate", "20")


def test_a_node_joins_and_one_drains(tmp_path: Path) -> None:
    run(tmp_path, "m4", "--files", "2000")


def test_a_warm_up_of_the_cluster_costs_the_origin_each_byte_once(tmp_path: Path) -> None:
    run(tmp_path, "warmup")


@pytest.mark.parametrize("fault", ["partition", "etcd", "stopped", "loss", "latency"])
def test_what_goes_wrong_costs_no_byte(tmp_path: Path, fault: str) -> None:
    run(tmp_path, "m5", "--seconds", "15", "--only", fault, "--rate", "50")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    bench = subprocess.Popen(
        [*PROGRAM, "--scenario", "m1", "--files", "400", "--epochs", "50", "--directory", str(tmp_path),
         "--nodes", "2", "--membership", "none"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert bench.stderr is not None
    assert "epoch 1" in bench.stderr.readline()
    children = psutil.Process(bench.pid).children(recursive=True)
    assert len(children) > 10
    os.killpg(bench.pid, number)
    said = bench.stderr.read()
    bench.wait(60)
    if number == signal.SIGINT:
        assert bench.returncode == 130
        assert said.splitlines()[-1] == "cachefs-bench: interrupted; nothing is left mounted or running"
    until(lambda: not list(tmp_path.iterdir()))
    # The one that cleans up after a kill waits for a minute before it looks at memory tiers.
    until(lambda: sum(map(runs, children)) <= (number == signal.SIGKILL))


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
