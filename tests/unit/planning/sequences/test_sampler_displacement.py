"""How far from its place in the published order a loader reads a sample."""

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cachefs.planning.sequences.sampler import worst_displacement

TRAINING = -1


def displacements(order: list[int]) -> list[int]:
    """By how many places each sample of an order published as 0, 1, 2 ... was read late (early: negative)."""
    assert sorted(order) == list(range(len(order)))
    return [place - sample for place, sample in enumerate(order)]


def read_order(
    samples: int, workers: int, batch_size: int, prefetch: int, choose: Callable[[list[int]], int]
) -> list[int]:
    """A model of torch's DataLoader: *choose* says who acts next, a worker (by number) or the TRAINING loop."""
    batches = deque((s, min(s + batch_size, samples)) for s in range(0, samples, batch_size))
    queues: list[deque[deque[int]]] = [deque() for _ in range(workers)]
    finished: set[int] = set()
    sent = taken = 0
    order: list[int] = []

    def send() -> None:
        nonlocal sent
        if batches:
            queues[sent % workers].append(deque(range(*batches.popleft())))
            sent += 1

    for _ in range(workers * prefetch):
        send()
    while True:
        able = [worker for worker, queue in enumerate(queues) if queue]
        if taken in finished:
            able.append(TRAINING)
        if not able:
            return order
        actor = choose(able)
        if actor == TRAINING:
            taken += 1
            send()
            continue
        batch = queues[actor][0]
        order.append(batch.popleft())
        if not batch:
            queues[actor].popleft()
            finished.add(order[-1] // batch_size)


@given(st.integers(1, 120), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_schedule_exceeds_the_bound(
    samples: int, workers: int, batch_size: int, prefetch: int, random: Random
) -> None:
    # Uneven odds, so that some workers starve for long.
    odds = {actor: random.choice([1, 10, 1000]) for actor in range(TRAINING, workers)}
    order = read_order(
        samples, workers, batch_size, prefetch, lambda able: random.choices(able, [odds[actor] for actor in able])[0]
    )
    bound = worst_displacement(workers, batch_size, prefetch)
    assert all(-bound <= moved <= bound for moved in displacements(order))


@pytest.mark.parametrize(("workers", "batch_size", "prefetch"), [(1, 4, 2), (2, 1, 1), (4, 8, 2), (3, 5, 4)])
def test_bound_is_reached_both_ways(workers: int, batch_size: int, prefetch: int) -> None:
    samples = 10 * workers * batch_size * prefetch
    moved = displacements(read_order(samples, workers, batch_size, prefetch, max))
    assert max(moved) == -min(moved) == worst_displacement(workers, batch_size, prefetch)


def test_without_workers_there_is_none() -> None:
    assert worst_displacement(0, 32, 2) == 0


class Logged(Dataset[int]):
    """Appends each index that is read to a file; the first worker is slow."""

    def __init__(self, log: Path, size: int) -> None:
        self.log = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        if info.id == 0:
            time.sleep(0.002)
        os.write(self.log, b"%d\n" % index)
        return index


def test_torch_stays_within_the_bound(tmp_path: Path) -> None:
    loader = DataLoader(Logged(tmp_path / "log", 480), batch_size=4, num_workers=2, prefetch_factor=3)
    assert len([batch.tolist() for batch in loader]) == 120
    moved = displacements([int(line) for line in (tmp_path / "log").read_text().split()])
    bound = worst_displacement(2, 4, 3)
    assert any(moved)
    assert all(-bound <= by <= bound for by in moved)
