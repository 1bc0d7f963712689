"""What a process tells of the batches that it begins, and when it loads for another loader."""

import os
import threading
from typing import Any

import pytest

from cachefs.hooks import batch_reports, opened_files
from cachefs.hooks.batch_reports import BatchReporter
from cachefs.publishing.page import WantedSamples


class Helper:
    """Of one loader: keeps what it is told."""

    def __init__(self) -> None:
        self.wanted_samples = WantedSamples.UNKNOWN
        self.told: list[dict[str, Any]] = []

    def send_message(self, message: dict[str, Any]) -> None:
        self.told.append(message)


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Helper:
    """That of loader 0. Of any other loader no helper knows."""
    found = Helper()
    monkeypatch.setattr(opened_files, "find_helper", lambda number, _: found if number == 0 else None)
    monkeypatch.setattr(batch_reports, "_thread", threading.local())
    return found


def loader(number: int) -> BatchReporter:
    return BatchReporter(opened_files.OpenRecorder(number, os.getpid()), one_by_one=True)


def begin(one: BatchReporter | None) -> None:
    """As torch's fetcher does it."""
    batch_reports._switch_reporter(one)
    if one is not None:
        one.record_batch([1, 2])


@pytest.mark.parametrize("other", [1, None], ids=["not known yet", "of which nothing is told"])
def test_the_last_batch_ends_as_the_thread_loads_for_another_loader(helper: Helper, other: int | None) -> None:
    first = loader(0)
    begin(first)
    begin(first)
    assert [message["ended"] for message in helper.told] == [0, 0]
    begin(None if other is None else loader(other))
    *_, last = helper.told
    assert last["begun"] == []
    assert last["ended"] >= helper.told[1]["begun"][0][0]
    begin(first)
    assert (helper.told[-1]["ended"], len(helper.told)) == (0, 4)


def test_another_thread_ends_nothing(helper: Helper) -> None:
    begin(loader(0))
    thread = threading.Thread(target=begin, args=(loader(1),))
    thread.start()
    thread.join()
    assert len(helper.told) == 1


def test_a_child_ends_nothing_of_its_parent(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(loader(0))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    begin(None)
    assert len(helper.told) == 1
