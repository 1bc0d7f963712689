"""A job whose clock stands still, as libraries for tests make it, keeps none of our budgets from ending.

Each budget is set to a nanosecond, so it is over at once by a clock that goes on, and never by one that does not.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from types import BuiltinFunctionType
from typing import Any

import pytest
import webdataset
from torch.utils.data import DataLoader, RandomSampler

import cachefs
from cachefs.hooks import webdataset as webdataset_hooks
from cachefs.hooks.order import foresee, prediction, remaining
from cachefs.hooks.order.foresee import SamplerOrder
from cachefs.hooks.order.prediction import OrderPrediction
from cachefs.publishing import channel, clock
from cachefs.publishing.files import listed
from cachefs.publishing.files.listed import read_listing

AT_ONCE = 1e-9
CLOCKS = [
    "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces all clocks of the module `time`, and all references to them in loaded modules of cachefs."""
    frozen: dict[Any, Any] = {time.sleep: lambda _: None}
    for name in CLOCKS:
        real = getattr(time, name)
        now = real(time.CLOCK_MONOTONIC) if name.startswith("clock_") else real()
        frozen[real] = lambda *_, now=now: now
    for module in [time, *(module for name, module in sys.modules.items() if name.startswith("cachefs"))]:
        for name, value in list(vars(module).items()):
            if type(value) is BuiltinFunctionType and value in frozen:
                monkeypatch.setattr(module, name, frozen[value])


def test_our_clocks_go_on_where_those_of_the_job_stand_still() -> None:
    assert time.monotonic() == time.monotonic()
    assert time.clock_gettime_ns(time.CLOCK_MONOTONIC) == time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for ours in (clock.monotonic, clock.monotonic_ns, clock.thread_time, clock.since_1970):
        begun = ours()
        while ours() == begun:
            pass
    clock.sleep(0)


def test_drawing_orders_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresee, "DRAWING_SECONDS", AT_ONCE)
    assert SamplerOrder(DataLoader(range(5), sampler=RandomSampler(range(5), num_samples=50))).foresee_orders() is None


def test_iterating_a_pure_sampler_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    @cachefs.pure_sampler
    class Slow:
        def __iter__(self) -> Iterator[int]:
            yield from range(1000)

    monkeypatch.setattr(foresee, "PURE_SECONDS", AT_ONCE)
    found = SamplerOrder(DataLoader(range(9), sampler=Slow())).foresee_orders()  # type: ignore[arg-type, call-overload]
    assert found is not None
    assert [one.tolist() for one in found] == [[0, 1]]


def test_reading_a_list_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remaining, "READ_SECONDS", AT_ONCE)
    found = remaining.read_numbers(list(range(1000)))
    assert len(found.samples) == 1
    assert not found.is_complete


def test_looking_for_a_list_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    real = prediction.samples_after

    def after(items: Any, *arguments: Any) -> Any:
        looked_at.append(len(items))
        return real(items, *arguments)

    lists = [list(range(100, 100 + size)) for size in range(20, 30)]
    monkeypatch.setattr(prediction, "SEARCH_SECONDS", AT_ONCE)
    monkeypatch.setattr(prediction, "samples_after", after)
    monkeypatch.setattr(prediction, "candidate_sequences", lambda *_: lists)
    found = OrderPrediction(())
    for numbers in ([1, 2, 3, 4], [5, 6, 7, 8]):
        found.check_drawn(numbers)
        assert found.predict_order(object(), 10) is None
    assert looked_at == [20]


def test_taking_columns_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dataset:
        def __init__(self) -> None:
            self.files, self.names = ["a/1", "b/2"], ["c/3", "d/4"]

    assert len(read_listing(Dataset()).take_columns(2)) == 2
    monkeypatch.setattr(listed, "COLUMNS_SECONDS", AT_ONCE)
    assert read_listing(Dataset()).take_columns(2) == {}


def test_computing_the_order_of_shards_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made = webdataset.WebDataset([f"/data/{number}.tar" for number in range(9)], shardshuffle=100, seed=1)
    shards = webdataset_hooks.shards_of(made)
    assert shards is not None
    assert len(shards.epoch_orders(0, 2, keeps_workers=False)) == 2
    monkeypatch.setattr(webdataset_hooks, "ORDER_SECONDS", AT_ONCE)
    assert shards.epoch_orders(0, 2, keeps_workers=False) == []


def test_waiting_for_a_helper_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was compiled, the job starts a child, which may stand still."""
    monkeypatch.setattr(channel, "START_SECONDS", 0)
    monkeypatch.setattr(subprocess, "_time", lambda: 0.0)
    with pytest.raises(OSError, match="does not start within 0 s"):
        channel._launch_child([sys.executable, "-c", "import signal; signal.pause()"], (), {})
