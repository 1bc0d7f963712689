import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.scheduling.facts import SHARDS, WHOLE, JobRequest, Links, NodeCopy, NodeFacts, shards_of


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_shards_say_how_much_of_each_part_is_there(total, seed, part):
    chance = np.random.default_rng(seed)
    sizes = chance.integers(0, 1000, total)
    there = np.flatnonzero(chance.random(total) < part)
    shards = shards_of(there, sizes)
    assert shards.shape == (SHARDS,)
    assert (shards_of(np.arange(total), sizes) == WHOLE).all()
    for shard in range(0, SHARDS, 17):
        if total >= SHARDS:
            blocks = np.flatnonzero(np.arange(total) * SHARDS // total == shard)
            of_all, of_these = sizes[blocks].sum(), sizes[np.intersect1d(blocks, there)].sum()
            assert shards[shard] == (WHOLE if not of_all else of_these * WHOLE // of_all)
        else:
            assert shards[shard] == (WHOLE if shard * total // SHARDS in there else 0)


def test_a_snapshot_of_one_block_is_there_or_not():
    assert (shards_of(np.array([], np.int64), np.array([7])) == 0).all()
    assert (shards_of(np.array([0]), np.array([7])) == WHOLE).all()
    assert (shards_of(np.array([], np.int64), np.array([], np.int64)) == WHOLE).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: NodeFacts(""),
        lambda: NodeFacts("n" * 600),
        lambda: NodeFacts("n", capacity=-1),
        lambda: NodeFacts("n", peer_rate=float("nan")),
        lambda: NodeFacts("n", demand=float("inf")),
        lambda: NodeFacts("n", copies={str(i): NodeCopy(0, 0) for i in range(2049)}),
        lambda: NodeCopy(-1, 0),
        lambda: NodeCopy(0, 0, np.zeros(10, np.uint8)),
        lambda: NodeCopy(0, 0, np.zeros(SHARDS, np.int64)),
        lambda: Links(origin=-1),
        lambda: JobRequest("j", "s", ranks=0),
        lambda: JobRequest("j", "s", ranks=10**6),
        lambda: JobRequest("j", "s", ranks=2, distribution=np.zeros((1, SHARDS), np.float32)),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ValueError, match=r".+"):
        make()
