"""The promises of every policy, with whatever blocks it has: a new policy is tried here without a line of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.eviction.policies import POLICIES, make_policy
from cachefs.planning.sequences.plan import Plan

KEYS = [bytes([number]) * 16 for number in range(12)]
keys = st.sampled_from(KEYS)
sizes = st.integers(1, 1000)
pins = st.frozensets(keys)
# What a tier tells its policy, or asks it.
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), keys, sizes),
        st.tuples(st.just("access"), keys),
        st.tuples(st.just("remove"), keys),
        st.tuples(st.just("evict"), sizes, pins, st.lists(keys, max_size=3, unique=True)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=steps)
def test_victims_are_blocks_of_the_tier_that_are_not_pinned_and_free_enough(
    name: str, steps: list[tuple[object, ...]]
) -> None:
    policy, held = make_policy(name, Plan()), dict[bytes, int]()
    for step in steps:
        match step:
            case "add", bytes() as key, int() as size:
                if key not in held:
                    held[key] = size
                    policy.note_added(key, size)
            case "access", bytes() as key:
                policy.note_accessed(key)
            case "remove", bytes() as key:
                held.pop(key, None)
                policy.note_removed(key)
            case "evict", int() as size, frozenset() as pinned, list() as incoming:
                coming = [key for key in incoming if key not in held]
                assert sorted(ranked := policy.rank_incoming(coming, pinned)) == sorted(set(ranked))
                assert set(ranked) <= set(range(len(coming)))
                victims = policy.choose_victims(size, pinned, coming)
                assert len(set(victims)) == len(victims)
                assert set(victims) <= held.keys() - pinned
                assert not victims or sum(held[key] for key in victims) >= size
                assert policy.can_evict or not (coming and victims)  # without blocks to come, the tier shrinks
                for key in victims:
                    del held[key]
                    policy.note_removed(key)


@pytest.mark.parametrize("name", POLICIES)
@given(size=sizes, free=st.integers(0, 2000))
def test_an_empty_tier_takes_a_block_for_which_it_has_room(name: str, size: int, free: int) -> None:
    assert make_policy(name, Plan()).can_admit(KEYS[0], size, free) or size > free
