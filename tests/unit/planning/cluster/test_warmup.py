"""Parts of a warm-up of the cluster: which blocks come, in which order, and what fits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.cluster.homes import blocks_at_home
from cachefs.planning.cluster.rendezvous import RingMember, mix_bits
from cachefs.planning.cluster.warmup import member_parts, plan_part

INFINITE = float("inf")


@given(
    st.lists(
        st.tuples(st.integers(1, 9000), st.booleans(), st.sampled_from([0.5, 3.0, 7.0, INFINITE])), min_size=1,
        max_size=40,
    ),
    st.integers(0, 200_000),
)  # fmt: skip
def test_what_is_fetched_fits_beside_what_is_here_and_is_read_first(
    blocks: list[tuple[int, bool, float]], room: int
) -> None:
    sizes = np.array([size for size, _, _ in blocks], np.int64)
    spans = -(-sizes // 4096) * 4096
    here = np.array([is_here for _, is_here, _ in blocks])
    uses = np.array([use for _, _, use in blocks])
    ids = np.arange(10, 10 + len(blocks), dtype=np.int32)
    plan = plan_part(ids, sizes, spans, here, uses, room)
    chosen = plan.ids - 10
    left_out = np.setdiff1d(np.flatnonzero(~here), chosen)
    assert not here[chosen].any()
    assert len(set(chosen.tolist())) == len(chosen)
    assert plan.without_room == len(left_out)
    assert not len(chosen) or spans[chosen].sum() + spans[here].sum() <= room
    order = list(zip(uses[chosen].tolist(), chosen.tolist(), strict=True))
    assert order == sorted(order)
    assert not len(left_out) or not len(chosen) or uses[chosen].max() <= uses[left_out].min()
    assert (plan.blocks, plan.bytes) == (len(blocks), sizes.sum())
    assert (plan.blocks_here, plan.bytes_here) == (here.sum(), sizes[here].sum())


@given(st.integers(1, 5), st.integers(0, 3_000_000))
def test_the_forecast_has_the_parts_that_nodes_keep(count: int, capacity: int) -> None:
    hashes = mix_bits(np.arange(1, 301, dtype=np.uint64))
    sizes = np.arange(1, 301, dtype=np.int64) * 100
    spans = -(-sizes // 4096) * 4096
    members = [RingMember(f"n{number}", number + 1, 1.0) for number in range(count)]
    parts = member_parts(hashes, sizes, spans, members, [capacity] * count)
    kept = [int(sizes[blocks_at_home(hashes, members, one.id)].sum()) for one in members]
    assert [part.bytes for part in parts] == kept
    assert sum(kept) == sizes.sum()
    for part in parts:
        assert part.holds == part.bytes if not capacity else part.holds <= min(part.bytes, capacity)
