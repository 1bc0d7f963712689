"""What is published of an epoch, and when, as a loader draws it."""

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from cachefs import pure_sampler
from cachefs.hooks import loader_watch
from cachefs.hooks.loader_watch import LoaderWatch
from cachefs.hooks.order import foresee, prediction
from cachefs.hooks.order.foresee import SamplerOrder
from cachefs.publishing.files.listed import DatasetListing

SIZE, BATCH = 40, 4
STEPS = (7, 11)
ORDERS = [[index * step % SIZE for index in range(SIZE)] for step in STEPS]

# What a dataset lists that lists nothing.
NOTHING = DatasetListing((), ())


class Recorder:
    """Stands for a Publication."""

    slot = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.orders: dict[int, list[int]] = {}
        self.parts: dict[int, tuple[int, int]] = {}
        self.places: list[tuple[int, int]] = []
        self.notes: list[str] = []

    def order(self, number: int, samples: Any, part: Any) -> None:
        self.parts[number] = part
        self.orders[number] = [int(one) for one in samples]

    def progress(self, number: int, position: int) -> None:
        self.places.append((number, position))

    def publish_note(self, unknown: str) -> None:
        self.notes.append(unknown)

    def record_end(self) -> None:
        pass


class Sampler:
    """Gives one by one what only it knows."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        for index in range(SIZE):
            yield index * STEPS[self.epoch - 1] % SIZE


class DatasetListing(Sampler):
    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__()))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(loader_watch, "Publication", lambda *_, **__: recorder)
    monkeypatch.setattr(loader_watch, "PART_SECONDS", 0.0)
    return recorder


def go_through(loader: Any, watched: LoaderWatch, ahead: int) -> None:
    """As torch does it: *ahead* batches are drawn before they are read."""
    indices = iter(loader.batch_sampler)
    watched.begin_epoch(iter(()), None)
    drawn = []
    for batch in indices:
        watched.record_delivered(BATCH * max(0, len(drawn) - ahead))
        drawn.append(batch)
        watched.record_draw(batch, indices, BATCH * max(0, len(drawn) - 1 - ahead), None)
    for left in range(ahead, 0, -1):
        watched.record_delivered(SIZE - BATCH * left, at_end=True)
    watched.record_delivered(SIZE, at_end=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_follow_each_other_and_are_all_that_is_drawn(record: Recorder, workers: int) -> None:
    loader: Any = DataLoader(range(SIZE), BATCH, sampler=Sampler(), num_workers=workers)  # type: ignore[arg-type]
    watched = LoaderWatch(loader, SamplerOrder(loader), {}, ["/m/a"] * SIZE, NOTHING)
    for _ in range(2):
        go_through(loader, watched, 2 * workers)
    assert [one for number in sorted(record.orders) for one in record.orders[number]] == [
        *ORDERS[0], *ORDERS[1],
    ]  # fmt: skip
    assert list(record.orders) == sorted(record.orders)
    assert len(record.orders) > 4
    assert record.places == sorted(record.places)
    assert all(position <= len(record.orders[number]) for number, position in record.places)


def test_an_epoch_that_lies_ready_is_published_once(record: Recorder) -> None:
    loader: Any = DataLoader(range(SIZE), BATCH, sampler=DatasetListing(), num_workers=1)  # type: ignore[arg-type]
    watched = LoaderWatch(loader, SamplerOrder(loader), {}, ["/m/a"] * SIZE, NOTHING)
    for _ in range(2):
        go_through(loader, watched, 2)
    assert record.orders == dict(enumerate(ORDERS))
    assert record.places[-1] == (1, SIZE)


def test_an_order_that_does_not_come_as_foreseen_is_replaced(record: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = DataLoader(range(SIZE), BATCH, shuffle=True)  # type: ignore[arg-type]
    ours = SamplerOrder(loader)
    found = ours.foresee_orders()
    assert found is not None
    monkeypatch.setattr(ours, "foresee_orders", lambda: [found[0][::-1].copy()])
    watched = LoaderWatch(loader, ours, {}, ["/m/a"] * SIZE, NOTHING)
    go_through(loader, watched, 0)
    assert record.orders == {0: found[0].tolist()}


def test_epochs_ahead_are_published_once_and_replaced_where_they_turn_out_to_be_wrong(
    record: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader: Any = DataLoader(range(SIZE), BATCH, sampler=SequentialSampler(range(SIZE)))  # type: ignore[arg-type]
    ours = SamplerOrder(loader)
    epochs = [numpy.roll(numpy.arange(SIZE), epoch) for epoch in range(9)]
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(
        LoaderWatch, "_publish_order", lambda watched, number, samples, part: said.append((number, int(samples[0])))
    )
    monkeypatch.setattr(SamplerOrder, "has_own_generator", True)
    watched = LoaderWatch(loader, ours, {}, ["/m/a"] * SIZE, NOTHING)

    def begin(*orders: int) -> list[tuple[int, int]]:
        said.clear()
        monkeypatch.setattr(ours, "foresee_orders", lambda: [epochs[one] for one in orders])
        watched.begin_epoch(iter(()), None)
        return [(number, -first % SIZE) for number, first in said]

    assert begin(0, 1, 2) == [(0, 0), (1, 1), (2, 2)]
    assert begin(1, 2, 3) == [(3, 3)]
    assert begin(5, 6, 7) == [(2, 5), (3, 6)], "what is known to be wrong is replaced, and no more is guessed"
    assert begin(6, 7, 8) == [(3, 6), (4, 7), (5, 8)]
    assert begin(7, 8) == []


def test_what_a_pure_sampler_gives_behind_its_beginning_is_published_as_it_is_drawn(
    record: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foresee, "MAX_COST", 17)
    sampler: Any = pure_sampler(type("Pure", (Sampler,), {"epoch": 0}))()
    loader: Any = DataLoader(range(SIZE), BATCH, sampler=sampler)  # type: ignore[arg-type]
    watched = LoaderWatch(loader, SamplerOrder(loader), {}, ["/m/a"] * SIZE, NOTHING)
    watched.begin_epoch(iter(()), None)
    assert record.orders == {0: ORDERS[0][:17]}
    watched.record_draw(ORDERS[0][:BATCH], iter(()), 0, None)
    for start in range(BATCH, SIZE, BATCH):
        watched.record_delivered(start)
        watched.record_draw(ORDERS[0][start : start + BATCH], iter(()), start, None)
    watched.record_delivered(SIZE, at_end=True)
    assert [one for number in sorted(record.orders) for one in record.orders[number]] == ORDERS[0]


class Going:
    """Goes through a list that it keeps; at *turns*, it goes on elsewhere than the list does."""

    def __init__(self, turns: int = SIZE) -> None:
        self.order = numpy.random.default_rng(3).permutation(SIZE)
        self.turns = turns

    def __iter__(self) -> Iterator[int]:
        for place in range(SIZE):
            yield int(self.order[place if place < self.turns else SIZE - 1 - (place - self.turns)])


def test_a_list_that_a_sampler_goes_through_is_published_further_and_further(
    record: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "GROWTH", 2)
    loader: Any = DataLoader(range(SIZE), BATCH, sampler=Going())  # type: ignore[arg-type]
    watched = LoaderWatch(loader, SamplerOrder(loader), {}, ["/m/a"] * SIZE, NOTHING)
    go_through(loader, watched, 0)
    expected = loader.sampler.order.tolist()
    assert [one for number in sorted(record.orders) for one in record.orders[number]] == expected
    assert [len(record.orders[number]) for number in sorted(record.orders)] == [12, 8, 16, 4]
    last = max(record.orders)
    go_through(loader, watched, 0)
    assert [record.orders[number] for number in record.orders if number > last] == [expected], (
        "the last guess was right"
    )


@pytest.mark.parametrize("turns", range(BATCH, SIZE, 3))
def test_a_guess_is_taken_back_where_other_samples_come(record: Recorder, turns: int) -> None:
    loader: Any = DataLoader(range(SIZE), BATCH, sampler=Going(turns))  # type: ignore[arg-type]
    watched = LoaderWatch(loader, SamplerOrder(loader), {}, ["/m/a"] * SIZE, NOTHING)
    for _ in range(4):
        record.orders.clear()
        go_through(loader, watched, 0)
        published = [one for number in sorted(record.orders) for one in record.orders[number]]
        assert published == list(loader.sampler), "in the end what came is what was published"


class Repeating:
    """Goes through a batch sampler again and again, as loaders do that never end their workers."""

    def __init__(self, sampler: Any, *, delegates: bool) -> None:
        self.sampler = sampler
        self.delegates = delegates

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            if self.delegates:
                yield from iter(self.sampler)
            else:
                for batch in self.sampler:  # noqa: UP028
                    yield batch


@pytest.mark.parametrize("delegates", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_an_epoch_of_a_sampler_without_an_end_is_as_long_as_its_batch_sampler(
    record: Recorder, delegates: bool, shuffled: bool
) -> None:
    samples: Any = RandomSampler(range(SIZE)) if shuffled else SequentialSampler(range(SIZE))
    repeating: Any = Repeating(BatchSampler(samples, BATCH, drop_last=False), delegates=delegates)
    loader: Any = DataLoader(range(SIZE), batch_sampler=repeating)  # type: ignore[arg-type]
    watched = LoaderWatch(loader, SamplerOrder(loader), {}, ["/m/a"] * SIZE, NOTHING)
    indices = iter(repeating)
    watched.begin_epoch(indices, None)
    drawn: list[list[int]] = []
    epochs = 50
    for number in range(epochs * SIZE // BATCH):
        watched.record_delivered(BATCH * number)
        drawn.append(next(indices))
        watched.record_draw(drawn[-1], indices, BATCH * number, None)
        published = sum(map(len, record.orders.values()))
        assert BATCH * len(drawn) <= published <= SIZE * -(-BATCH * len(drawn) // SIZE), "never beyond an epoch"
        assert len(watched._parts) <= 2
    said = [one for number in sorted(record.orders) for one in record.orders[number]]
    assert said == [one for batch in drawn for one in batch]
    assert {epoch for epoch, _ in record.parts.values()} == set(range(epochs))
    for number, (epoch, before) in record.parts.items():
        assert 0 <= before < before + len(record.orders[number]) <= SIZE
        assert drawn[(epoch * SIZE + before) // BATCH][0] == record.orders[number][0]


def test_parts_are_counted_as_parts_of_their_epoch(record: Recorder) -> None:
    loader: Any = DataLoader(range(SIZE), BATCH, sampler=Sampler(), num_workers=2)  # type: ignore[arg-type]
    watched = LoaderWatch(loader, SamplerOrder(loader), {}, ["/m/a"] * SIZE, NOTHING)
    for _ in range(2):
        go_through(loader, watched, 4)
    counted = [0, 0]
    for number in sorted(record.orders):
        epoch, before = record.parts[number]
        assert before == counted[epoch]
        counted[epoch] += len(record.orders[number])
    assert counted == [SIZE, SIZE]
    assert max(record.orders) > 1, "there are more parts than epochs"


class Unruly:
    """Nobody knows what comes next."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        return (self.random.randrange(SIZE) for _ in range(SIZE))


@pytest.mark.parametrize(
    ("sampler", "workers", "epochs", "expected"),
    [
        (Unruly, 0, 3, []),  # too early to tell
        (Unruly, 0, 5, ["order"]),  # of epochs with ten batches
        (Unruly, 2, 20, []),  # all batches are drawn before one is read
        (Going, 0, 20, []),
        (lambda: DatasetListing(), 0, 2, []),
        (lambda: SequentialSampler(range(SIZE)), 0, 20, []),
    ],
)
def test_what_is_said_of_an_order_does_not_depend_on_how_long_epochs_are(
    record: Recorder, sampler: Any, workers: int, epochs: int, expected: list[str]
) -> None:
    ahead: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 5 if workers else None}
    loader: Any = DataLoader(range(SIZE), BATCH, sampler=sampler(), **ahead)  # type: ignore[arg-type]
    watched = LoaderWatch(loader, SamplerOrder(loader), {}, ["/m/a"] * SIZE, NOTHING)
    for _ in range(epochs):
        go_through(loader, watched, 5 * workers)
    assert [one for one in record.notes if one] == expected
