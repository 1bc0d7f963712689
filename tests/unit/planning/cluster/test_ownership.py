"""What is mine to keep, and what goes first."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.cluster.moves import NEVER, EpochMoves
from cachefs.planning.cluster.ownership import COPY_PENALTY, COPY_WINDOW_SECONDS, Ownership, owned_now

IDS = np.arange(6, dtype=np.int32)


def mine(*blocks: int, count: int = 6) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    made = np.zeros(count, np.bool_)
    made[list(blocks)] = True
    return made


def test_copies_go_before_all_that_is_mine_unless_they_are_about_to_be_read() -> None:
    standing = Ownership()
    scores = np.array([1.0, 100.0, 2.0, 200.0, np.inf, 1e9])
    assert not standing.evictable_copies("space", IDS, scores).any(), "nothing is known of it"
    standing.set_owned("space", mine(0, 1, 5))
    assert standing.evictable_copies("space", IDS, scores).tolist() == [False, False, False, True, True, False]
    standing.copy_window = 1.5
    assert standing.evictable_copies("space", IDS[2:4], scores[2:4]).tolist() == [True, True]
    assert 1.5 < COPY_WINDOW_SECONDS < COPY_PENALTY


def test_what_is_lost_is_told_once() -> None:
    standing = Ownership()
    mark, lost = standing.lost_since(0)
    assert lost == []
    standing.set_owned("space", mine(0, 1, 2))
    mark, lost = standing.lost_since(mark)
    assert lost is None, "it was not known before"
    standing.update_owned("space", np.array([1, 3], np.int32), np.array([False, True]))
    standing.update_owned("space", np.array([3], np.int32), True)
    standing.set_owned("space", mine(3, 4))
    mark, lost = standing.lost_since(mark)
    assert lost is not None
    assert [(snapshot, ids.tolist()) for snapshot, ids in lost] == [("space", [1]), ("space", [0, 2])]
    assert standing.lost_since(mark) == (mark, [])
    standing.forget_snapshot("space")
    standing.forget_snapshot("space")
    assert standing.lost_since(mark)[1] is None
    assert not standing.evictable_copies("space", IDS, np.full(6, 99.0)).any()


def test_who_has_not_looked_for_long_looks_at_everything() -> None:
    standing = Ownership()
    standing.set_owned("space", mine(*range(5000), count=5000))
    mark, _ = standing.lost_since(0)
    for block in range(3000):
        standing.update_owned("space", np.array([block], np.int32), False)
    assert standing.lost_since(mark)[1] is None
    end, _ = standing.lost_since(mark)
    standing.update_owned("space", np.array([4000], np.int32), False)
    assert standing.lost_since(end)[1] is not None


def test_an_unknown_snapshot_is_ignored() -> None:
    standing = Ownership()
    standing.update_owned("other", IDS, True)
    assert standing.lost_since(0) == (0, [])


@given(st.integers(1, 4), st.integers(0, 30), st.integers(0, 99), st.data())
def test_a_block_is_its_holder_s_until_its_next_holder_reads_it(
    nodes: int, blocks: int, seed: int, data: st.DataObject
) -> None:
    draw = np.random.default_rng(seed)
    holders, following = (draw.integers(0, nodes, blocks).astype(np.uint16) for _ in range(2))
    times = np.where(holders == following, NEVER, draw.integers(0, 10, blocks) / 10).astype(np.float32)
    moves = EpochMoves(following, np.zeros(blocks, np.uint8), times)
    passed = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.35, 1.0]), min_size=nodes, max_size=nodes)))
    me = data.draw(st.integers(0, nodes - 1))
    found = owned_now(holders, moves, passed, me)
    for block in range(blocks):
        is_read = times[block] < passed[following[block]]
        assert found[block] == ((following if is_read else holders)[block] == me)
