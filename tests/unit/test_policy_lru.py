from cachefs_daemon.policy.lru import Lru
from hypothesis import given
from hypothesis import strategies as st

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
            policy.added(key, weight)
        elif event == "accessed":
            policy.accessed(key)
        else:
            policy.removed(key)
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
    assert list(policy.victims(size, pinned)) == (expected if total >= size else [])


def test_untouched_it_is_first_in_first_out() -> None:
    policy = Lru()
    for key in (b"a", b"b", b"c"):
        policy.added(key, 10)
    assert policy.victims(15, ()) == [b"a", b"b"]


def test_pinned_blocks_are_passed_over_and_back_in_the_order_once_unpinned() -> None:
    policy = Lru()
    for key in (b"a", b"b", b"c"):
        policy.added(key, 10)
    assert policy.victims(10, {b"a"}) == [b"b"]
    assert sorted(policy.victims(30, ())) == [b"a", b"b", b"c"]
