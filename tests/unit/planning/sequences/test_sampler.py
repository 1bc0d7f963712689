"""Orders computed without torch are torch's own."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from cachefs.errors import ConfigError
from cachefs.job_messages import SamplerSpec
from cachefs.planning.sequences import sampler
from cachefs.planning.sequences.sampler import epoch_order

SEEDS = st.integers(-(2**63), 2**64 - 1001) | st.integers(0, 100)


def torch_permutation(size: int, seed: int) -> numpy.ndarray:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).numpy()


def permutation(size: int, seed: int) -> sampler.Order:
    return epoch_order(SamplerSpec("torch-distributed", size, seed), 0)


def test_every_small_size() -> None:
    for size in range(1, 1500):
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
    spec = SamplerSpec("torch-distributed", size, seed, 1001, shuffle, drop_last, replicas, rank)
    assert epoch_order(spec, epoch).tolist() == list(theirs)


@given(st.integers(1, 300), SEEDS, st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_one_generator_goes_on_from_epoch_to_epoch(size: int, seed: int, asked: list[int]) -> None:
    theirs = RandomSampler(range(size), generator=torch.Generator().manual_seed(seed))
    epochs = [list(theirs) for _ in range(7)]
    spec = SamplerSpec("torch-random", size, seed, epochs=7)
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
    spec = SamplerSpec(kind, size, 17, epochs=3)
    for epoch in range(3):
        read = torch.cat(list(loader)).tolist()
        assert epoch_order(spec, epoch).tolist()[: len(read)] == read


@given(st.integers(0, 3000), st.integers(0, 2**32 - 1001), st.integers(0, 1000))
def test_numpy(size: int, seed: int, epoch: int) -> None:
    expected = numpy.random.RandomState(seed + epoch).permutation(size)
    assert numpy.array_equal(epoch_order(SamplerSpec("numpy", size, seed, 1001), epoch), expected)


@pytest.mark.parametrize("kind", ["sequential", "torch-random", "torch-distributed", "numpy", "torch-loader"])
def test_without_shuffle_samples_come_by_number(kind: str) -> None:
    assert epoch_order(SamplerSpec(kind, 5, 3, shuffle=False), 2).tolist() == [0, 1, 2, 3, 4]
    assert epoch_order(SamplerSpec(kind, 0), 0).tolist() == []


@given(st.integers(0, 200), st.integers(1, 40), st.booleans())
def test_shares_of_all_ranks_cover_the_dataset(size: int, replicas: int, drop_last: bool) -> None:
    shares = [
        epoch_order(SamplerSpec("torch-distributed", size, drop_last=drop_last, replicas=replicas, rank=rank), 0)
        for rank in range(replicas)
    ]
    assert len({len(share) for share in shares}) == 1
    seen = set(numpy.concatenate(shares).tolist())
    assert len(seen) == (size // replicas * replicas if drop_last else size)


def test_epochs_are_independent_of_the_thread_that_asks() -> None:
    def ask(epoch: int) -> list[int]:
        return epoch_order(SamplerSpec("torch-random", 5000, 99, epochs=24), epoch).tolist()

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, reversed(range(24))))
    sampler._epochs_of.cache_clear()
    assert together == [ask(epoch) for epoch in reversed(range(24))]


@pytest.mark.parametrize("kind", ["sequential", "torch-random", "torch-distributed", "numpy"])
def test_caller_may_change_the_order_it_got(kind: str) -> None:
    first = epoch_order(SamplerSpec(kind, 20, 4), 2)
    kept = first.copy()
    first[:] = 0
    assert numpy.array_equal(epoch_order(SamplerSpec(kind, 20, 4), 2), kept)


@pytest.mark.parametrize(
    ("spec", "epoch", "complaint"),
    [
        (SamplerSpec("explicit", 5), 0, "does not determine an order"),
        (SamplerSpec("torch-shuffled", 5), 0, "known: sequential, torch-random"),
        (SamplerSpec("sequential", -1), 0, "not between"),
        (SamplerSpec("sequential", 2**32), 0, "not between"),
        (SamplerSpec("torch-random", 5), -1, "negative"),
        (SamplerSpec("torch-distributed", 5, replicas=2, rank=2), 0, "rank 2"),
        (SamplerSpec("torch-distributed", 5, replicas=0), 0, "rank 0"),
        (SamplerSpec("torch-random", 5, replicas=2), 0, "torch-distributed"),
        (SamplerSpec("torch-random", 5, seed=2**64), 0, "seed"),
        (SamplerSpec("torch-distributed", 5, seed=2**64 - 1), 1, "seed"),
        (SamplerSpec("torch-distributed", sampler.TORCH_LIMIT), 0, "explicitly"),
        (SamplerSpec("numpy", 5, seed=2**32 - 1), 1, "numpy wants"),
    ],
)
def test_senseless_specs_are_refused(spec: SamplerSpec, epoch: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        epoch_order(spec, epoch)


def test_torch_is_not_needed() -> None:
    code = """
import sys
sys.modules["torch"] = None
from cachefs.job_messages import SamplerSpec
from cachefs.planning.sequences.sampler import epoch_order
print(epoch_order(SamplerSpec("torch-distributed", 6, 1), 0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{torch_permutation(6, 1)}\n", done.stderr
