"""`cachefs-bench push` with small data: its presets run, and their figures add up."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cachefs_bench.cli import main
from tests.cachectl import run_here

pytestmark = pytest.mark.usefixtures("steady_page_cache")

BENCH = Path(sys.executable).with_name("cachefs-bench")
FILES, SIZE = 60, 20_000


def push(work: Path, preset: str, *options: str) -> list[dict[str, Any]]:
    """Run the benchmark. Returns the runs of its JSON document."""
    done = subprocess.run(
        [BENCH, "push", "--preset", preset, "--files", str(FILES), "--directory", work, *options],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(work.glob("cachefs-bench-*")) == []
    runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return runs


@pytest.mark.soak
def test_paced_readers_with_and_without_heartbeats(tmp_path: Path) -> None:
    runs = push(tmp_path, "m3", "--size", str(SIZE), "--epochs", "2", "--compute", "0.5", "--budget", "8MiB")
    assert [run["run"] for run in runs] == ["tripwires", "heartbeats"]
    for run in runs:
        assert run["samples"] == 2 * FILES
        assert [epoch["damaged"] for epoch in run["epochs"]] == [0, 0]
        assert all(0 < epoch["utilisation"] < 1 for epoch in run["epochs"])
        # All pages fit. A file that was not pushed before its read was therefore asked for once.
        assert run["fuse"]["requests"] <= 1.2 * FILES
        assert run["resident"]["samples"][0] == 0
        # One file in eight may be a tripwire, and the kernel may drop single pages.
        assert 0.8 * FILES * 5 * 4096 < run["resident"]["largest_bytes"] <= FILES * 5 * 4096
        assert {"daemon", "mount", "reader"} <= set(run["processor_seconds"])


@pytest.mark.soak
def test_full_speed_with_and_without_pushing(tmp_path: Path) -> None:
    one, two = push(tmp_path, "m2", "--size", str(SIZE), "--turns", "1")
    assert (one["run"], two["run"]) == ("1 readers", "2 readers")
    for run in (one, two):
        for way in ("pushing", "not pushing"):
            (turn,) = run["turns"][way]
            assert run["first_epoch_files_per_s"][way] == turn["mount_files_per_s"][0] > 0
            # At most one read in eight is a tripwire. An epoch of 60 files takes milliseconds, so the tripwires of the
            # epoch after it are out of the page cache by then as well.
            assert all(requests <= 2 / 8 for requests in turn["fuse_requests_per_file"][1:])
        (alone,) = run["turns"]["not pushing"]
        assert 1 <= alone["fuse_requests_per_file"][0] < 1.2
        assert alone["push"].get("push_stored_blocks", 0) == 0


@pytest.mark.soak
def test_a_large_file_in_order_and_in_pieces_from_each_tier(tmp_path: Path) -> None:
    runs = push(tmp_path, "m5", "--size", str(16 << 20))
    assert len({run["run"] for run in runs}) == len(runs) == 8
    for run in runs:
        assert run["damaged"] == 0
        assert run["gb_per_s"] > 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["m5", "--size", "1000000"], "cachefs-bench: --size 1000000 is not a multiple of 1048576"),
     (["m1", "--budget", "much", "--size", "1000"], "page_cache_budget=much"), (["m4"], "'m4' is not one of")],
)  # fmt: skip
def test_what_cannot_be_run_is_told_in_a_line(tmp_path: Path, options: list[str], complaint: str) -> None:
    words = ["push", "--directory", str(tmp_path), "--files", "10", "--preset", *options]
    done = run_here(main, "cachefs-bench", words)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
