"""Streams of Hugging Face and of MDS read their shards in the order that was foreseen.

They are read by the libraries of the programs: `make programs`. What needs no library is tested in `make test`.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.hooks.hugging_face import HuggingFaceShards

SCRIPT = Path(__file__).with_name("library_shards.py")
PYTHON = os.environ.get("PROGRAMS_PYTHON")


@pytest.mark.programs
@pytest.mark.parametrize("library", ["hugging-face", "mds"])
def test_shards_are_read_in_the_order_that_was_foreseen(library: str, tmp_path: Path) -> None:
    assert PYTHON, "PROGRAMS_PYTHON does not name an interpreter: see make programs"
    done = subprocess.run(
        [PYTHON, "-W", "ignore", SCRIPT, library, tmp_path],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    *streams, unknown = map(json.loads, done.stdout.splitlines())
    assert len(streams) >= 20
    for stream in streams:
        if stream["name"] == "copied":  # to a directory of the library, which reads them there from then on
            assert [len(orders) for orders in stream["foreseen"]] == [1, 0, 0]
            assert sorted(stream["foreseen"][0][0]) == sorted(stream["read"][0])
            continue
        first, of_next = (
            [[stream["numbers"][shard] for shard in orders[ahead]] for orders in stream["foreseen"]] for ahead in (0, 1)
        )
        assert of_next[:-1] == first[1:], stream["name"]
        for foreseen, read in zip(first, stream["read"], strict=True):
            assert sorted(foreseen) == sorted(read), stream["name"]
            # Samples of workers come in turns, so shards of theirs do; how far each of them is by then differs.
            assert foreseen[: stream["workers"]] == read[: stream["workers"]], stream["name"]
            assert foreseen == read or stream["workers"] > 1, stream["name"]
    assert unknown["name"] == "unknown"
    assert not any(unknown["found"])
    assert unknown["known"], "the epoch after one that has gone on in its middle"


@given(st.integers(1, 40), st.integers(0, 6), st.integers(0, 9), st.integers(1, 6), st.booleans(), st.data())
def test_no_file_is_lost_between_ranks_and_workers(
    count: int, workers: int, epoch: int, world_size: int, is_lazy: bool, data: st.DataObject
) -> None:
    read = tuple(data.draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=2 * count)))
    files = tuple(map(str, range(count)))
    generator = numpy.random.default_rng(7) if is_lazy else None
    orders = [
        HuggingFaceShards(files, read, epoch, generator, not is_lazy, rank, world_size).epoch_orders(
            epoch, workers, keeps_workers=False
        )
        for rank in range(world_size)
    ]
    for ahead in range(2):
        found = [order[ahead] for order in orders]
        assert {number for one in found for number in one} == set(read)
        assert all(len(one) == len(set(one)) for one in found)
