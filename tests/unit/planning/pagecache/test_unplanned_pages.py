"""Pages of an earlier daemon, until a plan claims them or their time is over."""

import numpy as np

from cachefs.planning.pagecache.push_plan import FileBlocks, UnplannedPages
from tests.simulated import space_of


def held(snapshot: str, entries: list[int], numbers: list[int]) -> FileBlocks:
    return FileBlocks(snapshot, np.array(entries, np.int64), np.array(numbers, np.int64))


def test_a_plan_claims_what_it_knows_once() -> None:
    leftovers = UnplannedPages()
    space = space_of([1000, 2500, 10], "s", block_size=1000)
    # Block 2 of file 2 and file 9 do not exist.
    leftovers.replace_pages([held("s", [1, 0, 1, 2, 9], [2, 0, 0, 2, 0]), held("t", [1], [0])], until=10.0)
    [claimed] = leftovers.claim_planned({"s": space})
    assert (claimed.snapshot, claimed.ids.tolist()) == ("s", [0, 1, 3])
    assert list(leftovers.claim_planned({"s": space})) == []
    assert leftovers


def test_the_rest_is_taken_in_parts_once_its_time_is_over() -> None:
    leftovers = UnplannedPages()
    leftovers.replace_pages([held("s", [1, 2, 3], [0, 5, 0])], until=10.0)
    assert leftovers.take_overdue(2, 10.0) is None
    first, second = leftovers.take_overdue(2, 10.1), leftovers.take_overdue(2, 10.1)
    assert first is not None
    assert second is not None
    assert (first.snapshot, first.entries.tolist(), first.numbers.tolist()) == ("s", [1, 2], [0, 5])
    assert (second.snapshot, second.entries.tolist(), second.numbers.tolist()) == ("s", [3], [0])
    assert leftovers.take_overdue(2, 10.1) is None
    assert not leftovers


def test_a_new_pusher_says_anew_what_is_there() -> None:
    leftovers = UnplannedPages()
    leftovers.replace_pages([held("s", [1], [0])], until=1.0)
    leftovers.replace_pages([], until=2.0)
    assert not leftovers
    assert leftovers.take_overdue(9, 3.0) is None
