"""In a cluster, copies of what other nodes keep go first: the policies, beside a model that sorts everything."""

import math
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.ownership import COPY_PENALTY, OwnedMarks, Ownership
from cachefs.planning.eviction.policies import make_policy
from cachefs.planning.eviction.policies.clairvoyant import Clairvoyant
from cachefs.planning.pagecache.states import HELD, Coverage, MemoryCoverage
from cachefs.planning.sequences.plan import Plan
from tests.simulated import space_of

BLOCKS = 2000
SIZE = 100
SPACE = space_of([SIZE] * BLOCKS)
KEYS = SPACE.keys(np.arange(BLOCKS))
RATE = 10.0  # reads a second


@dataclass(frozen=True)
class Mount:
    states: dict[str, npt.NDArray[np.uint8]]


def plan_of(*orders: list[int]) -> Plan:
    plan = Plan()
    plan.add_space(SPACE)
    for epoch, order in enumerate(orders):
        plan.set_epoch("job", "space", epoch, np.array(order), is_last=epoch == len(orders) - 1)
    plan.set_progress("job", 0, 0, RATE)
    return plan


def standing_of(mine: range | list[int]) -> Ownership:
    standing = Ownership()
    marks: OwnedMarks = np.zeros(BLOCKS, np.bool_)
    marks[list(mine)] = True
    standing.set_owned("space", marks)
    return standing


def filled(plan: Plan, standing: Ownership | None, blocks: range) -> Clairvoyant:
    policy = Clairvoyant(plan, None, standing)
    for number in blocks:
        policy.note_added(KEYS[number], SIZE)
    return policy


def ids(*numbers: int) -> Ids:
    return np.array(numbers, np.int32)


def test_copies_go_before_what_is_mine_and_those_of_them_that_are_read_last_go_first() -> None:
    standing = standing_of([*range(200), *range(400, 600)])
    policy = filled(plan_of(list(range(BLOCKS))), standing, range(100, 600))
    assert policy.choose_victims(2 * SIZE, (), [KEYS[50]]) == [KEYS[399], KEYS[398]]
    assert policy.choose_victims(201 * SIZE, (), [KEYS[50]]) == [*KEYS[399:199:-1], KEYS[599]], "then what is mine"
    assert policy.choose_victims(3 * SIZE, (), [KEYS[300]]) == [KEYS[399], KEYS[398], KEYS[397]], (
        "a copy only for those"
    )
    assert policy.choose_victims(2 * SIZE, (), [KEYS[398]]) == ()
    assert policy.replaceable_bytes(KEYS[397]) == 2 * SIZE
    assert policy.rank_incoming([KEYS[700], KEYS[50], KEYS[398], KEYS[399]], ()) == [1, 2]
    assert policy.choose_victims(SIZE, {KEYS[399]}, [KEYS[50]]) == [KEYS[398]]


def test_a_copy_that_is_about_to_be_read_is_worth_what_the_plan_says() -> None:
    standing = standing_of(range(100, 2000))
    policy = filled(plan_of(list(range(BLOCKS))), standing, range(200))
    standing.copy_window = 4.95
    assert policy.choose_victims(51 * SIZE, (), [KEYS[100]]) == [*KEYS[99:49:-1], KEYS[199]]
    assert policy.choose_victims(50 * SIZE, (), [KEYS[40]]) == KEYS[99:49:-1]
    assert policy.choose_victims(51 * SIZE, (), [KEYS[40]]) == (), "a copy displaces nothing that is mine"
    assert policy.replaceable_bytes(KEYS[40]) == 50 * SIZE
    assert policy.choose_victims(151 * SIZE, ()) == [*KEYS[99:49:-1], *KEYS[199:99:-1], KEYS[49]]


def test_what_ceases_to_be_mine_goes_next_without_a_look_at_all_blocks() -> None:
    standing = standing_of(range(BLOCKS))
    policy = filled(plan_of(list(range(BLOCKS))), standing, range(100, 1000))
    assert policy.choose_victims(SIZE, (), [KEYS[50]]) == [KEYS[999]]
    looked: list[int] = []
    ranks = policy._base_scores
    policy._base_scores = lambda snapshot, ids: looked.append(len(ids)) or ranks(snapshot, ids)  # type: ignore[method-assign, func-returns-value]
    for number in range(300, 400):
        standing.update_owned("space", ids(number), False)
        assert policy.choose_victims(SIZE, (), [KEYS[50]]) == [KEYS[number]]
        policy.note_removed(KEYS[number])
    assert sum(count > 200 for count in looked) <= 4, "once in 32 victims, as ever in so small a tier"
    standing.update_owned("space", ids(500, 600), False)
    standing.update_owned("space", ids(600), True)
    assert policy.choose_victims(2 * SIZE, (), [KEYS[50]]) == [KEYS[500], KEYS[999]], "it is mine again"
    standing.forget_snapshot("space")
    assert policy.choose_victims(SIZE, (), [KEYS[50]]) == [KEYS[999]], "there are no copies any more"


