import pytest

from cachefs_bench.eviction_rules import compare_clairvoyant, compare_rules


@pytest.mark.parametrize(
    ("epochs", "share", "certain"), [(1, 0.5, 16), (1, 0.5, 120), (1, 0.2, 16), (1, 0.2, 60), (3, 0.2, 16)]
)
def test_alsd_hits_as_often_as_the_better_of_the_simple_rules(epochs: int, share: float, certain: int) -> None:
    row = compare_rules(120, 2, epochs, share, certain)
    assert max(row["least_over_jobs"], row["mean_over_jobs"]) - 0.3 <= row["alsd"] <= row["belady"]


def test_the_least_over_jobs_is_worse_with_few_certain_reads_and_better_with_many() -> None:
    few, many = compare_rules(200, 2, 1, 0.5, 16), compare_rules(200, 2, 1, 0.5, 200)
    assert few["least_over_jobs"] < few["mean_over_jobs"] - 1
    assert many["least_over_jobs"] > many["mean_over_jobs"] + 1


def test_clairvoyant_would_gain_nothing_by_the_estimates() -> None:
    row = compare_clairvoyant(120, 2, 1, 0.5)
    assert row["clairvoyant"] == pytest.approx(row["alsd_of_certain_reads"], abs=0.3)
