"""The benchmark of the plan follows what it says it follows."""

import pytest
from cachefs_tools.bench import planning


@pytest.mark.parametrize("share", [True, False])
def test_every_read_is_followed_and_brought(share: bool) -> None:
    result = planning.measure(20_000, 2, 4_000, share=share)
    assert result["followed_reads"] == 4_000
    # What is read ahead of the last report comes on top.
    assert 4_000 <= result["fetched"] <= 6_500
    assert set(result["cpu_s_per_100k_samples"]) == {"follow", "look ahead", "evict", "all"}
