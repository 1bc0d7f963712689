from cachefs.planning.eviction.policies.fifo import Fifo
from cachefs.planning.eviction.policies.lfu import Lfu


def used(policy: Lfu | Fifo, keys: bytes) -> None:
    for key in keys:
        policy.note_accessed(bytes([key]))


def filled(policy: Lfu | Fifo) -> Lfu | Fifo:
    for key in (b"a", b"b", b"c", b"d"):
        policy.note_added(key, 10)
    return policy


def test_lfu_gives_up_what_was_used_least_and_of_those_the_longest_unused() -> None:
    policy = filled(Lfu())
    used(policy, b"abbcacax")
    assert policy.choose_victims(40, ()) == [b"d", b"b", b"c", b"a"]
    assert policy.choose_victims(11, {b"d"}) == [b"b", b"c"]
    assert policy.choose_victims(40, {b"d"}) == ()


def test_lfu_forgets_what_was_removed() -> None:
    policy = filled(Lfu())
    used(policy, b"aa")
    policy.note_removed(b"a")
    policy.note_removed(b"a")
    policy.note_added(b"a", 5)
    assert policy.bytes == 35
    assert policy.choose_victims(35, ()) == [b"b", b"c", b"d", b"a"]


def test_fifo_gives_up_what_came_first_however_often_it_was_used() -> None:
    policy = filled(Fifo())
    used(policy, b"aaab")
    assert policy.choose_victims(20, ()) == [b"a", b"b"]
