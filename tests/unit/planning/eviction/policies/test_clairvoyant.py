import math

import numpy as np
import pytest

from cachefs.planning.eviction.policies import make_policy
from cachefs.planning.eviction.policies.lru import UseOrder
from cachefs.planning.eviction.simulated_tiers import SimulatedTiers
from cachefs.planning.sequences.plan import Plan
from cachefs_bench.simulated_jobs import Order, ReadingJob, origin_bytes
from tests.simulated import belady_bytes, space_of

FILES = 1_000
SIZE = 1_000
EPOCHS = 5
SHARES = (0.35, 0.8)


def orders(files: int, epochs: int, seed: int) -> list[Order]:
    draw = np.random.default_rng(seed)
    return [draw.permutation(files) for _ in range(epochs)]


def fetched(name: str, capacity: int, jobs: list[ReadingJob], sizes: list[int], every: int = 16) -> int:
    return origin_bytes(lambda plan: make_policy(name, plan), space_of(sizes), jobs, capacity, every)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["clairvoyant", "alsd", "minio"])
def test_one_job_fetches_no_more_than_it_must(name: str, share: float) -> None:
    """Of F bytes C are kept: F + (E - 1)(F - C) is the least anyone fetches in E epochs of fresh permutations."""
    jobs = [ReadingJob("job", orders(FILES, EPOCHS, seed=1))]
    bound = FILES * SIZE + (EPOCHS - 1) * (1 - share) * FILES * SIZE
    total = fetched(name, int(share * FILES * SIZE), jobs, [SIZE] * FILES)
    assert bound <= total <= 1.015 * bound


@pytest.mark.parametrize("share", SHARES)
def test_lru_hits_as_its_closed_form_says(share: float) -> None:
    jobs = [ReadingJob("job", orders(FILES, EPOCHS, seed=1))]
    total = fetched("lru", int(share * FILES * SIZE), jobs, [SIZE] * FILES)
    hits = 1 - (total / (FILES * SIZE) - 1) / (EPOCHS - 1)
    assert hits == pytest.approx(share + (1 - share) * math.log(1 - share), abs=0.02)


@pytest.mark.parametrize("share", SHARES)
def test_two_tiers_of_lru_hit_as_its_closed_form_says(share: float) -> None:
    uses, half = UseOrder(), int(share * FILES * SIZE / 2)
    tiers = SimulatedTiers([make_policy("lru", Plan(), None, uses) for _ in range(2)], [half, half], uses)
    first, *later = ([b"%d" % number for number in order] for order in orders(FILES, EPOCHS, seed=1))
    for key in first:
        tiers.read_block(key, SIZE)
    hits = sum(tiers.read_block(key, SIZE) for keys in later for key in keys) / (FILES * (EPOCHS - 1))
    assert hits == pytest.approx(share + (1 - share) * math.log(1 - share), abs=0.02)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("delay", [0.7, 2.5])
def test_two_jobs_fetch_what_belady_fetches(share: float, delay: float) -> None:
    jobs = [
        ReadingJob("one", orders(FILES, 3, seed=1)),
        ReadingJob("two", orders(FILES, 3, seed=2), start=delay),
    ]
    capacity = int(share * FILES * SIZE)
    total = fetched("clairvoyant", capacity, jobs, [SIZE] * FILES)
    assert total <= 1.05 * belady_bytes(space_of([SIZE] * FILES), jobs, capacity)


def test_jobs_of_different_speed_fetch_what_belady_fetches() -> None:
    jobs = [
        ReadingJob("fast", orders(FILES, 6, seed=1), rate=3000.0),
        ReadingJob("slow", orders(FILES, 2, seed=2), rate=1000.0),
    ]
    capacity = FILES * SIZE // 2
    total = fetched("clairvoyant", capacity, jobs, [SIZE] * FILES)
    assert total <= 1.05 * belady_bytes(space_of([SIZE] * FILES), jobs, capacity)


def test_ranks_that_share_a_dataset_fetch_what_belady_fetches() -> None:
    whole = orders(FILES, 4, seed=3)
    jobs = [ReadingJob(f"rank{rank}", [order[rank::4] for order in whole]) for rank in range(4)]
    capacity = FILES * SIZE // 2
    total = fetched("clairvoyant", capacity, jobs, [SIZE] * FILES)
    assert total <= 1.01 * belady_bytes(space_of([SIZE] * FILES), jobs, capacity)


def test_records_of_large_files_fetch_what_belady_fetches() -> None:
    """Each block is read 20 times an epoch, in random order."""
    draw = np.random.default_rng(4)
    jobs = [ReadingJob("job", [draw.permutation(np.repeat(np.arange(300), 20)) for _ in range(3)])]
    capacity = 150 * SIZE
    total = fetched("clairvoyant", capacity, jobs, [SIZE] * 300, every=4)
    assert total <= 1.01 * belady_bytes(space_of([SIZE] * 300), jobs, capacity)


def test_sizes_are_bytes() -> None:
    sizes = np.random.default_rng(5).integers(200, 20_000, FILES).tolist()
    jobs = [ReadingJob("job", orders(FILES, EPOCHS, seed=6))]
    capacity = sum(sizes) // 2
    total = fetched("clairvoyant", capacity, jobs, sizes)
    assert total <= 1.01 * (sum(sizes) + (EPOCHS - 1) * (sum(sizes) - capacity))
