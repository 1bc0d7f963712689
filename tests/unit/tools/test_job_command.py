"""What `cachectl job publish` makes of odd arguments, before any daemon is asked."""

import os
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from cachefs.errors import AccessDenied, ConfigError, NotFound
from cachefs.job_messages import JobPublication, ReadaheadView
from cachefs.messages import ReadaheadCounts
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.rpc import encode
from cachefs_tools.cachectl.job import check_own_process, parse_ranks, read_order
from cachefs_tools.cachectl.job_page import readahead_row

CONTEXT: Any = None


def test_a_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_own_process(os.getpid())
    with pytest.raises(NotFound, match="there is no process 2147483647 on this node"):
        check_own_process(2**31 - 1)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(AccessDenied, match="process 1 is not yours"):
        check_own_process(1)


def test_ranks() -> None:
    assert parse_ranks(CONTEXT, CONTEXT, "0-3,8,2") == [0, 1, 2, 3, 8]
    for text in ("7-3", "0-99999999999", "x", "-1", "", ",".join(["0-8191"] * 2)):
        with pytest.raises(click.BadParameter):
            parse_ranks(CONTEXT, CONTEXT, text)


@pytest.mark.parametrize(
    "name", ["empty.txt", "empty.npy", "none.npy", "floats.npy", "text.npy", "objects.npy", "x.txt"]
)
def test_files_that_hold_no_order(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.npy").touch()
    (tmp_path / "x.txt").write_text("1 2 x")
    np.save(tmp_path / "none.npy", np.zeros(0, np.int64))
    np.save(tmp_path / "floats.npy", np.array([1.5, 2]))
    np.save(tmp_path / "text.npy", np.array(["a"]))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match=f"{name} is not an order of samples: ") as caught:
        read_order(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_files_that_hold_one(tmp_path: Path) -> None:
    (tmp_path / "order").write_text("3\n1\n2\n")
    np.save(tmp_path / "order.npy", np.array([3, 1, 2], np.int16))
    expected = np.array([3, 1, 2], "<u4").tobytes()
    assert read_order(tmp_path / "order") == read_order(tmp_path / "order.npy") == expected


def test_numbers_of_more_than_64_bits_are_named() -> None:
    for seed in (1 << 64, -(1 << 63) - 1):
        with pytest.raises(ConfigError, match="a number of more than 64 bits"):
            encode(JobPublication(job="j", dataset="d", spec=SamplerSpec(kind="numpy", size=1, seed=seed)))


def test_what_was_guessed_and_may_still_be_read_is_not_called_wrong() -> None:
    counts = ReadaheadCounts(blocks=10, right=4, wrong=1, bytes=10 << 20, right_bytes=4 << 20, wrong_bytes=1 << 20)
    row = readahead_row(ReadaheadView(dataset="toy", snapshot="0" * 32, rule="set", counts=counts))
    assert row == ("toy", "rest of a directory", "10", "10 MiB", "4 MiB", "1 MiB", "5 MiB")
