"""The demo on a small dataset: its figures show what they should, and nothing is left of it, however it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from cachefs.mount_table import mount_points
from cachefs_bench.demo.command import main
from tests.cachectl import run_here

DEMO = Path(sys.executable).with_name("cachefs-demo")
FILES = 64


def start(work: Path, *arguments: str) -> subprocess.Popen[str]:
    (work / "tmp").mkdir()
    small = ("--files", str(FILES), "--file-size", "20000", "--compute", "2", "--svg", str(work / "demo.svg"))
    return subprocess.Popen(
        [DEMO, *small, *arguments], env={**os.environ, "TMPDIR": str(work / "tmp")}, cwd=work,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(demo: subprocess.Popen[str], step: str) -> str:
    """Wait until the demo has said that step. Returns what it has said."""
    assert demo.stderr is not None
    said = ""
    while step not in said:
        line = demo.stderr.readline()
        assert line, f"the demo ended before {step}: {said}"
        said += line
    return said


def assert_nothing_is_left(work: Path) -> None:
    assert not [point for point in mount_points() if point.path.is_relative_to(work)]
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(work) in command]
    assert list((work / "tmp").iterdir()) == []


def requests(run: dict[str, Any]) -> list[int]:
    return [epoch["origin_requests"] for epoch in run["epochs"]]


def test_demo_measures_each_way_of_reading(tmp_path: Path) -> None:
    demo = start(tmp_path, "--json")
    out, said = demo.communicate(timeout=280)
    assert demo.returncode == 0, said
    story = json.loads(out)
    direct, mount, published, local = story["runs"]
    killed = story["killed"]
    everything = [direct, mount, published, local, killed]
    assert [run["run"] for run in everything] == ["s3", "mount", "run", "local", "killed"]
    for number in range(2):
        epochs = [run["epochs"][number] for run in everything]
        assert len({epoch["digest"] for epoch in epochs}) == 1
        assert {(epoch["samples"], epoch["bytes"]) for epoch in epochs} == {(FILES, story["bytes"])}
        assert all(epoch["seconds"] >= FILES * 0.002 for epoch in epochs)
        assert all(0 <= epoch["waiting"] <= 1 for epoch in epochs)
    assert direct["epochs"][0]["digest"] != direct["epochs"][1]["digest"]
    # A client that retries sends more.
    assert all(count >= FILES for count in requests(direct))
    assert requests(local) == [0, 0]
    # Late requests are sent twice, and each one is late on a busy machine. What is there is not asked for again.
    for run in (mount, published):
        assert FILES <= sum(requests(run)) <= 2 * FILES
        assert requests(run)[1] < FILES
    assert killed["killed_in_epoch"] == 2
    assert FILES // 2 <= killed["killed_at_sample"] <= FILES
    # All of it is there after the first epoch, and the next daemon finds it.
    assert killed["blocks_before"] == killed["blocks_after"] == FILES
    assert killed["requests_after"] == 0
    assert killed["daemon_away_seconds"] > 0
    assert f"gets SIGKILL at sample {killed['killed_at_sample']}" in said
    assert story["svg"] == str(tmp_path / "demo.svg")
    assert ElementTree.parse(tmp_path / "demo.svg").getroot().tag.endswith("svg")
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("step", "number"),
    [
        pytest.param("generating", signal.SIGINT, marks=pytest.mark.soak),
        ("starting an S3 server", signal.SIGTERM),
        pytest.param("S3, no cachefs, epoch 1", signal.SIGINT, marks=pytest.mark.soak),
        pytest.param("cachefs mount, epoch 1", signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param("gets SIGKILL", signal.SIGINT, marks=pytest.mark.soak),
    ],
)
def test_interrupted_demo_leaves_nothing(tmp_path: Path, step: str, number: signal.Signals) -> None:
    demo = start(tmp_path)
    said = wait_for(demo, step)
    demo.send_signal(number)
    demo.send_signal(number)
    _, rest = demo.communicate(timeout=100)
    assert demo.returncode == 130, said + rest
    assert rest.endswith("cachefs-demo: interrupted; nothing is left mounted or running\n")
    assert not (tmp_path / "demo.svg").exists()
    assert_nothing_is_left(tmp_path)


@pytest.mark.soak
def test_a_part_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    demo = start(tmp_path)
    said = wait_for(demo, "S3, no cachefs, epoch 2")
    servers = [child for child in psutil.Process(demo.pid).children() if child.name() == "rclone"]
    assert len(servers) == 1
    servers[0].kill()
    out, rest = demo.communicate(timeout=200)
    assert demo.returncode == 1, said + rest
    assert out == ""
    assert "Traceback" not in rest
    assert rest.splitlines()[-1].startswith("cachefs-demo: ")
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--svg", "no/such/directory.svg"), "cannot be written (No such file or directory); name another file"),
     (("--files", "3"), "'--files'"), (("--compute", "0"), "'--compute'"), (("--compute", "1001"), "'--compute'"),
     (("--workers", "65"), "'--workers'")],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_here(main, "cachefs-demo", list(arguments))
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "generating" not in done.stderr
    assert list(tmp_path.iterdir()) == []
