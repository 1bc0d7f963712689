"""The demo on a small dataset: its figures show what they should, and nothing is left of it, however it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cachefs.mount_table import mount_points

DEMO = Path(sys.executable).with_name("cachefs-demo")


def start(work: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [DEMO, "--files", "200", "--file-size", "20000", *arguments], env={**os.environ, "TMPDIR": str(work)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def assert_nothing_is_left(work: Path, said: str) -> None:
    assert not [point for point in mount_points() if point.path.is_relative_to(work)]
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(work) in command]
    assert list(work.iterdir()) == []
    for memory in re.findall(r"of memory in (\S+)", said):
        assert not Path(memory).exists()


@pytest.mark.usefixtures("steady_page_cache")
def test_demo_measures_each_way_of_reading(tmp_path: Path) -> None:
    demo = start(tmp_path, "--json")
    out, said = demo.communicate(timeout=250)
    assert demo.returncode == 0, said
    runs = json.loads(out)["runs"]
    cold, warm, tiers, native = runs
    assert {run["files"] for run in runs} == {200}
    assert len({run["bytes"] for run in runs}) == 1
    # Of a file that the kernel reads in two requests, the second one may find the block there.
    assert cold["shares"]["origin"] > 0.95
    assert cold["shares"]["origin"] + cold["shares"]["memory"] == pytest.approx(1)
    assert cold["origin_requests"] >= 200
    # Some kernels take pages all the time, of any file system (tests/taken_pages.py): 7 % at worst, here and there.
    assert warm["shares"]["page_cache"] > 0.85
    assert warm["fuse_requests"] <= 100
    assert warm["origin_requests"] == 0
    assert tiers["shares"]["memory"] + tiers["shares"]["ssd"] == pytest.approx(1)
    assert 200 <= tiers["fuse_requests"] <= 220
    assert tiers["origin_requests"] == 0
    assert native["ratio_to_native"] == 1
    assert_nothing_is_left(tmp_path, said)


@pytest.mark.parametrize(
    ("step", "number"),
    [("generating", signal.SIGINT), ("starting", signal.SIGTERM), ("listing", signal.SIGINT),
     ("reading two epochs", signal.SIGTERM), ("dropping", signal.SIGINT)],
)  # fmt: skip
def test_interrupted_demo_leaves_nothing(tmp_path: Path, step: str, number: signal.Signals) -> None:
    demo = start(tmp_path)
    assert demo.stderr is not None
    said = ""
    while step not in said:
        line = demo.stderr.readline()
        assert line, f"the demo ended before {step}: {said}"
        said += line
    demo.send_signal(number)
    demo.send_signal(number)
    _, rest = demo.communicate(timeout=60)
    assert demo.returncode == 130, said + rest
    assert rest.endswith("cachefs-demo: interrupted; nothing is left mounted or running\n")
    assert_nothing_is_left(tmp_path, said + rest)
