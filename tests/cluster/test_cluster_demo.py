"""`make demo-cluster`, small: its table says what it should, and nothing is left of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.mount_table import mount_points

pytestmark = pytest.mark.cluster
DEMO = [sys.executable, "-m", "cachefs_bench.cluster_demo"]


def run(work: Path, *options: str) -> str:
    done = subprocess.run(
        [*DEMO, "--files", "320", *options], env={**os.environ, "TMPDIR": str(work)}, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(work.iterdir()) == []
    assert not [point for point in mount_points() if point.path.is_relative_to(work)]
    return done.stdout


def test_four_nodes_are_one_cache_and_one_dies(tmp_path: Path) -> None:
    cold, killed, without = json.loads(run(tmp_path, "--json"))["epochs"]
    assert [row["bad"] for row in (cold, killed, without)] == [0, 0, 0]
    assert cold["reads"] == 2 * 320
    assert cold["origin_bytes"] <= 1.05 * 320 * 110_000
    # The blocks that only the lost node held are fetched again.
    assert killed["origin_bytes"] + without["origin_bytes"] <= 0.5 * 320 * 110_000


def test_the_table_fits_80_columns(tmp_path: Path) -> None:
    table = run(tmp_path)
    assert "without node4" in table
    assert max(map(len, table.splitlines())) <= 80
