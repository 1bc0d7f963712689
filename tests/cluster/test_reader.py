"""The reader of the lab: it reads what its rank reads, and notices what is wrong. A directory stands for a mount."""

import json
import subprocess
import sys
from pathlib import Path

import numpy

from cachefs.planning.sequences.sampler import epoch_order
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_bench.sample_data import sample_name, write_samples

FILES = 40


def read(root: Path, words: str, epochs: int = 2, replicas: int = 2) -> list[dict[str, object]]:
    """The lines of a reader of rank 0 that is told these words."""
    done = subprocess.run(
        [sys.executable, "-m", "cachefs_bench.lab.reader", str(root), "--files", str(FILES), "--epochs", str(epochs),
         "--rank", "0", "--replicas", str(replicas), "--seed", "7", "--threads", "3", "--rate", "5000", "--first", "0"],
        input=words, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def epochs_of(lines: list[dict[str, object]]) -> list[dict[str, float]]:
    return [line["epoch"] for line in lines if "epoch" in line]  # type: ignore[misc]


def test_a_rank_reads_its_part_of_each_epoch(tmp_path: Path) -> None:
    write_samples(tmp_path, FILES, 5000)
    lines = read(tmp_path, "go\ngo\n")
    assert lines[0] == {"ready": True}
    first, second = epochs_of(lines)
    assert (first["epoch"], first["reads"], first["bytes"]) == (0, FILES / 2, FILES / 2 * 5000)
    assert second["epoch"] == 1
    assert first["errors"] == first["wrong"] == 0
    assert not [line for line in lines if "trouble" in line]


def test_it_reads_as_many_epochs_as_it_is_told(tmp_path: Path) -> None:
    write_samples(tmp_path, FILES, 100)
    assert len(epochs_of(read(tmp_path, "go\n", epochs=5))) == 1
    assert len(epochs_of(read(tmp_path, "go\non\n", epochs=5))) == 5


def test_what_is_wrong_or_missing_is_told(tmp_path: Path) -> None:
    write_samples(tmp_path, FILES, 100)
    spec = SamplerSpec(kind="torch-distributed", size=FILES, seed=7, epochs=1, replicas=2, rank=0)
    wrong, missing = (int(sample) for sample in epoch_order(spec, 0)[:2].astype(numpy.int64))
    (tmp_path / sample_name(wrong)).write_bytes(bytes(100))
    (tmp_path / sample_name(missing)).unlink()
    lines = read(tmp_path, "go\n", epochs=1)
    troubles = {line["trouble"]["sample"]: line["trouble"] for line in lines if "trouble" in line}  # type: ignore[index,call-overload]
    assert troubles.keys() == {wrong, missing}
    assert troubles[wrong]["kind"] == "wrong"
    assert (troubles[missing]["kind"], troubles[missing]["reason"]) == ("error", "No such file or directory")
    (epoch,) = epochs_of(lines)
    assert (epoch["errors"], epoch["wrong"], epoch["reads"]) == (1, 1, FILES / 2)
