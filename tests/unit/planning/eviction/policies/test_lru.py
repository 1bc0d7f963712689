from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.eviction.policies.lru import Lru, UseOrder
from cachefs.planning.eviction.simulated_tiers import SimulatedTiers

KEYS = st.sampled_from([b"%d" % number for number in range(8)])
EVENTS = st.lists(st.tuples(st.sampled_from(["added", "accessed", "removed"]), KEYS, st.integers(1, 100)))


@given(EVENTS, st.integers(0, 500), st.sets(KEYS))
def test_victims_are_the_least_recently_used_that_are_not_pinned(
    events: list[tuple[str, bytes, int]], size: int, pinned: set[bytes]
) -> None:
    policy, order = Lru(), list[tuple[bytes, int]]()
    for event, key, weight in events:
        old = dict(order).get(key)
        if event == "added":
            policy.note_added(key, weight)
        elif event == "accessed":
            policy.note_accessed(key)
        else:
            policy.note_removed(key)
        order = [pair for pair in order if (event == "accessed" and old is None) or pair[0] != key]
        if event == "added":
            order.append((key, weight))
        elif event == "accessed" and old is not None:
            order.append((key, old))
    assert policy.bytes == sum(weight for _, weight in order)

    expected, total = [], 0
    for key, weight in order:
        if total < size and key not in pinned:
            expected.append(key)
            total += weight
    assert list(policy.choose_victims(size, pinned)) == (expected if total >= size else [])


def test_untouched_it_is_first_in_first_out() -> None:
    policy = Lru()
    for key in (b"a", b"b", b"c"):
        policy.note_added(key, 10)
    assert policy.choose_victims(15, ()) == [b"a", b"b"]


def test_pinned_blocks_are_passed_over_and_back_in_the_order_once_unpinned() -> None:
    policy = Lru()
    for key in (b"a", b"b", b"c"):
        policy.note_added(key, 10)
    assert policy.choose_victims(10, {b"a"}) == [b"b"]
    assert sorted(policy.choose_victims(30, ())) == [b"a", b"b", b"c"]


@given(
    capacities=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    reads=st.lists(
        st.tuples(st.sampled_from([b"%d" % number for number in range(16)]), st.integers(0, 9)), max_size=99
    ),
)
def test_tiers_together_are_one_list(capacities: list[int], reads: list[tuple[bytes, int]]) -> None:
    uses = UseOrder()
    tiers = SimulatedTiers([Lru(uses) for _ in capacities], capacities, uses)
    order = list[bytes]()
    for key, evicted in reads:
        known = key in order
        assert tiers.read_block(key, 1) == known
        if known:
            order.remove(key)
        order.append(key)
        order = order[-sum(capacities) :]
        if evicted == 0:
            tiers.evict_block(key)
            order.remove(key)
        assert {key for tier in tiers.tiers for key in tier.sizes} == set(order)
        assert not uses.moving_uses


def test_what_came_from_another_tier_goes_by_its_use_there() -> None:
    uses = UseOrder()
    memory, ssd = Lru(uses), Lru(uses)
    for key in (b"a", b"b"):
        memory.note_added(key, 10)
    ssd.note_added(b"c", 10)
    memory.note_accessed(b"b")
    for key in (b"a", b"b"):
        memory.note_removed(key)
    assert ssd.choose_victims(10, (), [b"a"]) == ()
    assert ssd.choose_victims(10, (), [b"b"]) == [b"c"]
    for key in (b"b", b"a"):
        ssd.note_added(key, 10)
    assert ssd.choose_victims(30, ()) == [b"a", b"c", b"b"]


def test_removed_blocks_take_no_memory() -> None:
    policy = Lru()
    for number in range(20_000):
        policy.note_added(b"%d" % (number % 5000), 1)
        policy.note_removed(b"%d" % (number % 5000))
    assert len(policy._queue) < 2000
