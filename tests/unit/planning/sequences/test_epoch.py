"""Epochs: first and later reads of each block."""

import numpy as np
import pytest

from cachefs.planning.sequences.timeline import UNKNOWN_READ, PlannedEpoch
from tests.simulated import space_of


def test_each_block_has_its_first_read_and_each_read_the_next_one_of_its_block() -> None:
    epoch = PlannedEpoch.of(np.array([2, 0, 2, 1, 0, 2]), space_of([1000] * 4), is_last=False)
    assert epoch.first.tolist() == [1, 3, 0, UNKNOWN_READ]
    assert epoch.repeats is not None
    assert epoch.repeats.tolist() == [2, 4, 5, UNKNOWN_READ, UNKNOWN_READ, UNKNOWN_READ]
    assert epoch.distinct == 3
    assert epoch.next_reads_from(2).tolist() == [4, 3, 2, UNKNOWN_READ]
    assert epoch.next_reads_from(0).tolist() == epoch.first.tolist()
    assert epoch.next_reads_from(6).tolist() == [UNKNOWN_READ] * 4


def test_where_no_block_is_read_twice_there_are_no_later_reads() -> None:
    assert PlannedEpoch.of(np.array([3, 1]), space_of([1000] * 4), is_last=True).repeats is None


@pytest.mark.parametrize("blocks", [[-1], [0, 4]])
def test_blocks_of_other_spaces_are_refused(blocks: list[int]) -> None:
    with pytest.raises(ValueError, match="beyond the 4 of snapshot"):
        PlannedEpoch.of(np.array(blocks), space_of([1000] * 4), is_last=False)
