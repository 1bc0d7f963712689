"""How long a dataset is, is read without running its code."""

from collections import OrderedDict, deque
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from cachefs.publishing.files.listed import read_listing
from cachefs.publishing.files.sample_files import listed_files
from cachefs.publishing.job_objects import length_of

ROWS = [1, 2, 3]


class Inner:
    rows = (5, 6)


class Base:
    """Has its samples in an attribute, and counts how often its code is run."""

    run = 0

    def __init__(self) -> None:
        self.samples = [1, 2, 3, 4]
        self.inner = Inner()
        self.count = 9


class OfAttribute(Base):
    def __len__(self) -> int:
        return len(self.samples)


class OfInner(Base):
    def __len__(self) -> int:
        return len(self.inner.rows)


class OfNumber(Base):
    def __len__(self) -> int:
        return self.count


class OfDefault(Base):
    size = 5

    def __len__(self) -> int:
        return self.size


class OfGlobal(Base):
    def __len__(self) -> int:
        return len(ROWS)


class Calculated(Base):
    def __len__(self) -> int:
        return len(self.samples) * self.count // 2 - 1


class OfDataset(Base):
    def __init__(self) -> None:
        self.dataset = OfAttribute()

    def __len__(self) -> int:
        return len(self.dataset)


class Slotted:
    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows = [1, 2]

    def __len__(self) -> int:
        return len(self.rows)


class Plain(list[int]):
    """A list of the job's own that changes nothing."""


READ: list[tuple[Any, int]] = [
    ([1, 2], 2), ((1,), 1), ({1: 1}, 1), (OrderedDict(), 0), (range(10**12), 10**12), (deque([1]), 1), ({1, 2}, 2),
    (numpy.zeros((3, 4)), 3), (torch.zeros(6, 2), 6), (Plain([1, 2, 3]), 3), (OfAttribute(), 4), (OfInner(), 2),
    (OfNumber(), 9), (OfDefault(), 5), (OfGlobal(), 3), (Calculated(), 17), (OfDataset(), 4), (Slotted(), 2),
    (Subset(OfAttribute(), [3, 1, 0]), 3), (ConcatDataset([OfAttribute(), OfNumber()]), 13),  # type: ignore[arg-type]
    (TensorDataset(torch.zeros(7, 2)), 7), (TensorDataset(torch.zeros(0)), 0),
]  # fmt: skip


@pytest.mark.parametrize(("thing", "length"), READ)
def test_the_length_is_read(thing: Any, length: int) -> None:
    assert length_of(thing) == len(thing) == length


class Counting(Base):
    def __len__(self) -> int:
        Base.run += 1
        return 4


class Property(Base):
    @property
    def size(self) -> int:
        Base.run += 1
        return 4

    def __len__(self) -> int:
        return self.size


class OfCounting(Base):
    def __init__(self) -> None:
        self.samples = Counting()  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.samples)


class Raising(Base):
    def __len__(self) -> int:
        Base.run += 1
        raise NotImplementedError


class Looking(Base):
    def __getattribute__(self, name: str) -> Any:
        Base.run += name == "samples"
        return object.__getattribute__(self, name)

    def __len__(self) -> int:
        return len(self.samples)


class Choosing(Base):
    def __len__(self) -> int:
        return len(self.samples) if self.count else 0


class Own(list[int]):
    def __len__(self) -> int:
        Base.run += 1
        return 4


class Lacking(Base):
    def __len__(self) -> int:
        return len(self.nothing)  # type: ignore[attr-defined]


class Dividing(Base):
    def __len__(self) -> int:
        return self.count // 0


class Itself(Base):
    def __len__(self) -> int:
        return len(self)


class Without(Base):
    """Has none."""


UNKNOWN: list[Any] = [
    Counting(), Property(), OfCounting(), Raising(), Looking(), Choosing(), Own(), Lacking(), Dividing(), Itself(),
    Without(), 3, None, numpy.int64(3), numpy.array(3), torch.tensor(3), iter([]), Subset(Counting(), Own([1])),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize("thing", UNKNOWN)
def test_no_code_of_the_job_is_run_for_it(thing: Any) -> None:
    Base.run = 0
    assert length_of(thing) is None
    assert listed_files(thing) is None
    assert Base.run == 0


PATHS = ["/d/a", "/d/b", "/d/c"]


@pytest.mark.parametrize(
    "dataset",
    [
        PATHS, tuple(PATHS), dict(enumerate(PATHS)), {2: "/d/c", 0: "/d/a", 1: "/d/b"}, numpy.array(PATHS),
        [(path, 1) for path in PATHS],
    ],
)  # fmt: skip
def test_a_container_is_a_dataset_that_lists_its_files(dataset: Any) -> None:
    assert listed_files(dataset) == PATHS


@pytest.mark.parametrize("dataset", [{1: "/d/a", 2: "/d/b"}, {"a": "/d/a"}, range(3), [1, 2, 3]])
def test_a_container_of_something_else_lists_none(dataset: Any) -> None:
    assert listed_files(dataset) is None


def test_a_list_of_rows_is_columns() -> None:
    columns = read_listing([{"path": path, "label": number} for number, path in enumerate(PATHS)]).take_columns(3)
    assert list(columns) == ["items.path", "items.label"]
    assert columns["items.path"] == PATHS
