"""What the latest reads say of a sequence, and where in it they lie."""

import numpy as np
import pytest

from cachefs.planning.sequences.search import (
    DISTRUST_STEP,
    MAX_DISTRUST,
    MIN_AGREEMENT,
    VERDICT_READS,
    Evidence,
    ReadCluster,
    find_densest,
)
from cachefs.planning.sequences.timeline import PlannedEpoch
from tests.simulated import space_of

COUNT = 3000
ORDER = np.random.default_rng(1).permutation(COUNT)
EPOCH = PlannedEpoch.of(ORDER, space_of([1000] * COUNT), is_last=False)


def test_reads_in_a_row_are_found_where_they_are() -> None:
    found = find_densest(EPOCH, ORDER[700:748].astype(np.int32), 0)
    assert found == ReadCluster(1.0, 748, 1.0)


@pytest.mark.parametrize("every", [2, 8, 16])
def test_reads_of_which_few_show_are_found(every: int) -> None:
    found = find_densest(EPOCH, ORDER[1000 : 1000 + 20 * every : every].astype(np.int32), 0)
    assert found.share >= MIN_AGREEMENT
    assert 1000 < found.end <= 1000 + 20 * every
    assert found.density == pytest.approx(1 / every, rel=0.2)


def test_reads_of_anywhere_are_found_nowhere() -> None:
    random = np.random.default_rng(2)
    found = [find_densest(EPOCH, random.integers(0, COUNT, VERDICT_READS, np.int32), 0) for _ in range(200)]
    assert sum(one.share > 0 for one in found) <= 1


def test_too_few_reads_are_found_nowhere() -> None:
    assert find_densest(EPOCH, ORDER[:7].astype(np.int32), 0).share == 0


def test_the_share_is_of_the_latest_reads() -> None:
    evidence = Evidence(0)
    assert (evidence.share, evidence.is_enough) == (1.0, False)
    evidence.add_reads(ORDER[:30].astype(np.int32), np.zeros(30, np.bool_))
    evidence.add_reads(ORDER[30:66].astype(np.int32), np.ones(36, np.bool_))
    assert evidence.is_enough
    assert evidence.share == 36 / 48
    assert (evidence.matched, evidence.mismatched) == (36, 30)
    assert evidence.judged.tolist() == ORDER[18:66].tolist()
    assert evidence.are_recent(ORDER[[29, 30]].astype(np.int32)).tolist() == [False, True]
    evidence.clear()
    assert (evidence.share, len(evidence.judged)) == (1.0, 0)
    assert evidence.are_recent(ORDER[[30]].astype(np.int32)).tolist() == [True]


def test_who_was_found_wrongly_is_believed_less() -> None:
    evidence = Evidence(0)
    certain, likely = ReadCluster(1.0, 100, 1.0), ReadCluster(MIN_AGREEMENT, 100, 1.0)
    assert evidence.is_credible(likely)
    evidence.on_lost()  # it was never found, so not wrongly
    assert evidence.is_credible(likely)
    evidence.on_found()
    evidence.on_lost()
    assert not evidence.is_credible(likely)
    assert evidence.is_credible(ReadCluster(MIN_AGREEMENT + DISTRUST_STEP, 100, 1.0))
    for _ in range(20):
        evidence.on_lost()
    assert evidence.is_credible(certain)
    assert not evidence.is_credible(ReadCluster(MIN_AGREEMENT + MAX_DISTRUST - 0.01, 100, 1.0))
