"""What a process that loads samples tells the helper, and when it tells it again."""

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from cachefs.hooks import opened_files
from cachefs.hooks.opened_files import OpenRecorder
from cachefs.mount_table import MountPoint
from cachefs.publishing import channel
from cachefs.publishing.mount_resolver import MountResolver
from cachefs.publishing.page import WantedSamples


class Heard:
    """A helper that hears everything."""

    def __init__(self) -> None:
        self.wanted_samples = WantedSamples.UNKNOWN
        self.samples: list[int] = []
        self.observed: list[tuple[list[int], list[str]]] = []

    def send_message(self, message: dict[str, Any]) -> None:
        self.observed += message["observed"]
        self.samples += [sample for samples, _ in message["observed"] for sample in samples]


def load(reader: OpenRecorder, *samples: int) -> None:
    for sample in samples:
        reader.record_open({"possibly_batched_index": object()}, {"idx": sample}, f"/mnt/{sample}")
        reader.send_loaded()


def test_samples_are_told_again_where_what_was_known_is_retracted(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Heard()
    monkeypatch.setattr(opened_files, "find_helper", lambda number, owner: helper)
    reader = OpenRecorder(1, os.getpid())
    load(reader, 0, 1, 2, 1)
    assert helper.samples == [0, 1, 2]
    helper.wanted_samples = WantedSamples.SOME
    load(reader, 3)
    helper.samples.clear()
    load(reader, *[4] * 2 * opened_files.COMPARE_INTERVAL)
    assert len(helper.samples) in (1, 2)
    helper.wanted_samples = WantedSamples.UNKNOWN
    load(reader, *[5] * opened_files.COMPARE_INTERVAL)
    helper.samples.clear()
    load(reader, 0, 1, 2, 3)
    assert helper.samples == [0, 1, 2, 3]


def test_threads_that_go_through_one_loader_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loads samples of two files, and both do so at the same time."""
    helper = Heard()
    monkeypatch.setattr(opened_files, "find_helper", lambda number, owner: helper)
    reader = OpenRecorder(1, os.getpid())
    between = threading.Barrier(2, timeout=60)

    def go_through(begin: int) -> None:
        for sample in (begin, begin + 1):
            batch = object()
            for name in "ab":
                between.wait()
                reader.record_open({"possibly_batched_index": batch}, {"idx": sample}, f"/mnt/{sample}{name}")
        between.wait()
        reader.send_loaded()

    threads = [threading.Thread(target=go_through, args=(begin,)) for begin in (0, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(helper.observed) == [([n], [f"/mnt/{n}a", f"/mnt/{n}b"]) for n in (0, 1, 10, 11)]


def test_the_loader_of_a_worker_is_that_of_the_thread_which_starts_it() -> None:
    """Also where several threads start workers at once, and however late the worker's process begins."""
    arrived: dict[int, Any] = {}

    def start(number: int) -> None:
        opened_files.set_loader(number)
        barrier.wait()
        arrived[number] = pickle.loads(pickle.dumps(opened_files._configuration()[opened_files._LOADER_KEY]))

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=start, args=(number,)) for number in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arrived == {number: (number, os.getpid()) for number in (3, 4)}
    assert opened_files._configured_loader() is None, "this process works for no loader"
    del opened_files._configuration()[opened_files._LOADER_KEY]


@pytest.mark.parametrize("found", [(), (7, 8)])
def test_a_worker_knows_for_which_loader_it_works(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(opened_files._configuration(), opened_files._LOADER_KEY, found)
    assert opened_files._configured_loader() == (found or None)


@pytest.mark.parametrize("owner", [os.getpid(), 1 << 22], ids=["own", "another"])
def test_a_process_whose_loader_opens_a_file_of_a_mount_reads_one(owner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the loader publishes nothing, as a stream does that lists files whose order is not known."""

    def fetch(path: str) -> None:
        audit(path)

    def audit(path: str) -> None:
        opened_files._record_open(path)

    monkeypatch.setattr(channel, "iterated_loaders", {os.getpid()})
    monkeypatch.setattr(opened_files, "_resolver", MountResolver([MountPoint(Path("/mnt"), "0:1", "cachefs:set")]))
    monkeypatch.setattr(opened_files, "_fetcher_codes", {fetch.__code__: fetch.__code__})
    monkeypatch.setattr(opened_files, "recorder_of", lambda caller: reader)
    monkeypatch.setattr(opened_files, "call_at_exit", lambda finish: None)
    channel.mount_readers.discard(os.getpid())
    reader = OpenRecorder(1, owner)
    fetch("/data/a")
    assert channel.has_read_no_mount()
    fetch("/mnt/a")
    assert channel.has_read_no_mount() == (owner != os.getpid())


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_process_whose_workers_open_a_file_of_a_mount_reads_one(
    has_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_files, "_user_directory", lambda: tmp_path)
    monkeypatch.setattr(channel, "iterated_loaders", {os.getpid()})
    channel.mount_readers.discard(os.getpid())
    opened_files._make_open_mark(1, os.getpid(), "/mnt/a")
    if has_ended:
        opened_files.record_end(1, opened_files.open_mark_path(1, os.getpid()), os.getpid())
        opened_files.remove_ended()
    opened_files._end_process()
    assert not channel.has_read_no_mount()
