"""The simulated cluster of `cachefs-bench scheduling`: small, with the code that real schedulers are advised by."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs_bench.cli import main
from cachefs_bench.scheduling import figures as sweeping
from cachefs_bench.scheduling.placement_policies import HintPolicy, PolicyInput
from cachefs_bench.scheduling.simulated_reads import TOLERANCE, SimulatedReads, fair_rates
from cachefs_bench.scheduling.simulation import POLICIES, simulate
from cachefs_bench.scheduling.workload import GB, TRACES, SimulatedCaches, SimulationShape, make_workload

SMALL = SimulationShape(nodes=8, jobs=16, datasets=3, zones=2, slots=2, load=0.9, origin=1e9, largest=100 * GB)


@pytest.fixture(scope="module")
def runs():
    return {policy: simulate(SMALL, 1, policy, 1) for policy in POLICIES}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_ends_and_none_is_faster_than_its_computing(runs, policy):
    outcomes = runs[policy].outcomes
    assert sorted(one.job.number for one in outcomes) == list(range(SMALL.jobs))
    assert {one.job for one in outcomes} == set(make_workload(SMALL, 1).jobs)
    assert all(one.completion >= one.ideal * (1 - TOLERANCE) for one in outcomes)
    assert all(one.waited >= 0 for one in outcomes)


def test_hints_spare_the_origin(runs):
    assert runs["hints"].origin_bytes <= runs["random"].origin_bytes


def test_limits_hold(runs):
    for policy in ("hints+suspend", "hints+clone"):
        assert max(runs[policy].most_per_copy.values()) <= max(runs["hints"].most_per_copy.values())
    assert runs["hints+clone"].clones > 0
    assert runs["hints+suspend"].clones == 0


def test_the_same_seed_gives_the_same_run(runs):
    again = simulate(SMALL, 1, "hints", 1)
    assert [one.completion for one in again.outcomes] == [one.completion for one in runs["hints"].outcomes]


@settings(max_examples=20)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_shares_are_fair(readers, resources, seed):
    """Nothing is used beyond its capacity, and who has less than it wants is held back by something that is full."""
    chance = np.random.default_rng(seed)
    usage = chance.random((readers, resources)) * (chance.random((readers, resources)) < 0.5)
    capacities, most = chance.random(resources) + 0.1, chance.random(readers) * 2
    rates = fair_rates(usage, capacities, most)
    used = rates @ usage
    assert (used <= capacities * (1 + 1e-9)).all()
    assert (rates <= most * (1 + 1e-9)).all()
    full = used >= (1 - TOLERANCE) * capacities - 1e-9
    for reader in np.flatnonzero(rates < (1 - TOLERANCE) * most):
        assert (usage[reader, full] > 0).any()


def test_caches_keep_what_is_read_and_nothing_beyond_their_room():
    shape = replace(SMALL, nodes=2, datasets=3, capacity=100 * GB)
    caches = SimulatedCaches(shape, np.array([60, 60, 60]) * GB, np.zeros(2, np.int64))
    assert caches.store_part(0, 0, 1.0) == (0, 1.0)
    caches.last_read[0, 0] = 1.0
    caches.store_part(0, 1, 1.0)
    assert caches.used_bytes(0) == pytest.approx(100 * GB)
    assert caches.held[0, 1] == 1.0
    assert caches.held[0, 0] == pytest.approx(40 / 60)
    caches.readers[0] = 1
    keeper, kept = caches.store_part(0, 2, 0.5)
    assert (keeper, kept) == (1, 0.5)


def test_jobs_as_in_traces_have_a_long_tail_and_the_load_that_was_asked_for():
    load = make_workload(replace(TRACES, jobs=20_000), 1)
    busy = np.array([int(load.sizes[job.dataset]) * job.epochs / job.rate for job in load.jobs])
    ranks = np.array([job.ranks for job in load.jobs])
    assert np.median(busy / ranks) < 0.5 * (busy / ranks).mean()
    span = load.jobs[-1].arrival
    assert busy.sum() / (span * TRACES.nodes * TRACES.slots) == pytest.approx(TRACES.load, rel=0.05)


def test_what_is_given_counts_before_the_workload():
    options = ["--workload", "traces", "--nodes", "4", "--jobs", "3", "--network", "2e9", "--policy", "random"]
    answer = CliRunner().invoke(
        main, ["scheduling", *options, "--first-seed", "7", "--seeds", "2", "--processes", "1"], catch_exceptions=False
    )
    document = json.loads(answer.stdout)
    assert document["seeds"] == [7, 8]
    shape = document["shape"]
    assert (shape["nodes"], shape["peer_rate"], shape["origin"]) == (4, 2e9, TRACES.origin)
    assert (shape["capacity"], shape["median"]) == (TRACES.capacity, TRACES.median)


def test_a_node_with_news_is_seen_and_others_are_not_asked_again():
    """What hints see is what the caches hold, also where only some nodes have changed since the last look."""
    zones = np.zeros(SMALL.nodes, np.int64)
    caches = SimulatedCaches(SMALL, np.array([60, 60, 60]) * GB, zones)
    world = PolicyInput(SMALL, caches, SimulatedReads(SMALL, caches, zones, zones), zones, zones)
    hints = HintPolicy(world, 1)
    hints.update_reports(0.0)
    caches.store_part(2, 1, 0.5)
    hints.update_reports(1.0)
    assert {name: copy.ssd for name, copy in hints.cluster.holders("1").items()} == {"2": 30 * GB}
    caches.held[2, 1] = 0.0
    hints.update_reports(2.0)
    assert not hints.cluster.holders("1")
    hints.update_reports(500.0)
    assert all(facts.age == 0 for facts in (hints.cluster.current_facts(name) for name in hints.cluster) if facts)


def test_the_command_prints_figures_and_draws(tmp_path):
    picture = tmp_path / "out.png"
    options = ["--nodes", "8", "--jobs", "5", "--datasets", "2", "--seeds", "1", "--processes", "1", "--cold"]
    policies = ["--policy", "hints", "--policy", "random", "--plot", str(picture)]
    answer = CliRunner().invoke(main, ["scheduling", *options, *policies], catch_exceptions=False)
    document = json.loads(answer.stdout)
    assert document["policies"]["hints"]["ideal"] == document["policies"]["random"]["ideal"]
    assert document["times_better"]["hints"]["mean"] == 1.0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_with_all_local_jobs_compute_and_wait_for_accelerators(runs):
    found = runs["all local"]
    assert found.origin_bytes == 0
    for one in found.outcomes:
        assert one.completion == pytest.approx(one.waited + one.ideal, rel=TOLERANCE)


def test_a_sweep_changes_one_thing_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "FACTORS", {"origin": (0.5,), "seconds": (0.1,)})
    picture = tmp_path / "out.png"
    options = ["--nodes", "2", "--jobs", "2", "--datasets", "1", "--seeds", "1", "--processes", "1"]
    answer = CliRunner().invoke(
        main, ["scheduling", *options, "--sweep", "--plot", str(picture)], catch_exceptions=False
    )
    assert answer.exit_code == 0, answer.output
    rows = json.loads(answer.stdout)["rows"]
    assert [(row["changed"], row["times"]) for row in rows] == [("", 1.0), ("origin", 0.5), ("seconds", 0.1)]
    assert all(row["times_better"]["hints"]["mean"] == 1.0 for row in rows)
    assert rows[1]["hints"]["mean"] >= rows[0]["hints"]["mean"]
    assert rows[2]["hints"]["ideal"] < rows[0]["hints"]["ideal"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_takes_no_policies():
    answer = CliRunner().invoke(main, ["scheduling", "--sweep", "--policy", "hints"])
    assert answer.exit_code != 0
    assert "--policy" in answer.output
