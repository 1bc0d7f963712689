"""How many nodes are needed, and the theory of local reads."""

import math

import numpy as np
import pytest

from cachefs.planning.cluster.scale import SnapshotDemand, forecast_scale, local_share, scale_hint

GIB = 1 << 30


@pytest.mark.parametrize(("nodes", "share"), [(1, 1.0), (2, 2 / 3), (4, 0.4507), (8, 0.3082), (64, 0.1031), (0, 1.0)])
def test_local_reads_are_as_many_as_theory_says(nodes: int, share: float) -> None:
    assert local_share(nodes) == pytest.approx(share, abs=1e-4)


def test_for_many_nodes_it_is_about_the_root_of_their_number() -> None:
    assert 1 / local_share(1000) == pytest.approx(math.sqrt(math.pi * 500) - 1 / 3, rel=1e-3)


def test_it_is_the_number_of_draws_until_one_repeats() -> None:
    draw, nodes, reads = np.random.default_rng(0), 8, []
    for _ in range(20_000):
        seen, count = {int(draw.integers(nodes))}, 1
        while (who := int(draw.integers(nodes))) not in seen:
            seen.add(who)
            count += 1
        reads.append(count)
    assert 1 / float(np.mean(reads)) == pytest.approx(local_share(nodes), rel=0.02)


def test_what_all_nodes_lack_is_fetched_in_each_epoch() -> None:
    hint = scale_hint([60 * GIB] * 2, [SnapshotDemand(180 * GIB, 9, 600.0)])
    assert hint.needed == 180 * GIB
    assert hint.nodes_needed == 4, "three have no room for what is on its way"
    assert hint.now.origin_bytes == 9 * 60 * GIB
    assert hint.now.origin_rate == pytest.approx(60 * GIB / 600)
    assert hint.now.peer_rate == pytest.approx(120 * GIB / 600 / 3)
    assert (hint.one_more.nodes, hint.one_more.origin_bytes) == (3, 0)
    assert hint.one_fewer is not None
    assert hint.one_fewer.origin_bytes == 9 * 120 * GIB
    assert hint.one_fewer.peer_rate == 0, "who is alone reads everything locally"


def test_what_is_read_most_often_is_kept_first() -> None:
    slow, fast, unknown = (
        SnapshotDemand(50 * GIB, 10, 1000.0),
        SnapshotDemand(50 * GIB, 100, 10.0),
        SnapshotDemand(10 * GIB, math.inf, 0.0),
    )
    found = forecast_scale(1, 70 * GIB, [unknown, slow, fast])
    assert found.kept == 70 * GIB
    assert found.origin_rate == pytest.approx(30 * GIB / 1000)
    assert found.origin_bytes == math.inf, "nobody knows how long the third one reads"
    assert forecast_scale(1, 110 * GIB, [unknown, slow, fast]).origin_bytes == 0


def test_without_jobs_or_nodes_there_is_nothing_to_say() -> None:
    nothing = scale_hint([GIB], [])
    assert (nothing.needed, nothing.nodes_needed, nothing.now.origin_bytes) == (0, 0, 0)
    assert nothing.one_fewer is None
    nowhere = scale_hint([], [SnapshotDemand(GIB, 1, 1.0)])
    assert (nowhere.now.nodes, nowhere.nodes_needed, nowhere.now.kept) == (0, 0, 0)
