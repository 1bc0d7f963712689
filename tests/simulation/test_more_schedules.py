"""The other half of the schedules of test_cluster_simulation.py, so that two test processes share them."""

import pytest

from tests.simulation import scenario


@pytest.mark.parametrize("part", range(scenario.PARTS // 2, scenario.PARTS))
def test_whatever_happens_what_must_hold_holds(part: int) -> None:
    assert not scenario.failure_in(part)
