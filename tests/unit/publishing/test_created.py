"""In which line a DataLoader was made."""

import sys
from typing import Any

import pytest
import torch.utils.data.dataloader as torch_loader
from torch.utils.data import DataLoader, Dataset

from cachefs.hooks import creation_site, loader
from cachefs.publishing.page import Stopwatch


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class OwnLoader(DataLoader[int]):
    def __init__(self, dataset: Dataset[int]) -> None:
        super().__init__(dataset, batch_size=2)


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    method = torch_loader.DataLoader.check_worker_number_rationality
    monkeypatch.setattr(
        torch_loader.DataLoader, "check_worker_number_rationality", creation_site.CreationDescriptor(method)
    )


def line() -> int:
    return sys._getframe(1).f_lineno


def make() -> Any:
    return DataLoader(Numbers())


def test_the_line_that_has_made_it_comes_first() -> None:
    loader, here = DataLoader(Numbers()), line()
    assert creation_site.site_of(loader)[0] == f"test_created.py:{here}"


def test_a_loader_of_ones_own_class_is_made_where_that_is_called() -> None:
    loader, here = OwnLoader(Numbers()), line()
    assert creation_site.site_of(loader)[0] == f"test_created.py:{here}"


def test_a_function_that_makes_loaders_is_told_apart_by_who_calls_it() -> None:
    one, first = make(), line()
    other, second = make(), line()
    assert creation_site.site_of(one)[:2] == (creation_site.site_of(other)[0], f"test_created.py:{first}")
    assert creation_site.site_of(other)[1] == f"test_created.py:{second}"


def test_going_through_it_makes_no_other_place() -> None:
    loader, here = DataLoader(Numbers(), num_workers=1), line()
    assert sorted(int(batch) for batch in loader) == [0, 1, 2, 3]
    assert creation_site.site_of(loader)[0] == f"test_created.py:{here}"


def test_a_loader_that_is_gone_is_forgotten() -> None:
    before = len(creation_site._sites)
    loader = DataLoader(Numbers())
    assert len(creation_site._sites) == before + 1
    del loader
    assert len(creation_site._sites) == before
    assert creation_site.site_of(object()) == ()


class Watched:
    """As much of a watch as has a stopwatch."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()


def test_what_is_kept_of_lines_that_make_loaders_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_stopwatches", {})
    places: dict[int, tuple[str, ...]] = {}
    monkeypatch.setattr(creation_site, "site_of", lambda made: places[id(made)])
    alive = []
    for number in range(2 * loader.MAX_STOPWATCHES):
        made = make()
        alive.append(made)
        places[id(made)] = ("train.py:1", f"main.py:{number}")
        named = loader._identifying_fields(made)
        assert named["place"] == ("train.py:1" if not number else f"train.py:1 from main.py:{number}")
        loader._with_stopwatch(Watched(), made, named)  # type: ignore[type-var]
    assert len(loader._stopwatches) == loader.MAX_STOPWATCHES
