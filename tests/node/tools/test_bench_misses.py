"""`cachefs-bench miss` and `cachefs-bench listing` with small data: what they print, and that it adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cachefs_bench import misses
from cachefs_bench.listing_server import Layout, keys
from cachefs_bench.misses import CACHEFS, COPY, PATTERNS, RAW_CLIENT, MissLoad, ReadPass, table

BENCH = Path(sys.executable).with_name("cachefs-bench")


def bench(*arguments: str) -> str:
    done = subprocess.run([BENCH, *arguments], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cold_reads_by_all_who_can(tmp_path: Path) -> None:
    small = ("--files", "1", "--size", "3000", "--turns", "1")
    document = json.loads(bench("miss", *small, "--json", "--directory", str(tmp_path)))
    assert document["files"] == 100
    assert list(document["patterns"]) == list(PATTERNS)
    for pattern, ways in document["patterns"].items():
        others = set(document["ratios"][pattern])
        assert set(ways) == {CACHEFS} | others
        assert (RAW_CLIENT in others) == (pattern != COPY)
        for figures in ways.values():
            assert figures["files_per_second"] > 0
            assert ("p50_ms" in figures) == (pattern != COPY)
    assert list(tmp_path.iterdir()) == []


def test_no_two_patterns_read_the_same_file() -> None:
    load = MissLoad(files=200, size=10, turns=3)
    parts = [load.numbers(pattern, turn) for pattern in PATTERNS for turn in range(3)]
    assert sorted(number for part in parts for number in part) == list(range(200 * 3 * 3))


def test_the_table_fits_a_terminal() -> None:
    passes = {name: [ReadPass(0.1, [0.0123, 1234.5])] for name in (CACHEFS, "rclone", "s3fs", RAW_CLIENT)}
    figures = {name: misses._figures(found, 1_000_000) for name, found in passes.items()}
    document = {
        "patterns": dict.fromkeys(PATTERNS, figures),
        "ratios": dict.fromkeys(PATTERNS, misses._ratio(passes)),
    }
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(document))
    text = capture.get()
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "1.00 x" in text


@pytest.mark.parametrize("layout", [one for one in Layout if one != Layout.SKEWED])
def test_keys_of_a_layout_are_in_order_and_different(layout: Layout) -> None:
    found = keys(layout, 2000)
    assert len(set(found)) == 2000
    assert found == sorted(found)


@pytest.mark.soak
def test_listing_counts_all_keys(tmp_path: Path) -> None:
    arguments = ("--keys", "1200", "--delay", "1", "--layout", Layout.SKEWED.value, "--directory", str(tmp_path))
    (turn,) = json.loads(bench("listing", *arguments))["turns"]
    assert {way["objects"] for way in turn.values()} == {1200}
    assert turn["cachefs"]["child_peak_mb"] > 0
