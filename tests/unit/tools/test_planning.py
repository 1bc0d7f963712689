"""The benchmark of the plan follows what it says it follows."""

import pytest

from cachefs_bench import planning


@pytest.mark.parametrize("share", [True, False])
def test_every_read_is_followed_and_brought(share: bool) -> None:
    result = planning.measure(5_000, 2, 1_000, share=share)
    assert result["followed_reads"] == 1_000
    # What is read ahead of the last report comes on top, and some blocks are read twice.
    assert 900 <= result["fetched"] <= 3_500
    assert set(result["cpu_s_per_100k_samples"]) == {"follow", "look ahead", "evict", "all"}
