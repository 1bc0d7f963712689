"""Which files a dataset says its samples are."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from cachefs.publishing.files import sample_files as module
from cachefs.publishing.files.sample_files import listed_files

PATHS = ["/d/a", "/d/b", "/d/c"]


class Has(Dataset[int]):
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(PATHS)


@pytest.mark.parametrize(
    "attributes",
    [
        {"samples": [(path, 1) for path in PATHS]},
        {"imgs": [[path, "label", 3] for path in PATHS]},
        {"_image_files": [Path(path) for path in PATHS]},
        {"files": numpy.array(PATHS)},
        {"files": numpy.array(PATHS, dtype=object)},
        {"paths": tuple(PATHS)},
        {"samples": [1, 2, 3], "files": PATHS},
    ],
)
def test_lists_of_paths_are_understood(attributes: dict[str, Any]) -> None:
    assert listed_files(Has(**attributes)) == PATHS


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"samples": PATHS[:2]},
        {"samples": ["a", "b", "c"]},
        {"samples": [("/d/a", 1), ("/d/b", 1), 3]},
        {"samples": [("/d/a", 1), (), ("/d/b", 1)]},
        {"samples": ["/d/a", None, "/d/c"]},
        {"files": "/d/"},
        {"files": {0: "/d/a", 1: "/d/b", 2: "/d/c"}},
        {"samples": []},
        {"samples": [[], []]},
        {"images": numpy.zeros((3, 2))},
        {"images": numpy.array(["/d/a", 1, None], dtype=object)},
    ],
)
def test_what_is_no_list_of_paths_is_none(attributes: dict[str, Any]) -> None:
    assert listed_files(Has(**attributes)) is None


class Untouchable:
    """A dataset of which no code may be run, and whose array is too large to be looked at element by element."""

    images = numpy.broadcast_to(numpy.float32(0), (1 << 40, 3, 32, 32))
    imgs = numpy.broadcast_to(numpy.array("/d/a"), (1 << 40,)).reshape(1 << 20, -1)
    paths = range(1 << 40)

    @property
    def samples(self) -> list[str]:
        raise AssertionError("a property was run")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the attribute {name} was made")

    def __len__(self) -> int:
        raise AssertionError("nothing asks for the length of a dataset without a list")


@pytest.mark.parametrize("name", ["img_files", "samples", "something_else"])
def test_relative_paths_begin_where_they_are_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["train/a", "train/b", "test/c"]
    root = tmp_path / "root"
    for each in names:
        (root / each).parent.mkdir(parents=True, exist_ok=True)
        (root / each).touch()
    entries = [(each, 1) for each in names] if name == "samples" else names
    monkeypatch.chdir(tmp_path)
    assert listed_files(Has(**{name: entries})) is None
    assert listed_files(Has(**{name: entries}, root=str(root))) == [f"{root}/{each}" for each in names]
    monkeypatch.chdir(root)
    assert listed_files(Has(**{name: entries})) == names


def test_of_what_is_no_list_nothing_is_touched() -> None:
    assert listed_files(Untouchable()) is None


def test_no_list_is_taken_of_which_some_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [(f"/d/{number}", 0) for number in range(1000)]
    asked: list[int] = []
    looked_at: list[int] = []
    take = module.take_values

    def taken(entries: Any, *arguments: Any) -> Any:
        looked_at.append(len(entries))
        return take(entries, *arguments)

    def is_wanted(some: Sequence[str]) -> bool:
        asked.append(len(some))
        return False

    monkeypatch.setattr(module, "take_values", taken)
    assert listed_files(Has(samples=paths), 1000, is_wanted=is_wanted) is None
    assert asked == looked_at
    assert sum(looked_at) <= 2 * module.PROBES


def test_a_list_that_takes_too_long_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "column_deadline", lambda: -1.0)
    assert listed_files(Has(samples=PATHS)) is None


class List(list[str]):
    """A list with code of its own."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the code of a list was run")


def test_a_length_that_is_known_is_not_asked_for() -> None:
    dataset = Untouchable()
    dataset.__dict__["files"] = PATHS
    assert listed_files(dataset, 3) == PATHS
    assert listed_files(dataset, 4) is None
    dataset.__dict__["files"] = List(PATHS)
    assert listed_files(dataset, 3) is None


def test_parts_and_concatenations_are_seen_through() -> None:
    part = Subset(Has(samples=PATHS), [2, 0])
    both = ConcatDataset([part, Has(files=PATHS)])
    assert listed_files(Subset(both, [0, 2])) == ["/d/c", "/d/a"]
    assert listed_files(ConcatDataset([part, Has()])) is None


@dataclass
class Image:
    """As datasets.Image."""


@dataclass
class Column:
    """As a column of pyarrow: here of structs, or of what is in them."""

    values: list[Any]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def null_count(self) -> int:
        return self.values.count(None)

    def to_pylist(self) -> list[Any]:
        return self.values


@dataclass
class Table:
    values: list[Any]

    def column(self, name: str | int) -> Column:
        return Column(self.values)


class HuggingFace:
    """As datasets.Dataset, of which this is all that is used."""

    def __init__(self, rows: list[dict[str, Any]], indices: list[int] | None) -> None:
        self.features = {"label": object(), "image": Image()}
        self.data = Table(rows)
        self._indices = None if indices is None else Table(indices)


@pytest.mark.parametrize(
    ("content", "indices", "expected"),
    [(None, None, PATHS), (None, [2, 0], ["/d/c", "/d/a"]), (b"...", None, None)],
)
def test_hugging_face_datasets_refer_to_files_or_hold_them(
    monkeypatch: pytest.MonkeyPatch, content: bytes | None, indices: list[int] | None, expected: list[str] | None
) -> None:
    def struct_field(column: Column, name: str) -> Column:
        return Column([value[name] for value in column.values])

    monkeypatch.setitem(sys.modules, "datasets.arrow_dataset", SimpleNamespace(Dataset=HuggingFace))
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.compute", SimpleNamespace(struct_field=struct_field))
    assert listed_files(HuggingFace([{"path": path, "bytes": content} for path in PATHS], indices)) == expected


class OwnIndices(Subset[int]):
    """Its indices are computed when they are asked for."""

    def __init__(self, dataset: Dataset[int]) -> None:
        self.dataset = dataset

    @property
    def indices(self) -> Any:  # type: ignore[override]
        raise AssertionError("the job's property was run")


class OwnSequence:
    def __iter__(self) -> Any:
        raise AssertionError("the job's code was run")

    def __len__(self) -> int:
        raise AssertionError("the job's code was run")


class OwnText(str):
    def __str__(self) -> str:
        raise AssertionError("the job's code was run")


def test_no_code_of_the_job_is_run() -> None:
    whole = Has(paths=PATHS)
    assert listed_files(OwnIndices(whole)) is None
    assert listed_files(Subset(whole, OwnSequence())) is None  # type: ignore[arg-type]
    assert listed_files(Has(paths=[OwnText(path) for path in PATHS])) is None


@pytest.mark.parametrize(
    "indices", [[2, 0], (2, 0), range(2, -1, -2), numpy.array([2, 0]), torch.tensor([2, 0]), [numpy.int64(2), 0]]
)
def test_indices_of_a_subset(indices: Any) -> None:
    assert listed_files(Subset(Has(paths=PATHS), indices)) == ["/d/c", "/d/a"]
