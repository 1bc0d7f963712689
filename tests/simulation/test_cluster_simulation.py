"""Thousands of schedules of a simulated cluster, each from its seed: see docs/simulation.md.

A failure names its seed; `CACHEFS_SEEDS=17 .venv/bin/pytest tests/simulation -k named` runs it again.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.simulation import scenario
from tests.simulation.cluster import Failure, run
from tests.simulation.datasets import datasets
from tests.simulation.planted import PLANTED, Planted

DATASET_SCHEDULES = 150
# Schedules within which each planted fault is found.
PLANTED_SCHEDULES = 50
# Faults of the schedules, and seeds, that find faults which the simulation has found in the product; these are mended.
# What a seed means changes with the scenario: each of these faults is in `planted.py` and has a unit test as well.
FOUND = (
    # A reader of a home without permission was told what the origin had refused to another node a moment before.
    (("denied",), 3),
)


@pytest.mark.parametrize("part", range(scenario.PARTS))
def test_whatever_happens_what_must_hold_holds(part: int) -> None:
    assert not scenario.failure_in(part)


@pytest.mark.parametrize("part", range(2))
def test_datasets_become_the_same_on_all_nodes(part: int) -> None:
    for seed in range(part, DATASET_SCHEDULES, 2):
        run(seed, datasets)


@pytest.mark.parametrize(("faults", "seed"), FOUND)
def test_what_was_found_once_stays_mended(faults: tuple[str, ...], seed: int) -> None:
    run(seed, scenario.storm_of(scenario.Size(only=faults)))


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Planted) -> None:
    found = first_seed(planted, PLANTED_SCHEDULES)
    assert found is not None, f"not within {PLANTED_SCHEDULES} schedules"


def first_seed(planted: Planted, most: int) -> tuple[int, str] | None:
    """Return the first seed that finds it, and the invariant that it breaks."""
    schedule = datasets if planted.of_datasets else scenario.storm_of(planted.size)
    with planted.patch():
        for seed in range(most):
            try:
                run(seed, schedule)
            except Failure as failure:
                if failure.invariant in planted.breaks:
                    return seed, failure.invariant
    return None


def test_a_seed_gives_the_same_run_again_in_any_process() -> None:
    seeds = range(100, 108)
    here = [run(seed, scenario.storm).digest for seed in seeds]
    assert here == [run(seed, scenario.storm).digest for seed in seeds]
    assert len(set(here)) == len(here)
    program = (
        "from tests.simulation import scenario\n"
        "from tests.simulation.cluster import run\n"
        f"print(*(run(seed, scenario.storm).digest for seed in range({seeds.start}, {seeds.stop})))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    there = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.split() == here


def test_a_failure_names_its_seed_and_shows_what_happened() -> None:
    planted = next(one for one in PLANTED if "single flight" in one.breaks)
    failures = []
    with planted.patch():
        for seed in [*range(20)] * 2:
            try:
                run(seed, scenario.storm)
            except Failure as failure:
                failures.append(str(failure))
    assert re.match(r"(?s)seed \d+: .*\n.* read n\d", failures[0])
    assert failures[: len(failures) // 2] == failures[len(failures) // 2 :]


def seeds_of(text: str) -> Iterator[int]:
    """Read seeds such as 17, 20-25."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@pytest.mark.soak
def test_schedules_that_are_named() -> None:
    for seed in seeds_of(os.environ.get("CACHEFS_SEEDS", "100000-120000")):
        run(seed, scenario.storm)


@pytest.mark.soak
def test_schedules_of_datasets_that_are_named() -> None:
    for seed in seeds_of(os.environ.get("CACHEFS_DATASET_SEEDS", "1000-5000")):
        run(seed, datasets)


@pytest.mark.soak
def test_large_schedules_that_are_named() -> None:
    for seed in seeds_of(os.environ.get("CACHEFS_LARGE_SEEDS", "1-200")):
        run(seed, scenario.large)
