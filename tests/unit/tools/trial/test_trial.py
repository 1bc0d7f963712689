"""What a trial reads, what that costs, and what its figures mean in words."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cachefs.messages import ErrorView
from cachefs_tools.cachectl.bench import describe, document
from cachefs_tools.origin_speed import ConcurrentThroughput, OriginSpeed
from cachefs_tools.trial.extent import FileChoice, TrialJob, TrialSample, origin_bounds, select_samples
from cachefs_tools.trial.job_process import TrialEpoch
from cachefs_tools.trial.trial import failure_reason
from cachefs_tools.trial.verdict import TrialFigures, verdict_sentences
from cachefs_tools.trial.warm import WarmSpeed

MB = 10**6
JOB = TrialJob(rate=100.0, batch=10, workers=4, seconds=5.0, epochs=2, bytes=100 * MB)


def samples(*sizes: int, cached: bool = False) -> list[TrialSample]:
    return [TrialSample(b"%d" % number, size, cached) for number, size in enumerate(sizes)]


def test_files_that_are_not_here_come_first() -> None:
    choice = select_samples(JOB, [*samples(*[MB] * 40, cached=True), *samples(*[MB] * 30)], 4 * MB)
    assert len(choice.cold_samples) == 30
    assert [sample.is_cached for sample in choice.samples[:31]] == [False] * 30 + [True]


def test_of_a_job_that_failed_the_reason_is_that_of_its_last_read() -> None:
    failed = [
        ErrorView(when, 1, f"s3://bucket/{key}", message)
        for when, key, message in [
            (90.0, "set/a", "an earlier one"), (101.0, "set/b", "403"), (103.0, "set/c", "the secret is wrong"),
            (104.0, "sets/d", "of another dataset"),
        ]
    ]  # fmt: skip
    assert failure_reason(failed, "s3://bucket/set", 100.0) == "the secret is wrong"
    assert failure_reason(failed, "s3://bucket/set", 103.5) == ""


@given(
    st.lists(st.integers(1, 50 * MB), max_size=200),
    st.integers(10_000, 200 * MB),
    st.floats(0.1, 1e5),
    st.integers(1, 1000),
)
def test_a_trial_stays_within_its_bytes_and_samples(sizes: list[int], most: int, rate: float, batch: int) -> None:
    job = msgspec.structs.replace(JOB, bytes=most, rate=rate, batch=batch)
    choice = select_samples(job, samples(*sizes), 4 << 20)
    assert choice.bytes <= 0.8 * most
    assert len(choice.samples) <= max(batch, rate * job.seconds)
    assert choice.max_requests >= len(choice.cold_samples)
    look = origin_bounds(job, choice.mean_size)
    # The small reads of latency come on top, and one read at least at each width.
    assert look.max_bytes <= 0.2 * most + look.small * (16 << 10) + len(look.widths) * look.large_bytes


EPOCH = TrialEpoch(samples=500, seconds=5.1, waited=0.1, first_batch=0.1, read_p50=0.001, read_p99=0.01)
FIGURES = TrialFigures(
    job=JOB,
    choice=FileChoice(samples(*[100_000] * 500), 4 << 20),
    origin=OriginSpeed(
        0.02, 0.05, [ConcurrentThroughput(1, 5e6, 50.0), ConcurrentThroughput(16, 80e6, 800.0)], 90, 10 * MB
    ),
    epochs=[EPOCH, EPOCH],
    warm=WarmSpeed(500e6, 0.0002, 30.0, 32.0),
    dataset_bytes=10**9,
    capacity=10**10,
)
WAITING = msgspec.structs.replace(EPOCH, seconds=10.0, waited=5.0)


@pytest.mark.parametrize(
    ("changes", "told", "not_told"),
    [
        ({}, ["would not wait for data in its first epoch", "the tiers hold the whole dataset"], ["ssd.budget"]),
        ({"epochs": [WAITING, EPOCH]}, ["would wait for data 49 % of its time in its first epoch", "--workers"], []),
        (
            {"epochs": [WAITING, EPOCH], "job": msgspec.structs.replace(JOB, rate=2000.0)},
            ["The origin delivers 80 MB/s at best, and the job needs 200 MB/s", "2.5 times as long", "cachectl warmup"],
            ["--workers"],
        ),
        ({"capacity": 5 * 10**8}, ["the tiers hold 50% of the dataset", "ssd.budget"], []),
        ({"epochs": [EPOCH, WAITING]}, ["give the job more workers"], []),
        ({"epochs": [EPOCH, WAITING], "warm": WarmSpeed(5e6, 0.1, 30.0, 32.0)}, ["a faster SSD"], []),
        ({"warm": WarmSpeed(5e8, 0.1, 30.0, 90.0)}, ["33% of the speed of a native file", "the-shield"], []),
        ({"origin": OriginSpeed(error="OriginUnavailable", message="no server answers")}, ["cachectl doctor"], []),
        (
            {"choice": FileChoice(samples(*[9] * 10, cached=True), 4 << 20)},
            ["100% of these files were on the node already"],
            [],
        ),
        ({"epochs": [], "warm": None}, [], ["first epoch"]),
    ],
)
def test_the_verdict_says_what_it_means_and_what_to_change(
    changes: dict[str, Any], told: list[str], not_told: list[str]
) -> None:
    said = " ".join(verdict_sentences(msgspec.structs.replace(FIGURES, **changes)))
    for part in told:
        assert part in said
    for part in not_told:
        assert part not in said


def test_what_is_printed_fits_80_columns() -> None:
    console = Console(width=80, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(*describe(FIGURES, list(verdict_sentences(FIGURES))), sep="\n")
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("EPOCH SAMPLES SECONDS WAITED FIRST-BATCH READ-P50 READ-P99" in " ".join(line.split()) for line in lines)
    made = document(FIGURES, ["x"])
    assert made["epochs"][0]["waiting"] == 0.0  # type: ignore[index]
    assert made["verdict"] == ["x"]
