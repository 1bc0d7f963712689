import pytest

from cachefs.planning.scheduling.copies import CleaningRule, evictions_for_room, expired_evictions
from cachefs.planning.scheduling.facts import NodeCopy, NodeFacts

LRU, TTL, PIN = CleaningRule("lru"), CleaningRule("ttl", 100.0), CleaningRule("pin")


def facts(age=0.0, jobs=None, **idle):
    copies = {name: NodeCopy(0, 10, idle=seconds, pinned=name == "pinned") for name, seconds in idle.items()}
    return NodeFacts("n", capacity=100, used=10 * len(copies), copies=copies, jobs=jobs or {}, age=age)


def test_what_nobody_has_read_for_long_goes():
    rules = dict.fromkeys(["old", "new", "read", "pinned"], TTL) | {"kept": CleaningRule(), "lru": LRU}
    node = facts(old=101, new=99, read=500, pinned=500, kept=500, lru=500, unruled=500, jobs={"read": 1})
    assert [(one.snapshot, one.bytes) for one in expired_evictions([node], rules)] == [("old", 10)]
    assert "101 s" in expired_evictions([node], rules)[0].reason


def test_a_node_that_is_silent_is_left_alone():
    assert expired_evictions([facts(old=1e6, age=200)], {"old": TTL}) == ()
    # But one that is well says nothing for half a minute.
    assert expired_evictions([facts(old=1e6, age=25)], {"old": CleaningRule("ttl", 1.0)}) != ()


def test_room_is_made_of_what_was_read_longest_ago_and_no_more():
    node = facts(a=5, b=50, c=500, d=5000, pinned=9e9, ours=9e9)
    rules = dict.fromkeys(("a", "b", "c", "pinned", "ours"), LRU) | {"d": PIN}
    assert evictions_for_room(node, 40, rules) == ()
    assert [one.snapshot for one in evictions_for_room(node, 55, rules, keep="ours")] == ["c", "b"]
    assert [one.snapshot for one in evictions_for_room(node, 50, rules)] == ["ours"]
    assert evictions_for_room(node, 500, rules) == ()


def test_a_ttl_has_a_length():
    with pytest.raises(ValueError, match="TTL"):
        CleaningRule("ttl")
