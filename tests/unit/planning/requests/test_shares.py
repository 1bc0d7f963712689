"""Shares of an origin: the weighted max-min, and an order of requests that carries it out."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.requests.shares import MAX_CLAIM, MAX_WEIGHT, MIN_WEIGHT, FairOrder, max_min_shares

JOBS = st.sampled_from("abcdef")
WEIGHTS = st.dictionaries(JOBS, st.floats(MIN_WEIGHT, MAX_WEIGHT))
WANTS = st.dictionaries(JOBS, st.one_of(st.floats(0, 1e9), st.just(math.inf)), min_size=1)


def test_three_jobs_that_want_3_2_and_1_of_half_their_sum_get_the_same() -> None:
    wants = {"a": 30.0, "b": 20.0, "c": 10.0}
    assert max_min_shares(wants, {}, 30) == {"a": 10, "b": 10, "c": 10}
    assert max_min_shares(wants, {"a": 3, "b": 2}, 30) == {"a": 15, "b": 10, "c": 5}
    assert max_min_shares(wants, {"c": 4}, 30) == {"a": 10, "b": 10, "c": 10}  # it wants no more
    assert max_min_shares(wants, {}, 60) == wants
    assert max_min_shares({}, {}, 60) == {}


@given(WANTS, WEIGHTS, st.floats(0, 1e9))
def test_no_job_can_get_more_without_another_of_no_more_per_weight_getting_less(
    wants: dict[str, float], weights: dict[str, float], capacity: float
) -> None:
    shares = max_min_shares(wants, weights, capacity)
    assert all(0 <= shares[job] <= wants[job] for job in wants)
    # Nothing is left while anything is wanted, and nothing is given twice.
    assert sum(shares.values()) == pytest.approx(min(capacity, sum(wants.values())), rel=1e-6, abs=1e-6)
    level = {job: shares[job] / weights.get(job, 1.0) for job in wants}
    unsatisfied = [job for job in wants if shares[job] < wants[job] * (1 - 1e-9)]
    for job in unsatisfied:
        assert level[job] >= max(level.values()) * (1 - 1e-6) - 1e-6


class Jobs:
    """Jobs with requests of their own size, and a server that sends one after the other."""

    def __init__(self, sizes: dict[str, int], weights: dict[str, float]) -> None:
        self.sizes, self.weights = sizes, weights
        self.order = FairOrder()
        self.sent: Counter[str] = Counter()  # bytes

    def weight(self, job: str) -> float:
        return self.weights.get(job, 1.0)

    def send(self, waiting: list[str]) -> str:
        job = min(waiting, key=lambda one: (self.order.claim(one, self.weight(one)), one))
        self.order.charge(job, self.sizes[job], self.weight(job))
        self.sent[job] += self.sizes[job]
        return job


SIZES = st.dictionaries(JOBS, st.integers(1, 4 << 20), min_size=2)


@given(SIZES, WEIGHTS, st.integers(1, 300))
def test_jobs_that_wait_differ_by_a_request_of_each_in_bytes_per_weight(
    sizes: dict[str, int], weights: dict[str, float], count: int
) -> None:
    jobs = Jobs(sizes, weights)
    for _ in range(count):
        jobs.send(sorted(sizes))
    service = {job: jobs.sent[job] / jobs.weight(job) for job in sizes}
    for one in sizes:
        for other in sizes:
            bound = sizes[one] / jobs.weight(one) + sizes[other] / jobs.weight(other)
            assert abs(service[one] - service[other]) <= bound * (1 + 1e-9)


@given(SIZES, WEIGHTS, st.lists(st.sets(JOBS), max_size=60))
def test_the_server_is_never_idle_while_a_job_waits_and_an_idle_job_saves_nothing_up(
    sizes: dict[str, int], weights: dict[str, float], turns: list[set[str]]
) -> None:
    jobs = Jobs(sizes, weights)
    for turn in turns:
        waiting = sorted(turn & sizes.keys())
        for job in sizes.keys() - turn:
            jobs.order.withdraw(job)
        if waiting:
            assert jobs.send(waiting) in waiting
    before = Counter(jobs.sent)
    for _ in range(100):
        jobs.send(sorted(sizes))
    service = {job: (jobs.sent[job] - before[job]) / jobs.weight(job) for job in sizes}
    # Whatever happened before, two requests of each are the most that one job is ahead of another from now on.
    for one in sizes:
        for other in sizes:
            bound = 2 * sizes[one] / jobs.weight(one) + 2 * sizes[other] / jobs.weight(other)
            assert service[one] - service[other] <= bound * (1 + 1e-9)


def test_a_job_whose_requests_could_not_be_sent_gets_them_later_up_to_a_bound() -> None:
    jobs = Jobs({"a": 1 << 20, "b": 1 << 20}, {})
    jobs.order.claim("b", 1.0)
    for _ in range(1000):
        jobs.send(["a"])  # there is room for requests of a only
    for _ in range(200):
        jobs.send(["a", "b"])
    assert jobs.sent["b"] == pytest.approx((MAX_CLAIM >> 20) / 2 * (1 << 20) + (100 << 20), rel=0.2)


def test_when_no_job_waits_the_past_is_forgotten() -> None:
    jobs = Jobs({"a": 1, "b": 1}, {})
    jobs.order.claim("b", 1.0)
    for _ in range(10):
        jobs.send(["a"])
    jobs.order.withdraw("a")
    jobs.order.withdraw("b")
    assert [jobs.send(["a", "b"]) for _ in range(4)] == ["a", "b", "a", "b"]
