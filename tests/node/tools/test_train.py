"""`cachefs-bench train` with small data: its jobs read the right bytes, and its figures add up."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError

from cachefs.mount import kernel
from cachefs.mount_table import mount_points
from cachefs_bench.cli import main
from cachefs_bench.origin_server import BUCKET
from cachefs_daemon.sections import OriginSection
from tests.cachectl import run_here
from tests.servers.s3 import S3Server
from tests.waiting import until

BENCH = Path(sys.executable).with_name("cachefs-bench")
FILES, SIZE, EPOCHS, DEMAND = 80, 20_000, 2, 400


def train(work: Path, *options: str, env: Mapping[str, str] = os.environ) -> Any:
    """Run the benchmark. Returns its JSON document."""
    done = subprocess.run(
        [BENCH, "train", "--files", str(FILES), "--size", str(SIZE), "--epochs", str(EPOCHS), "--demand", str(DEMAND),
         "--workers", "2", "--latency", "10", "--latency-p99", "0", "--directory", str(work), *options],
        capture_output=True, text=True, timeout=250, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(work.glob("cachefs-bench-*")) == []
    return json.loads(done.stdout)


def assert_adds_up(run: dict[str, Any]) -> None:
    for job in run["jobs"]:
        assert [epoch["samples"] for epoch in job["epochs"]] == [FILES] * EPOCHS
        assert job["damaged"] == 0
        assert job["seconds"] >= EPOCHS * FILES / DEMAND
        assert 0 < job["utilisation"] < job["utilisation_after_first_batch"]
        assert job["stall_seconds"] <= job["seconds"] - EPOCHS * FILES / DEMAND
    epochs = run["epochs"]
    assert sum(epoch["origin_bytes"] for epoch in epochs) == run["origin"]["bytes"]
    reads = sum(epoch["hits"] + epoch["misses"] for epoch in epochs)
    # One of two jobs may find in the page cache what the other has just read.
    assert EPOCHS * FILES <= reads <= len(run["jobs"]) * EPOCHS * FILES
    assert run["origin"]["samples"] >= run["origin"]["expected_samples"]["belady"]
    assert set(run["machine"]["cpu_seconds"]) == {"daemon", "mount", "proxy"}


def test_tiers_that_hold_everything_fetch_each_byte_once(tmp_path: Path) -> None:
    plot = tmp_path / "runs.png"
    result = train(tmp_path, "--loader", "plain", "--publish", "none", "--policy", "minio", "--plot", str(plot))
    (run,) = result["runs"]
    assert_adds_up(run)
    assert run["origin"]["samples"] == FILES
    assert run["origin"]["expected_samples"] == {"belady": FILES, "least": FILES, "lru": FILES}
    assert run["jobs"][0]["epochs"][0]["slow_reads"] > run["jobs"][0]["epochs"][1]["slow_reads"]
    assert result["proxy_ceiling"]["bytes_per_s"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_small_tiers_fetch_again(tmp_path: Path) -> None:
    result = train(
        tmp_path, "--loader", "plain", "--publish", "none", "--policy", "lru",
        "--capacity", "0.5", "--jobs", "2", "--stagger", "0.3",
    )  # fmt: skip
    (run,) = result["runs"]
    assert_adds_up(run)
    assert len(run["jobs"]) == 2
    assert run["origin"]["samples"] > FILES


@pytest.mark.soak
def test_an_unmodified_torch_script_trains(tmp_path: Path) -> None:
    (run,) = train(tmp_path, "--publish", "none", "--policy", "minio", "--bandwidth", "20")["runs"]
    assert_adds_up(run)
    assert run["origin"]["bytes"] == FILES * SIZE


@pytest.mark.soak
def test_the_origin_may_be_any_s3_server(tmp_path: Path, radosgw: S3Server) -> None:
    env = {**os.environ, **radosgw.environment}
    options = ("--loader", "plain", "--publish", "none", "--policy", "minio", "--endpoint", radosgw.endpoint)
    (run,) = train(tmp_path, *options, env=env)["runs"]
    assert_adds_up(run)
    # Each file once, and a second time where its request was late beside a busy machine: 2 in 100 at most.
    twice, rest = divmod(run["origin"]["bytes"] - FILES * SIZE, SIZE)
    assert rest == 0
    assert 0 <= twice <= OriginSection().hedged * FILES
    with pytest.raises(ClientError, match="NoSuchBucket"):
        radosgw.put(BUCKET, {"left": b"nothing"})


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    bench = subprocess.Popen(
        [BENCH, "train", "--files", "200", "--demand", "20", "--publish", "run", "--directory", str(tmp_path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert bench.stderr is not None
    until(lambda: bench.poll() is not None or processes_with(tmp_path, "torch_job"))
    assert bench.poll() is None, bench.stderr.read()
    training = processes_with(tmp_path, "torch_job")
    bench.send_signal(number)
    bench.communicate(timeout=60)
    assert bench.returncode == (130 if number == signal.SIGTERM else -number)
    psutil.wait_procs(training, timeout=20)
    psutil.wait_procs(processes_with(tmp_path), timeout=20)
    assert processes_with(tmp_path) == []
    left = [point.path for point in mount_points() if point.path.is_relative_to(tmp_path)]
    for path in left:
        kernel.unmount(path, lazy=True)
    if number == signal.SIGTERM:
        assert left == list(tmp_path.glob("cachefs-bench-*")) == []


def processes_with(work: Path, word: str = "") -> list[psutil.Process]:
    """The processes that have *work* and *word* in their command line, without the benchmark itself."""
    lines = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [
        process
        for process, line in lines
        if str(work) in " ".join(line) and word in " ".join(line) and str(BENCH) not in line
    ]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["--size", "20"], "cachefs-bench: a tier would be smaller than one block"),
     (["--endpoint", "http://127.0.0.1:9"], "cachefs-bench: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
     (["--publish", "perhaps"], "'perhaps' is not one of"), (["--preset", "m9"], "'m9' is not one of"),
     (["--preset", "m3", "--only", "belady"], "no run has 'belady' in its title")],
)  # fmt: skip
def test_what_cannot_be_run_is_told_in_a_line(tmp_path: Path, options: list[str], complaint: str) -> None:
    words = ["train", "--files", "10", "--capacity", "0.5", "--directory", str(tmp_path), *options]
    done = run_here(main, "cachefs-bench", words)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
