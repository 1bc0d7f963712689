"""What all policies that ask the plan have in common, by the example of the clairvoyant one."""

import random

import numpy as np
import pytest

from cachefs.planning.eviction.policies import make_policy
from cachefs.planning.eviction.policies.clairvoyant import Clairvoyant
from cachefs.planning.eviction.policies.minio import Minio
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

BLOCKS = 2000
SIZE = 100
SPACE = space_of([SIZE] * BLOCKS)
KEYS = SPACE.keys(np.arange(BLOCKS))
FOREIGN = [bytes([number]) * 20 for number in range(40)]


def plan_of(order: list[int], following: list[int] | None = None) -> Plan:
    plan = Plan()
    plan.add_space(SPACE)
    plan.set_epoch("job", "space", 0, np.array(order), is_last=following is None)
    if following is not None:
        plan.set_epoch("job", "space", 1, np.array(following), is_last=True)
    return plan


def filled(plan: Plan, keys: list[bytes]) -> Clairvoyant:
    policy = Clairvoyant(plan)
    for key in keys:
        policy.note_added(key, SIZE)
    return policy


@pytest.mark.parametrize("name", ["clairvoyant", "alsd"])
def test_with_an_empty_plan_it_is_minio(name: str) -> None:
    plan, draw = Plan(), random.Random(1)
    plan.add_space(SPACE)
    policy, minio, free = make_policy(name, plan), Minio(), 50 * SIZE
    for key in draw.choices(KEYS[:60] + FOREIGN, k=500):
        size = draw.randrange(1, 3 * SIZE)
        assert policy.can_evict == minio.can_evict
        assert policy.can_admit(key, size, free) == minio.can_admit(key, size, free)
        assert policy.choose_victims(size, (), [key]) == minio.choose_victims(size, (), [key]) == ()
        assert policy.replaceable_bytes(key) == 0
        if policy.can_admit(key, size, free):
            policy.note_added(key, size)
            free -= size


def test_what_is_read_last_goes_first_and_only_for_what_is_read_sooner() -> None:
    policy = filled(plan_of(list(range(BLOCKS))), KEYS[100:200])
    assert policy.choose_victims(3 * SIZE, (), [KEYS[50]]) == [KEYS[199], KEYS[198], KEYS[197]]
    assert policy.choose_victims(3 * SIZE, (), [KEYS[196]]) == [KEYS[199], KEYS[198], KEYS[197]]
    assert policy.choose_victims(3 * SIZE, (), [KEYS[197]]) == ()
    assert policy.replaceable_bytes(KEYS[190]) == 9 * SIZE
    assert policy.choose_victims(100 * SIZE, (), [KEYS[50]]) == KEYS[199:99:-1]
    assert policy.choose_victims(101 * SIZE, (), [KEYS[50]]) == ()


def test_it_says_which_blocks_it_prefers_to_some_that_it_has() -> None:
    plan = plan_of(list(range(BLOCKS)))
    policy = filled(plan, KEYS[100:200])
    assert policy.rank_incoming([KEYS[300], KEYS[198], KEYS[199], FOREIGN[0], KEYS[50]], ()) == [4, 1]
    assert filled(plan, KEYS[100:200]).rank_incoming([KEYS[198], KEYS[50]], set(KEYS[190:])) == [1]
    assert policy.choose_victims(2 * SIZE, (), [KEYS[50], KEYS[197]]) == [KEYS[199], KEYS[198]]
    assert policy.choose_victims(2 * SIZE, (), [KEYS[50], KEYS[198]]) == (), "one of them is worth less"
    policy.note_added(FOREIGN[0], SIZE)
    assert policy.rank_incoming([KEYS[300], FOREIGN[1]], ()) == [0], "one that nobody reads is there"
    assert Clairvoyant(Plan()).rank_incoming(KEYS[:1], ()) == []


def test_a_refusal_takes_no_look_at_all_blocks() -> None:
    policy = filled(plan_of(list(range(BLOCKS))), KEYS[:1000])
    looked = []
    ranks = policy._base_scores
    policy._base_scores = lambda snapshot, ids: looked.append(len(ids)) or ranks(snapshot, ids)  # type: ignore[method-assign, func-returns-value]
    assert policy.choose_victims(SIZE, (), [KEYS[1500]]) == ()
    looked.clear()
    assert policy.choose_victims(SIZE, (), [KEYS[1500]]) == ()
    assert max(looked) <= 64
    assert policy.choose_victims(100 * SIZE, (), [KEYS[50]]) == KEYS[999:899:-1], "more than there are candidates"


def test_no_pinned_block_goes_however_many_there_are() -> None:
    plan = plan_of(list(range(BLOCKS)))
    policy, pinned = filled(plan, KEYS), set(KEYS[200:])
    assert policy.choose_victims(2 * SIZE, pinned, [KEYS[0]]) == [KEYS[199], KEYS[198]]
    assert policy.choose_victims(201 * SIZE, pinned) == ()
    plan.set_epoch("job", "space", 1, np.arange(BLOCKS), is_last=True)
    assert policy.choose_victims(SIZE, pinned - {KEYS[1500]}) == [KEYS[1500]]


