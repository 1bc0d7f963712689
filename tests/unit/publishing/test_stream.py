"""What is published of a stream's shards, epoch by epoch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from cachefs.hooks import stream_watch
from cachefs.hooks.stream_watch import BatchLength, StreamWatch
from cachefs.publishing.files.listed import DatasetListing

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

    def publish_note(self, unknown: str, opened: str) -> None:
        self.notes.append(opened)

    def progress(self, epoch: int, position: int) -> None:
        pass

    def close(self) -> None:
        self.is_open = False

    def record_end(self) -> None:
        self.is_open = False


class Dataset:
    """Its library tells the shards that it has, in an order that is turned by one in each epoch."""

    def __init__(self) -> None:
        self.files: tuple[str, ...] | None = FILES
        self.asked = 0

    def epoch_orders(self, earlier_epochs: int, workers: int, *, keeps_workers: bool) -> list[list[int]]:
        assert self.files is not None
        numbers = [*range(len(self.files))]
        return [numbers[turn:] + numbers[:turn] for turn in (earlier_epochs, earlier_epochs + 1)]


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

        monkeypatch.setattr(stream_watch, "Publication", published)
        monkeypatch.setattr(stream_watch, "shards_of", shards_of)
        monkeypatch.setattr(stream_watch, "count_skipped", lambda _: self.skipped)
        monkeypatch.setattr(stream_watch, "MountResolver", lambda: SimpleNamespace(mount_of=mount_of))
        monkeypatch.setattr(stream_watch, "read_listing", lambda _: DatasetListing((), ()))
        monkeypatch.setattr(stream_watch.opened_files, "opened_file", lambda *_: self.opened)
        loader = SimpleNamespace(dataset=self.dataset, num_workers=0, persistent_workers=False)
        self.stream = StreamWatch(loader, {"dataset": "Stream", "place": "train.py:3"})

    def epoch(self) -> None:
        self.stream.begin_epoch(object(), self.dataset)
        self.stream.record_draw([None], object(), 0, self.dataset)


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
    monkeypatch.setattr(job.dataset, "epoch_orders", lambda begun, workers, keeps_workers: asked.append(begun) or [])
    for _ in range(3):
        job.epoch()
    assert asked == [0]
    [published] = job.published
    assert (published.files, published.orders) == (FILES, {})


class OwnList(list[Any]):
    """A batch of the job's own class. Its code is not run."""

    def __len__(self) -> int:
        raise AssertionError

    def __getitem__(self, _: Any) -> Any:
        raise AssertionError

    def __iter__(self) -> Any:
        raise AssertionError


class OwnDict(dict[str, Any]):
    """As above."""

    def values(self) -> Any:
        raise AssertionError

    def __iter__(self) -> Any:
        raise AssertionError


class Encoding:
    """A batch that keeps its tensors in an attribute, as tokenizers' do."""

    def __init__(self, number: int) -> None:
        self.data = {"ids": torch.zeros(number, 7)}

    def __len__(self) -> int:
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


COLLATED: dict[str, Callable[[int], Any]] = {
    "samples": lambda number: [torch.zeros(10, 3)] * number,
    "pairs": lambda number: [(torch.zeros(4), 1)] * number,
    "texts": lambda number: ["text"] * number,
    "tensor": lambda number: torch.zeros(number, 10),
    "fields": lambda number: (torch.zeros(number, 10), torch.zeros(number)),
    "array": lambda number: numpy.zeros((number, 3)),
    "names": lambda number: {"image": torch.zeros(number, 3), "label": [0] * number},
    "own list": lambda number: OwnList([torch.zeros(3)] * number),
    "own fields": lambda number: OwnList([torch.zeros(number, 3), 4]),
    "own dict": lambda number: OwnDict(image=torch.zeros(number, 3)),
    "encoding": Encoding,
}


@pytest.mark.parametrize("collate", COLLATED.values(), ids=COLLATED)
def test_a_short_batch_is_counted_as_what_it_has(collate: Callable[[int], Any]) -> None:
    length = BatchLength(collate)
    assert [length.read_length(collate(number), 10) for number in (10, 10, 3, 10, 1)] == [10, 10, 3, 10, 1]


def test_a_batch_of_as_many_samples_as_fields_is_not_taken_for_a_full_one() -> None:
    length = BatchLength(COLLATED["fields"])
    assert [length.read_length(COLLATED["fields"](number), 2) for number in (2, 1)] == [2, 1]


@pytest.mark.parametrize(
    "sample",
    [1, 0.5, "text", b"bytes", torch.zeros(10), numpy.zeros(10), (torch.zeros(10), 1), ("a", "b"), {"a": [1, 2]}],
    ids=lambda one: type(one).__name__,
)
def test_torchs_own_batches_are_counted_from_the_first_one_on(sample: Any) -> None:
    length = BatchLength(default_collate)
    assert [length.read_length(default_collate([sample] * number), 10) for number in (3, 10, 1)] == [3, 10, 1]


class OwnTensor(torch.Tensor):
    """A tensor whose code might be the job's."""


def test_the_number_of_fields_is_not_taken_for_that_of_samples() -> None:
    fields = [OwnTensor(10, 3), OwnTensor(10)]
    assert BatchLength(default_collate).read_length(fields, 10) is None
    with _Mode():
        assert BatchLength(default_collate).read_length([torch.zeros(10), torch.zeros(10)], 10) is None


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "batch", [None, object(), 7, "text", {}, torch.zeros(()), numpy.float64(1)], ids=lambda one: type(one).__name__
)
def test_the_samples_of_a_batch_without_a_length_are_not_known(batch: Any) -> None:
    assert [BatchLength(collate).read_length(batch, 10) for collate in (default_collate, None)] == [None, None]


def test_the_samples_of_short_batches_are_not_known_before_a_full_one_has_come() -> None:
    length = BatchLength(None)
    assert [length.read_length(torch.zeros(number), 10) for number in (3, 10, 3)] == [None, 10, 3]
