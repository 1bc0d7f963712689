"""Orders computed without torch are torch's own."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from cachefs.errors import ConfigError
from cachefs.planning.sequences import sampler
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order

SEEDS = st.integers(-(2**63), 2**64 - 1001) | st.integers(0, 100)


def torch_permutation(size: int, seed: int) -> numpy.ndarray:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).numpy()


def permutation(size: int, seed: int) -> sampler.EpochOrder:
    return epoch_order(SamplerSpec(kind="torch-distributed", size=size, seed=seed), 0)


def test_every_small_size() -> None:
    """And sizes at which a generator of 624 words begins anew."""
    for size in (*range(1, 200), *range(600, 660), *range(1230, 1270)):
        assert numpy.array_equal(permutation(size, size), torch_permutation(size, size)), size


@pytest.mark.parametrize("size", [65_536, 1_000_003, 1_281_167, 2**22 + 1])
def test_large_sizes(size: int) -> None:
    order = permutation(size, 2**31 + size)
    assert order.dtype == numpy.uint32
    assert numpy.array_equal(order, torch_permutation(size, 2**31 + size))


@given(st.integers(1, 3000), SEEDS)
def test_python_and_c_shuffle_alike(size: int, seed: int) -> None:
    expected = torch_permutation(size, seed)
    assert numpy.array_equal(permutation(size, seed), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_shuffle", sampler._shuffle_in_python)
        assert numpy.array_equal(permutation(size, seed), expected)


def test_shuffle_is_compiled_here() -> None:
    assert sampler._shuffle is not sampler._shuffle_in_python, "install the package again: pip install -e ."
    assert sampler._shuffle_masked is not sampler._shuffle_masked_in_python


@given(st.integers(0, 3000), st.integers(0, 2**32 - 1), st.integers(300, 900))
def test_numpy_is_shuffled_as_by_numpy_itself(size: int, seed: int, at_once: int) -> None:
    expected = numpy.random.RandomState(seed).permutation(size).tolist()
    spec = SamplerSpec(kind="numpy", size=size, seed=seed)
    for shuffle in (sampler._shuffle_masked, sampler._shuffle_masked_in_python):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "_shuffle_masked", shuffle)
            patch.setattr(sampler, "_DRAWS_AT_ONCE", at_once)
            assert epoch_order(spec, 0).tolist() == expected


@pytest.mark.parametrize(("name", "more"), [("_shuffle", ()), ("_shuffle_masked", (2_999_999,))])
def test_other_threads_run_while_numbers_are_shuffled(name: str, more: tuple[int, ...]) -> None:
    """With numpy's own shuffle of 100 million, all clients of a daemon waited for half a minute."""
    draws = numpy.random.RandomState(1).randint(0, 2**32, size=6_000_000, dtype=numpy.uint32)
    started, done = threading.Event(), threading.Event()

    def shuffle() -> None:
        order = numpy.arange(3_000_000, dtype=numpy.uint32)
        started.set()
        getattr(sampler, name)(order, draws, *more)
        done.set()

    def seen_in_the_middle() -> bool:
        started.clear()
        done.clear()
        shuffling = pool.submit(shuffle)
        started.wait()
        in_the_middle = not done.is_set()
        shuffling.result()
        return in_the_middle

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to let others run
    try:
        with ThreadPoolExecutor(1) as pool:
            assert any(seen_in_the_middle() for _ in range(20))
    finally:
        sys.setswitchinterval(before)


def test_without_the_compiled_module_python_shuffles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cachefs.planning.sequences._shuffle", None)
    monkeypatch.delattr("cachefs.planning.sequences._shuffle")
    assert sampler._fastest_shuffles() == (sampler._shuffle_in_python, sampler._shuffle_masked_in_python)


