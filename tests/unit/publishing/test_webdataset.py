"""The order of a WebDataset's shards is that in which its workers open them."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

from cachefs.hooks import webdataset
from cachefs.hooks.webdataset import shards_of

URLS = [f"/data/train-{number:03}.tar" for number in range(23)]
MADE = {
    "as listed": lambda seed: wds.WebDataset(URLS, shardshuffle=False),
    "shuffled": lambda seed: wds.WebDataset(URLS, shardshuffle=100, seed=seed),
    "in a small buffer": lambda seed: wds.WebDataset(URLS, shardshuffle=5, seed=seed),
    "anew in each epoch": lambda seed: wds.WebDataset(URLS, shardshuffle=100, detshuffle=True, seed=seed),
    "by node": lambda seed: wds.WebDataset(URLS, shardshuffle=9, seed=seed, nodesplitter=wds.split_by_node),
    "a list that is shuffled": lambda seed: wds.DataPipeline(
        wds.SimpleShardList(URLS, seed=seed), wds.split_by_worker, wds.tarfile_to_samples()
    ),
    "twice": lambda seed: wds.WebDataset(URLS, shardshuffle=100, detshuffle=True, seed=seed).repeat(2),
}  # fmt: skip


def opened(dataset: Any, workers: int, worker: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that the library's own stages give this worker."""
    monkeypatch.setenv("WORKER", str(worker))
    monkeypatch.setenv("NUM_WORKERS", str(workers))
    last = next(number for number, stage in enumerate(dataset.pipeline) if is_opener(stage))
    before = wds.DataPipeline(*dataset.pipeline[:last])
    before.repetitions = dataset.repetitions
    return [sample["url"] for sample in before]


def is_opener(stage: Any) -> bool:
    return (
        type(stage).__name__ in ("StreamingOpen", "FileCache")
        or getattr(stage, "f", None) is wds.tariterators.tarfile_samples
    )


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("ahead", [0, 2])
def test_it_is_the_order_in_which_workers_open_them(
    name: str, workers: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = MADE[name](7)
    before = pickle.dumps(dataset)
    shards = shards_of(dataset)
    assert shards is not None
    order = [shards.files[number] for number in shards.epoch_order(workers, ahead)]
    assert pickle.dumps(dataset) == before
    each = []
    for worker in range(max(1, workers)):
        own = pickle.loads(before)
        for _ in range(ahead):
            opened(own, max(1, workers), worker, monkeypatch)
        each.append(opened(own, max(1, workers), worker, monkeypatch))
    passes = 2 if name == "twice" else 1
    assert sorted(order) == sorted(passes * URLS)
    for one in each:  # what a worker opens is in the order as it opens it
        mine = [path for path in order if path in set(one)]
        assert mine == one
    firsts = {order[number] for number in range(max(1, workers))}
    assert firsts == {one[0] for one in each}


def test_what_does_not_follow_from_the_pipeline_is_not_known() -> None:
    def own(source: Any) -> Any:
        yield from source

    class Own(wds.WebDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return iter(())

    assert shards_of(wds.WebDataset(URLS, resampled=True)) is None
    assert shards_of(wds.WebDataset(URLS, shardshuffle=False, workersplitter=own)) is None
    assert shards_of(wds.WebDataset(["pipe:cat x.tar"], shardshuffle=False)) is None
    assert shards_of(wds.WebDataset(["https://a/b.tar"], shardshuffle=False)) is None
    assert shards_of(Own(URLS, shardshuffle=False)) is None
    assert shards_of(wds.DataPipeline(wds.SimpleShardList(URLS), wds.shuffle(10), wds.tarfile_to_samples())) is None
    assert shards_of(object()) is None


def test_paths_are_those_that_the_library_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shards = shards_of(wds.WebDataset(["a.tar", "file:/b.tar", "file:///c.tar"], shardshuffle=False))
    assert shards is not None
    assert shards.files == (str(tmp_path / "a.tar"), "/b.tar", "/c.tar")


@pytest.mark.parametrize("workers", [0, 1, 16])
def test_what_all_workers_share_is_computed_once(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = wds.DataPipeline(
        wds.SimpleShardList(URLS), wds.detshuffle(100, seed=1), wds.split_by_worker, wds.tarfile_to_samples()
    ).repeat(2)
    shards = shards_of(dataset)
    assert shards is not None
    run = wds.filters.detshuffle.run
    runs: list[int] = []
    monkeypatch.setattr(wds.filters.detshuffle, "run", lambda self, source: runs.append(1) or run(self, source))
    first, following = shards.epoch_orders(0, workers, keeps_workers=False)
    assert len(runs) == (2 if workers else 4), "one for each pass; workers begin the next epoch as this one"
    assert sorted(first) == sorted(following) == sorted([*range(len(URLS))] * 2)


def test_an_order_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_of(wds.WebDataset(URLS, shardshuffle=100, detshuffle=True, seed=1))
    assert shards is not None
    monkeypatch.setattr(webdataset, "ORDER_SECONDS", -1.0)
    assert shards.epoch_orders(0, 4, keeps_workers=True) == []


def test_workers_that_all_read_all_shards_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_of(wds.DataPipeline(wds.SimpleShardList(URLS), wds.tarfile_to_samples()))
    assert shards is not None
    assert len(shards.epoch_order(4)) == 4 * len(URLS)
    monkeypatch.setattr(webdataset, "MAX_SHARDS", 4 * len(URLS) - 1)
    assert shards.epoch_orders(0, 4, keeps_workers=False) == []


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 7))
def test_no_shard_is_lost(seed: int, count: int, workers: int) -> None:
    urls = [f"/data/{number}.tar" for number in range(count)]
    shards = shards_of(wds.WebDataset(urls, shardshuffle=10, detshuffle=True, seed=seed))
    assert shards is not None
    assert sorted(shards.epoch_order(workers)) == list(range(count))
