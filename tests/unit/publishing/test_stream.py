"""What is published of a stream's shards, epoch by epoch."""

from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.hooks import stream
from cachefs.hooks.stream import Stream
from cachefs.publishing.columns import Listing

FILES = ("/mnt/a.tar", "/mnt/b.tar", "/mnt/c.tar")


class Published:
    """Keeps what is published of one consumer."""

    def __init__(self, files: tuple[str, ...], opening: dict[str, Any]) -> None:
        self.files = files
        self.opening = opening
        self.orders: dict[int, list[int]] = {}
        self.notes: list[str] = []
        self.is_open = True

    def order(self, epoch: int, order: list[int]) -> None:
        self.orders[epoch] = order

    def note(self, unknown: str, opened: str) -> None:
        self.notes.append(opened)

    def progress(self, epoch: int, position: int) -> None:
        pass

    def close(self) -> None:
        self.is_open = False

    def note_end(self) -> None:
        self.is_open = False


class Dataset:
    """Its library tells the shards that it has, in an order that is turned by one in each epoch."""

    def __init__(self) -> None:
        self.files: tuple[str, ...] | None = FILES
        self.asked = 0

    def orders(self, begun: int, workers: int, *, keeps_workers: bool) -> list[list[int]]:
        assert self.files is not None
        numbers = [*range(len(self.files))]
        return [numbers[turn:] + numbers[:turn] for turn in (begun, begun + 1)]


class Job:
    """One loader, and all that was published of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: list[Published] = []
        self.dataset = Dataset()
        self.skipped = 0
        self.opened = ""

        def published(files: tuple[str, ...], opening: dict[str, Any]) -> Published:
            self.published.append(Published(files, opening))
            return self.published[-1]

        def shards_of(dataset: Dataset) -> Dataset | None:
            dataset.asked += 1
            return dataset if dataset.files is not None else None

        def mount_of(path: str) -> object:
            return path if path.startswith("/mnt/") else None

        monkeypatch.setattr(stream, "Publication", published)
        monkeypatch.setattr(stream, "shards_of", shards_of)
        monkeypatch.setattr(stream, "skipped", lambda _: self.skipped)
        monkeypatch.setattr(stream, "Places", lambda: SimpleNamespace(mount_of=mount_of))
        monkeypatch.setattr(stream, "listing", lambda _: Listing((), ()))
        monkeypatch.setattr(stream.opened, "what_was_opened", lambda *_: self.opened)
        loader = SimpleNamespace(dataset=self.dataset, num_workers=0, persistent_workers=False)
        self.stream = Stream(loader, {"dataset": "Stream", "place": "train.py:3"})

    def epoch(self) -> None:
        self.stream.begin(object(), self.dataset)
        self.stream.drew([None], object(), 0)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_each_epoch_is_published_and_the_library_is_asked_once_for_it(job: Job) -> None:
    job.epoch()
    job.epoch()
    [published] = job.published
    assert (published.files, published.opening["shards"]) == (FILES, True)
    assert published.orders == {0: [0, 1, 2], 1: [1, 2, 0], 2: [2, 0, 1]}
    assert job.dataset.asked == 2


def test_of_an_epoch_that_goes_on_in_its_middle_no_order_is_published(job: Job) -> None:
    job.skipped, job.opened = 20, FILES[2]
    job.epoch()
    assert [(one.files, one.orders, one.notes) for one in job.published] == [(FILES, {}, [])]
    job.skipped = 0
    job.epoch()
    [published] = job.published
    assert published.orders == {1: [1, 2, 0], 2: [2, 0, 1]}


def test_what_is_not_known_at_first_is_published_later(job: Job) -> None:
    job.dataset.files, job.opened = None, FILES[0]
    job.epoch()
    [unknown] = job.published
    assert (unknown.files, unknown.notes) == ((), [FILES[0]])
    job.dataset.files = FILES
    job.epoch()
    assert [(one.files, one.is_open) for one in job.published] == [((), False), (FILES, True)]


def test_other_files_are_another_publication(job: Job) -> None:
    job.epoch()
    job.dataset.files = FILES[:2]
    job.epoch()
    assert [(one.files, one.is_open) for one in job.published] == [(FILES, False), (FILES[:2], True)]
    assert job.published[1].orders == {1: [1, 0], 2: [0, 1]}


def test_a_stream_that_is_below_no_mount_costs_nothing_further(job: Job) -> None:
    job.dataset.files = ("/data/a.tar",)
    for _ in range(3):
        job.epoch()
    assert (job.published, job.dataset.asked) == ([], 1)


def test_an_order_that_takes_too_long_is_asked_for_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(job.dataset, "orders", lambda begun, workers, keeps_workers: asked.append(begun) or [])
    for _ in range(3):
        job.epoch()
    assert asked == [0]
    [published] = job.published
    assert (published.files, published.orders) == (FILES, {})