def test_a_copy_that_comes_is_known_as_one() -> None:
    standing = standing_of(range(1000))
    policy = filled(plan_of(list(range(BLOCKS))), standing, range(100, 200))
    assert policy.choose_victims(SIZE, (), [KEYS[50]]) == [KEYS[199]]
    policy.note_added(KEYS[1500], SIZE)
    assert policy.choose_victims(SIZE, (), [KEYS[50]]) == [KEYS[1500]]


def test_very_many_copies_all_go_before_anything_else() -> None:
    """As when a job begins on nodes that are full of what others hold now."""
    space = space_of([SIZE] * 40_000, "large")
    keys = space.keys(np.arange(40_000))
    plan = Plan()
    plan.add_space(space)
    plan.set_epoch("job", "large", 0, np.arange(40_000), is_last=True)
    plan.set_progress("job", 0, 0, RATE)
    standing = Ownership()
    marks = np.zeros(40_000, np.bool_)
    marks[::4] = True
    standing.set_owned("large", marks)
    policy = Clairvoyant(plan, None, standing)
    for key in keys:
        policy.note_added(key, SIZE)
    gone = []
    while len(gone) < 29_000:
        victims = policy.choose_victims(500 * SIZE, ())
        for key in victims:
            policy.note_removed(key)
        gone += victims
    assert not set(gone) & set(keys[::4])
    assert len(set(gone)) == len(gone)


def test_what_is_mine_stays_in_memory_though_it_is_in_page_caches() -> None:
    """Other nodes read it, and they do not get it out of a page cache."""
    plan = plan_of(list(range(BLOCKS)))

    states = np.zeros(BLOCKS, np.uint8)
    states[150:200] = HELD
    coverage = Coverage(plan)
    coverage.set_mounts([Mount({"space": states})], {})
    for standing, victim in ((None, 199), (standing_of(range(BLOCKS)), 999)):
        policy = Clairvoyant(plan, MemoryCoverage(coverage, lambda: math.inf), standing)
        for number in range(100, 1000):
            policy.note_added(KEYS[number], SIZE)
        assert policy.choose_victims(SIZE, (), [KEYS[50]]) == [KEYS[victim]]


def test_a_copy_in_all_page_caches_goes_even_while_it_is_about_to_be_read() -> None:
    plan = plan_of(list(range(BLOCKS)))
    states = np.zeros(BLOCKS, np.uint8)
    coverage, standing = Coverage(plan), standing_of(range(100, BLOCKS))
    coverage.set_mounts([Mount({"space": states})], {})
    policy = Clairvoyant(plan, MemoryCoverage(coverage, lambda: math.inf), standing)
    for number in range(200):
        policy.note_added(KEYS[number], SIZE)
    standing.copy_window = 20.0
    assert policy.choose_victims(SIZE, ()) == [KEYS[199]]
    states[40:42] = HELD
    assert policy.choose_victims(3 * SIZE, ()) == [KEYS[41], KEYS[40], KEYS[199]]