@pytest.mark.parametrize(
    ("order", "draws", "error"),
    [
        (numpy.zeros(3, numpy.uint32), numpy.zeros(1, numpy.uint32), ValueError),
        (numpy.zeros(3, numpy.uint64), numpy.zeros(2, numpy.uint32), TypeError),
        (numpy.zeros(3, numpy.uint32), numpy.zeros(2, numpy.int32), TypeError),
        (numpy.zeros((2, 2), numpy.uint32), numpy.zeros(3, numpy.uint32), TypeError),
        (numpy.zeros(6, numpy.uint32)[::2], numpy.zeros(2, numpy.uint32), ValueError),
        (numpy.zeros(3, numpy.uint32).tobytes(), numpy.zeros(2, numpy.uint32), BufferError),
        ([0, 1, 2], numpy.zeros(2, numpy.uint32), TypeError),
        (numpy.zeros(3, numpy.uint32), numpy.zeros(2, ">u4"), TypeError),
    ],
)
def test_compiled_shuffle_refuses_what_it_would_read_wrongly(order: Any, draws: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        sampler._shuffle(order, draws)


@pytest.mark.parametrize(
    ("draws", "last", "error"),
    [
        (numpy.zeros(3, numpy.uint32), 3, ValueError),
        (numpy.zeros(3, numpy.uint32), -1, ValueError),
        (numpy.zeros(3, numpy.int32), 2, TypeError),
    ],
)
def test_compiled_numpy_shuffle_refuses_it_too(draws: Any, last: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        sampler._shuffle_masked(numpy.zeros(3, numpy.uint32), draws, last)


def test_hundreds_of_epochs_cost_no_more_than_their_permutations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asked for once, in order: the generator is moved on by one epoch each time."""
    sampler._states.cache_clear()
    skipped = 0
    skip = sampler.skip_draws

    def count(generator: numpy.random.RandomState, draws: int) -> None:
        nonlocal skipped
        skipped += draws
        skip(generator, draws)

    monkeypatch.setattr(sampler, "skip_draws", count)
    spec = SamplerSpec(kind="torch-random", size=10, seed=5, epochs=600)
    for epoch in range(600):
        epoch_order(spec, epoch)
    assert skipped == 599 * 2 * 9
    assert len(sampler._states("torch-random", 5, 10)) == sampler._STATES_KEPT


def test_a_late_epoch_can_be_asked_for_first() -> None:
    spec = SamplerSpec(kind="torch-random", size=3, seed=6, epochs=3000)
    generator = torch.Generator().manual_seed(6)
    for _ in range(2 * 2500):
        torch.randperm(3, generator=generator)
    assert epoch_order(spec, 2500).tolist() == torch.randperm(3, generator=generator).tolist()


@given(
    st.integers(1, 2000),
    SEEDS,
    st.integers(0, 1000),
    st.integers(1, 9) | st.integers(1, 5000),
    st.data(),
    st.booleans(),
    st.booleans(),
)
def test_distributed(
    size: int, seed: int, epoch: int, replicas: int, data: st.DataObject, shuffle: bool, drop_last: bool
) -> None:
    rank = data.draw(st.integers(0, replicas - 1))
    theirs = DistributedSampler(range(size), replicas, rank, shuffle, seed, drop_last)
    theirs.set_epoch(epoch)
    spec = SamplerSpec(
        kind="torch-distributed",
        size=size,
        seed=seed,
        epochs=1001,
        shuffle=shuffle,
        drop_last=drop_last,
        replicas=replicas,
        rank=rank,
    )
    assert epoch_order(spec, epoch).tolist() == list(theirs)


@given(st.integers(1, 300), SEEDS, st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_one_generator_goes_on_from_epoch_to_epoch(size: int, seed: int, asked: list[int]) -> None:
    theirs = RandomSampler(range(size), generator=torch.Generator().manual_seed(seed))
    epochs = [list(theirs) for _ in range(7)]
    spec = SamplerSpec(kind="torch-random", size=size, seed=seed, epochs=7)
    assert [epoch_order(spec, epoch).tolist() for epoch in asked] == [epochs[epoch] for epoch in asked]


@pytest.mark.parametrize(("size", "drop_last"), [(40, False), (40, True), (43, False), (43, True)])
@pytest.mark.parametrize(
    ("kind", "workers", "persistent"),
    [("torch-loader", 0, False), ("torch-loader", 2, False), ("torch-loader-persistent", 2, True)],
)
def test_generator_of_a_loader(kind: str, workers: int, persistent: bool, size: int, drop_last: bool) -> None:
    loader = DataLoader(
        range(size),
        batch_size=4,
        shuffle=True,
        drop_last=drop_last,
        num_workers=workers,
        persistent_workers=persistent,
        generator=torch.Generator().manual_seed(17),
    )
    spec = SamplerSpec(kind=kind, size=size, seed=17, epochs=3)
    for epoch in range(3):
        read = torch.cat(list(loader)).tolist()
        assert epoch_order(spec, epoch).tolist()[: len(read)] == read


@given(st.integers(0, 3000), st.integers(0, 2**32 - 1001), st.integers(0, 1000))
def test_numpy(size: int, seed: int, epoch: int) -> None:
    expected = numpy.random.RandomState(seed + epoch).permutation(size)
    assert numpy.array_equal(epoch_order(SamplerSpec(kind="numpy", size=size, seed=seed, epochs=1001), epoch), expected)


@pytest.mark.parametrize("kind", ["sequential", "torch-random", "torch-distributed", "numpy", "torch-loader"])
def test_without_shuffle_samples_come_by_number(kind: str) -> None:
    assert epoch_order(SamplerSpec(kind=kind, size=5, seed=3, shuffle=False), 2).tolist() == [0, 1, 2, 3, 4]
    assert epoch_order(SamplerSpec(kind=kind, size=0), 0).tolist() == []


@given(st.integers(0, 200), st.integers(1, 40), st.booleans())
def test_shares_of_all_ranks_cover_the_dataset(size: int, replicas: int, drop_last: bool) -> None:
    shares = [
        epoch_order(
            SamplerSpec(kind="torch-distributed", size=size, drop_last=drop_last, replicas=replicas, rank=rank), 0
        )
        for rank in range(replicas)
    ]
    assert len({len(share) for share in shares}) == 1
    seen = set(numpy.concatenate(shares).tolist())
    assert len(seen) == (size // replicas * replicas if drop_last else size)


def test_epochs_are_independent_of_the_thread_that_asks() -> None:
    def ask(epoch: int) -> list[int]:
        return epoch_order(SamplerSpec(kind="torch-random", size=5000, seed=99, epochs=24), epoch).tolist()

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, reversed(range(24))))
    sampler._states.cache_clear()
    assert together == [ask(epoch) for epoch in reversed(range(24))]


@pytest.mark.parametrize("kind", ["sequential", "torch-random", "torch-distributed", "numpy"])
def test_caller_may_change_the_order_it_got(kind: str) -> None:
    first = epoch_order(SamplerSpec(kind=kind, size=20, seed=4), 2)
    kept = first.copy()
    first[:] = 0
    assert numpy.array_equal(epoch_order(SamplerSpec(kind=kind, size=20, seed=4), 2), kept)


@pytest.mark.parametrize(
    ("spec", "epoch", "complaint"),
    [
        (SamplerSpec(kind="explicit", size=5), 0, "does not determine an order"),
        (SamplerSpec(kind="torch-shuffled", size=5), 0, "known: sequential, torch-random"),
        (SamplerSpec(kind="sequential", size=-1), 0, "not between"),
        (SamplerSpec(kind="sequential", size=2**32), 0, "not between"),
        (SamplerSpec(kind="torch-random", size=5), -1, "negative"),
        (SamplerSpec(kind="torch-distributed", size=5, replicas=2, rank=2), 0, "rank 2"),
        (SamplerSpec(kind="torch-distributed", size=5, replicas=0), 0, "rank 0"),
        (SamplerSpec(kind="torch-random", size=5, replicas=2), 0, "torch-distributed"),
        (SamplerSpec(kind="torch-random", size=5, seed=2**64), 0, "seed"),
        (SamplerSpec(kind="torch-distributed", size=5, seed=2**64 - 1), 1, "seed"),
        (SamplerSpec(kind="torch-distributed", size=sampler.TORCH_LIMIT), 0, "explicitly"),
        (SamplerSpec(kind="numpy", size=5, seed=2**32 - 1), 1, "numpy wants"),
    ],
)
def test_senseless_specs_are_refused(spec: SamplerSpec, epoch: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        epoch_order(spec, epoch)


def test_torch_is_not_needed() -> None:
    code = """
import sys
sys.modules["torch"] = None
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.planning.sequences.sampler import epoch_order
print(epoch_order(SamplerSpec(kind="torch-distributed", size=6, seed=1), 0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{torch_permutation(6, 1)}\n", done.stderr


def test_a_late_epoch_is_reached_at_once_and_those_near_it_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[int] = []
    really_skip = sampler.skip_draws

    def skip(generator: numpy.random.RandomState, draws: int) -> None:
        skipped.append(draws)
        really_skip(generator, draws)

    monkeypatch.setattr(sampler, "skip_draws", skip)
    spec = SamplerSpec(kind="torch-random", size=5, seed=977, epochs=40_000)
    late = epoch_order(spec, 20_000)
    assert skipped == [20_000 * 8]
    following = epoch_order(spec, 20_001)
    assert skipped[1:] == [8]
    assert (late.tolist(), following.tolist()) == (
        epoch_order(spec, 20_000).tolist(), epoch_order(spec, 20_001).tolist()
    )  # fmt: skip
    assert skipped[2:] == [0, 0]


def test_a_kind_is_explicit_or_its_order_is_computed() -> None:
    assert (*sampler._ORDERS, "explicit") == sampler.KINDS
