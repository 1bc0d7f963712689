"""Tiers of sizes only."""

import pytest

from cachefs.planning.eviction.policies.lru import Lru, UseOrder
from cachefs.planning.eviction.policies.minio import Minio
from cachefs.planning.eviction.simulated_tiers import EvictedBlock, SimulatedTier, SimulatedTiers


def full_tier() -> SimulatedTier:
    tier = SimulatedTier(Lru(), 30)
    for key in (b"a", b"b", b"c"):
        assert tier.make_room(key, 10) == []
        assert tier.add_block(key, 10)
    return tier


def test_room_is_made_of_what_the_policy_names() -> None:
    tier = full_tier()
    assert not tier.add_block(b"d", 10)
    assert tier.make_room(b"d", 10) == [EvictedBlock(b"a", 10)]
    assert tier.add_block(b"d", 10)
    assert (dict(tier.sizes), tier.free) == ({b"b": 10, b"c": 10, b"d": 10}, 0)


def test_more_is_evicted_together_only_where_something_must_be() -> None:
    tier = full_tier()
    assert tier.remove_block(b"b") == 10
    assert tier.make_room(b"d", 10, step=20) == []
    tier.add_block(b"d", 10)
    assert tier.make_room(b"e", 5, step=20) == [EvictedBlock(b"a", 10), EvictedBlock(b"c", 10)]
    assert (b"a" in tier, b"d" in tier, tier.free) == (False, True, 20)


def test_a_policy_that_never_evicts_makes_no_room() -> None:
    tier = SimulatedTier(Minio(), 10)
    tier.add_block(b"a", 10)
    assert not tier.can_admit(b"b", 10)
    assert tier.make_room(b"b", 10) == []


def test_what_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(KeyError):
        full_tier().remove_block(b"x")


def test_what_one_tier_evicts_the_next_one_takes() -> None:
    uses = UseOrder()
    node = SimulatedTiers([Lru(uses), Lru(uses)], [20, 10], uses)
    assert [node.read_block(key, 10) for key in (b"a", b"b", b"c", b"a")] == [False, False, False, True]
    assert [set(tier.sizes) for tier in node.tiers] == [{b"b", b"c"}, {b"a"}]
    node.read_block(b"d", 10)  # evicts b, for which a does not go: it was used later
    assert [set(tier.sizes) for tier in node.tiers] == [{b"c", b"d"}, {b"a"}]
    node.evict_block(b"a")
    assert (node.tiers[1].free, uses.moving_uses) == (10, {})
