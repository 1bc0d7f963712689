"""Which files a dataset says its samples are."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from cachefs.publishing.samples import listed_files

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
    ],
)
def test_what_is_no_list_of_paths_is_none(attributes: dict[str, Any]) -> None:
    assert listed_files(Has(**attributes)) is None


def test_parts_and_concatenations_are_seen_through() -> None:
    part = Subset(Has(samples=PATHS), [2, 0])
    both = ConcatDataset([part, Has(files=PATHS)])
    assert listed_files(Subset(both, [0, 2])) == ["/d/c", "/d/a"]
    assert listed_files(ConcatDataset([part, Has()])) is None


@dataclass
class Image:
    """As datasets.Image."""

    decode: bool = True


@dataclass
class HuggingFace:
    """As datasets.Dataset: rows whose image is decoded unless the column is cast."""

    rows: list[dict[str, Any]]
    features: dict[str, Any] = field(default_factory=lambda: {"label": object(), "image": Image()})

    def cast_column(self, name: str, feature: Image) -> dict[str, list[dict[str, Any]]]:
        assert not feature.decode
        return {name: self.rows}


@pytest.mark.parametrize(("content", "expected"), [(None, PATHS), (b"...", None)])
def test_hugging_face_datasets_refer_to_files_or_hold_them(
    monkeypatch: pytest.MonkeyPatch, content: bytes | None, expected: list[str] | None
) -> None:
    class Module:
        Dataset = HuggingFace

    monkeypatch.setitem(__import__("sys").modules, "datasets.arrow_dataset", Module)
    assert listed_files(HuggingFace([{"path": path, "bytes": content} for path in PATHS])) == expected