def test_blocks_of_no_planned_snapshot_go_first_in_the_order_they_came() -> None:
    policy = filled(plan_of(list(range(BLOCKS))), [KEYS[7], *FOREIGN, KEYS[1900]])
    assert policy.choose_victims(2 * SIZE, {FOREIGN[0]}, [KEYS[50]]) == FOREIGN[1:3]
    assert policy.choose_victims(41 * SIZE, (), [KEYS[50]]) == [*FOREIGN, KEYS[1900]]
    assert policy.choose_victims(SIZE, (), [FOREIGN[3]]) == ()
    assert not policy.can_admit(FOREIGN[3], SIZE, 0)
    assert policy.can_admit(FOREIGN[3], SIZE, SIZE)


def test_blocks_that_came_before_anything_was_planned_are_known() -> None:
    plan = Plan()
    policy = filled(plan, [*FOREIGN, *KEYS])
    plan.add_space(SPACE)
    plan.set_epoch("job", "space", 0, np.arange(BLOCKS), is_last=True)
    assert policy.choose_victims(41 * SIZE, (), [KEYS[50]]) == [*FOREIGN, KEYS[-1]]
    for key in KEYS[1000:]:
        policy.note_removed(key)
    assert policy.choose_victims(41 * SIZE, (), [KEYS[50]]) == [*FOREIGN, KEYS[999]]
    assert policy.bytes == (1000 + len(FOREIGN)) * SIZE


def test_blocks_stay_known_when_a_refreshed_snapshot_takes_over() -> None:
    plan = plan_of(list(range(BLOCKS)))
    policy = filled(plan, KEYS[:100])
    refreshed = space_of([SIZE] * (BLOCKS + 5), "refreshed")
    plan.add_space(refreshed)
    plan.remove_space("space")
    plan.set_epoch("next", "refreshed", 0, np.arange(BLOCKS)[::-1], is_last=True)
    assert policy.choose_victims(2 * SIZE, (), [refreshed.key(BLOCKS - 1)]) == KEYS[:2]
    policy.note_removed(KEYS[0])
    assert policy.bytes == 99 * SIZE


def test_a_consumed_block_is_given_up_next_even_between_looks_at_all() -> None:
    plan = plan_of(list(range(BLOCKS)), list(range(BLOCKS))[::-1])
    policy = filled(plan, KEYS[:500])
    assert policy.choose_victims(SIZE, (), [KEYS[600]]) == ()
    for position in range(1, 200):
        plan.set_progress("job", 0, position, 100.0)
        (victim,) = policy.choose_victims(SIZE, (), [KEYS[position]])
        assert victim == KEYS[0]


def test_removed_and_added_again_is_counted_once() -> None:
    policy = filled(plan_of([1, 2, 3]), [KEYS[1], KEYS[1], FOREIGN[0], FOREIGN[0]])
    assert policy.bytes == 2 * SIZE
    policy.note_removed(KEYS[1])
    policy.note_removed(KEYS[1])
    policy.note_removed(FOREIGN[1])
    assert policy.bytes == SIZE


def test_victims_are_exactly_the_furthest_whatever_happened() -> None:
    draw = random.Random(2)
    plan = plan_of(draw.sample(range(BLOCKS), BLOCKS), draw.sample(range(BLOCKS), BLOCKS))
    plan.set_progress("job", 0, 0, 10.0)
    inside = set(KEYS[:300])
    policy, position = filled(plan, KEYS[:300]), 0
    for _ in range(300):
        position += draw.randrange(6)
        plan.set_progress("job", 0, position)
        for key in draw.sample(KEYS, 2):
            inside.add(key)
            policy.note_added(key, SIZE)
        victims = policy.choose_victims(2 * SIZE, ())
        assert set(victims) == {
            key for _, key in sorted(zip(plan.next_use(list(inside)), inside, strict=True), reverse=True)[:2]
        }
        for key in victims:
            policy.note_removed(key)
            inside.discard(key)


def test_after_a_publish_victims_are_found_among_all_that_nobody_plans() -> None:
    """Strangers are looked for in the plan some at a time; pinned ones are no victims."""
    plan = Plan()
    policy = Clairvoyant(plan)
    strangers = [number.to_bytes(20, "big") for number in range(20_000)]
    for key in strangers:
        policy.note_added(key, SIZE)
    plan.add_space(SPACE)
    plan.set_epoch("job", "space", 0, np.arange(BLOCKS), is_last=True)
    pinned = set(strangers[::2])
    assert policy.choose_victims(10_000 * SIZE, pinned) == strangers[1::2]
    assert not policy.catch_up()


def test_a_publish_that_plans_what_is_there_is_followed_step_by_step() -> None:
    plan = Plan()
    policy = Clairvoyant(plan)
    space = space_of([SIZE] * 20_000, "large")
    keys = space.keys(np.arange(20_000))
    for key in keys:
        policy.note_added(key, SIZE)
    plan.add_space(space)
    plan.set_epoch("job", "large", 0, np.arange(20_000), is_last=True)
    steps = 0
    while not (victims := policy.choose_victims(20_000 * SIZE, ())):
        assert policy.catch_up()
        steps += 1
    assert set(victims) == set(keys)
    assert steps > 0
