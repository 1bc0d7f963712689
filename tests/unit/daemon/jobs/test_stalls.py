"""Sums of what readers waited for."""

import pytest

from cachefs_daemon.jobs import stalls as module
from cachefs_daemon.jobs.stalls import Stalls


def test_a_job_of_a_million_epochs_keeps_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    stalls = Stalls()
    for epoch in range(10):
        stalls.count_stall("j", "0", epoch, "origin", 0.5)
        stalls.count_stall("j", "0", epoch, "origin", 1.5)
    assert [(row.epoch, row.count, row.seconds, row.longest) for row in stalls.stall_rows("j")] == [
        (7, 2, 2.0, 1.5), (8, 2, 2.0, 1.5), (9, 2, 2.0, 1.5),
    ]  # fmt: skip
    assert stalls.waited_of_job("j") == (20, 20.0)  # of all of them
    stalls.forget("j")
    assert stalls.waited_of_job("j") == (0, 0.0)
    assert stalls.stall_rows() == []


def test_a_job_of_many_consumers_keeps_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONSUMERS", 2)
    stalls = Stalls()
    for consumer in ("0", "1", "0", "2"):
        stalls.count_stall("j", consumer, 0, "peer node-1", 0.5)
    assert stalls.seconds_of_consumers("j") == {"1": {"peer": 0.5}, "2": {"peer": 0.5}}
