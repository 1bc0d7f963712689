"""How far out of order a loader reads: within the window that the daemon counts with."""

from collections import deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.job_messages import JobPublication
from cachefs_daemon.jobs.consumer_reads import reorder_window

TRAINING = -1


def window(workers: int, batch_size: int, prefetch: int) -> int:
    """The reorder window that the daemon counts with, in samples of one block each."""
    request = JobPublication(job="j", dataset="d", workers=workers, batch_size=batch_size, prefetch=prefetch)
    reads = SimpleNamespace(blocks=range(10), samples=10, ends=None)
    return reorder_window(request, reads)[0]  # type: ignore[arg-type]


def widest(order: list[int]) -> int:
    """Of an order published as 0, 1, 2 ...: the longest distance from the first sample that has not been read to the
    last one that has, with both of them."""
    assert sorted(order) == list(range(len(order)))
    unread, read, last, found = 0, set(), -1, 0
    for sample in order:
        read.add(sample)
        last = max(last, sample)
        while unread in read:
            unread += 1
        found = max(found, last - unread + 1)
    return found


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
    assert widest(order) <= window(workers, batch_size, prefetch)


@pytest.mark.parametrize(("workers", "batch_size", "prefetch"), [(2, 1, 1), (4, 8, 2), (3, 5, 4)])
def test_the_window_is_no_wider_than_a_loader_needs(workers: int, batch_size: int, prefetch: int) -> None:
    order = read_order(10 * workers * batch_size * prefetch, workers, batch_size, prefetch, max)
    assert widest(order) > window(workers, batch_size, prefetch) - prefetch * batch_size - batch_size


def test_without_workers_reads_are_in_order() -> None:
    assert window(0, 32, 2) == 0
    assert widest(list(range(100))) == 0