@pytest.mark.parametrize("seed", range(3))
def test_victims_are_exactly_those_of_the_model_whatever_happened(seed: int) -> None:
    draw = random.Random(seed)
    orders = [draw.sample(range(BLOCKS), BLOCKS) for _ in range(2)]
    plan = plan_of(*orders)
    standing = standing_of(draw.sample(range(BLOCKS), BLOCKS // 2))
    inside = set(range(300))
    policy, position = filled(plan, standing, range(300)), 0
    for _ in range(250):
        position += draw.randrange(8)
        plan.set_progress("job", 0, position)
        for number in draw.sample(range(BLOCKS), 3):
            inside.add(number)
            policy.note_added(KEYS[number], SIZE)
        changed = draw.sample(range(BLOCKS), 20)
        standing.update_owned("space", ids(*changed), np.array([draw.random() < 0.7 for _ in changed]))
        here = ids(*sorted(inside))
        due = plan.next_use_of("space", here)
        due[standing.evictable_copies("space", here, due)] += COPY_PENALTY
        scores = dict(zip(here.tolist(), due.tolist(), strict=True))
        count = draw.randrange(1, 6)
        victims = policy.choose_victims(count * SIZE, ())
        expected = sorted(scores, key=lambda number: -scores[number])[:count]
        assert victims == [KEYS[number] for number in expected]
        for number in expected:
            policy.note_removed(KEYS[number])
            inside.discard(number)


def test_alsd_gives_up_copies_first_too() -> None:
    plan = plan_of(list(range(1000)), list(range(1000)))
    plan.set_progress("job", 0, 200, RATE)
    standing = standing_of([*range(100), *range(300, 2000)])
    policy = make_policy("alsd", plan, None, None, standing)
    for number in (50, 150, 160, 250, 900):
        policy.note_added(KEYS[number], SIZE)
    first, second = policy.choose_victims(2 * SIZE, (), [KEYS[210]])
    assert {first, second} == {KEYS[150], KEYS[160]}


def test_what_is_owed_goes_last_until_its_new_keeper_has_it() -> None:
    standing = standing_of(range(BLOCKS))
    policy = filled(plan_of(list(range(BLOCKS))), standing, range(100, 1000))
    assert policy.choose_victims(SIZE, (), [KEYS[50]]) == [KEYS[999]]
    owed: OwnedMarks = np.zeros(BLOCKS, np.bool_)
    owed[500:1000] = True
    standing.set_pending_handoffs("space", owed)
    assert policy.choose_victims(2 * SIZE, (), [KEYS[50]]) == [KEYS[499], KEYS[498]]
    assert len(policy.choose_victims(401 * SIZE, ())) == 401, "where nothing else is left"
    standing.update_owned("space", ids(700), False)
    assert policy.choose_victims(2 * SIZE, (), [KEYS[50]]) == [KEYS[700], KEYS[499]], "it is a copy now"
    standing.set_pending_handoffs("space", None)
    assert policy.choose_victims(2 * SIZE, (), [KEYS[50]]) == [KEYS[700], KEYS[999]]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_second_copies_go_after_other_copies_that_were_read_and_before_what_is_mine(seed: int) -> None:
    chances = np.random.default_rng(seed)
    kind = chances.integers(0, 3, 300)  # 0: this node's; 1: second copies; 2: other copies
    marks = np.zeros((2, BLOCKS), np.bool_)
    marks[0, :300], marks[1, :300] = kind == 0, kind == 1
    standing = Ownership()
    standing.set_owned("space", marks[0])
    standing.set_second_copies("space", marks[1])
    policy = filled(plan_of(list(range(150))), standing, range(300))
    read = np.arange(300) / RATE
    soon = (np.arange(300) < 150) & (read <= standing.copy_window)
    counts = {number: int(np.count_nonzero((kind == number) & ~soon)) for number in (2, 1)}
    found = policy.choose_victims(sum(counts.values()) * SIZE, ())
    whose = [int(kind[KEYS.index(key)]) for key in found]
    assert whose == [2] * counts[2] + [1] * counts[1]
    # A second copy displaces other copies only, and never a block of this node.
    bound = policy.choose_victims(max(1, counts[2]) * SIZE, (), [KEYS[400]])
    assert all(kind[KEYS.index(key)] == 2 for key in bound) or not counts[2]


def test_a_second_copy_displaces_no_block_that_this_node_keeps_and_gives_way_to_a_copy_that_is_read_soon() -> None:
    standing = standing_of(range(100))
    second = np.zeros(BLOCKS, np.bool_)
    second[100:300] = True
    standing.set_second_copies("space", second)
    policy = filled(plan_of([*range(300, 310), *range(100)]), standing, range(200))
    assert policy.choose_victims(SIZE, (), [KEYS[250]]) == (), "there are only blocks to keep, and second copies"
    assert policy.choose_victims(100 * SIZE, (), [KEYS[300]]), "it is about to be read here"
    assert policy.choose_victims(101 * SIZE, (), [KEYS[300]]) == ()
    policy.note_added(KEYS[1500], SIZE)
    assert policy.choose_victims(SIZE, (), [KEYS[250]]) == [KEYS[1500]]
    standing.set_second_copies("space", None)
    assert policy.choose_victims(SIZE, (), [KEYS[50]]) != (), "they are copies like others then"
