"""The parts of `cachefs-bench push`, without a node: its readers, and what they report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs_bench import push_large, push_paced
from cachefs_bench.hotread import compile_hotread, first_round_order
from cachefs_bench.push_reader import PROGRESS
from cachefs_bench.sample_data import sample_name, write_samples
from cachefs_tools.kernel_pages import drop_pages

pytestmark = pytest.mark.usefixtures("steady_page_cache")

FILES, SIZE, EPOCHS = 150, 5000, 2


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("mount", "native"):
        write_samples(tmp_path / name, FILES, SIZE)
    return tmp_path / "mount", tmp_path / "native"


def read(trees: tuple[Path, Path]) -> list[dict[str, object]]:
    progress = trees[0].parent / "progress"
    progress.write_bytes(bytes(PROGRESS.size))
    done = subprocess.run(
        [sys.executable, "-m", "cachefs_bench.push_reader", *trees, "--files", str(FILES), "--size", str(SIZE),
         "--seed", "1", "--epochs", str(EPOCHS), "--compute", "0.0001", "--progress", progress],
        input=b"go\n", capture_output=True, check=True,
    )  # fmt: skip
    assert PROGRESS.unpack(progress.read_bytes()) == (EPOCHS - 1, FILES)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_reader_reads_all_of_both_trees_in_every_epoch(trees: tuple[Path, Path]) -> None:
    epochs = read(trees)
    assert [(epoch["epoch"], epoch["samples"], epoch["damaged"]) for epoch in epochs] == [(0, FILES, 0), (1, FILES, 0)]
    for epoch in epochs:
        for tree in (epoch["mount"], epoch["native"]):
            assert isinstance(tree, dict)
            assert 0 < tree["p50_us"] <= tree["p99_us"] <= tree["longest_us"]
            assert tree["longest_us"] < 1e6 * tree["seconds"] < 1e6 * float(str(epoch["seconds"]))


def test_the_reader_sees_what_is_not_right(trees: tuple[Path, Path]) -> None:
    mount, _ = trees
    os.truncate(mount / sample_name(3), 4000)
    content = (mount / sample_name(5)).read_bytes()
    (mount / sample_name(4)).write_bytes(content)
    assert [epoch["damaged"] for epoch in read(trees)] == [2, 2]


def test_the_order_of_hotread_is_known(tmp_path: Path) -> None:
    """No path exists, and each of two processes names the first it misses. So they name the first two of the order."""
    names = [f"{number:03}" for number in range(100)]
    hotread = compile_hotread(tmp_path, names)
    for seed in range(5):
        command = [hotread.program, "--root", "none", "--list", hotread.listing, "--procs", "2", "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        missed = {line.split(": ")[1] for line in done.stderr.splitlines()}
        order = first_round_order(len(names), seed)
        assert sorted(order) == list(range(100))
        assert missed == {f"none/{names[number]}" for number in order[:2]}


def test_resident_pages_are_counted(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.write_bytes(bytes(10_000))
    os.sync()
    drop_pages(paths)
    assert push_paced.resident_bytes(paths) == 0
    with push_paced.watch_pages(paths) as samples:
        paths[0].read_bytes()
    assert (samples[0], samples[-1]) == (0, 3 * 4096)


def test_large_files_prove_themselves(tmp_path: Path) -> None:
    path = tmp_path / "native" / push_large.NAME
    push_large.write_large(path, 4 * push_large.RECORD_BYTES)
    offsets = [number * push_large.RECORD_BYTES for number in (2, 0, 3, 1)]
    assert push_large.read_pieces(path, offsets, push_large.RECORD_BYTES)[1] == 0
    with path.open("r+b") as file:
        file.seek(2 * push_large.RECORD_BYTES)
        file.write(bytes(8))
    os.truncate(path, 4 * push_large.RECORD_BYTES - 1)
    assert push_large.read_pieces(path, offsets, push_large.RECORD_BYTES)[1] == 2
