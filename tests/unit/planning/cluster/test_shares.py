"""Shares of a ring, and what a change would move."""

import pytest
from xxhash import xxh3_64_intdigest

from cachefs.planning.cluster.homes import member_shares, ring_diff
from cachefs.planning.cluster.rendezvous import RingMember


def member(name: str, weight: float = 1.0, zone: str = "") -> RingMember:
    return RingMember(name, xxh3_64_intdigest(name.encode()), weight, zone)


FOUR = [member("d", 2.0), member("a"), member("c"), member("b")]


def test_shares_are_about_what_weights_say() -> None:
    found = member_shares(FOUR)
    assert [one.member.id for one in found] == ["a", "b", "c", "d"]
    assert [one.ideal for one in found] == [0.2, 0.2, 0.2, 0.4]
    for one in found:
        assert one.homes == pytest.approx(one.ideal, abs=0.01)
        assert one.seconds == 0
    assert sum(one.homes for one in found) == pytest.approx(1)


def test_second_copies_are_in_other_zones() -> None:
    found = member_shares([member("a", zone="east"), member("b", zone="east"), member("c", zone="west")], replicas=2)
    assert sum(one.seconds for one in found) == pytest.approx(1)
    assert found[2].seconds == pytest.approx(2 / 3, abs=0.01), "all that have their home in the east"
    assert member_shares([member("a")], replicas=2)[0].seconds == 0


def test_a_join_moves_the_part_of_who_joins_and_a_leave_that_of_who_leaves() -> None:
    joined = ring_diff(FOUR, [*FOUR, member("e", 5.0)])
    assert joined.moved == pytest.approx(0.5, abs=0.01)
    assert joined.least == pytest.approx(joined.moved, rel=0.02)
    by_id = {one.member.id: one for one in joined.changes}
    assert by_id["e"].gets == by_id["e"].after == pytest.approx(joined.moved)
    assert by_id["d"].gives == pytest.approx(0.2, abs=0.01)
    assert all(one.gets == 0 for name, one in by_id.items() if name != "e")
    left = ring_diff(FOUR, FOUR[1:])
    assert left.moved == pytest.approx(0.4, abs=0.01)
    assert {one.member.id: one.gives for one in left.changes if one.gives} == {"d": pytest.approx(left.moved)}
    nothing = ring_diff(FOUR, FOUR)
    assert (nothing.moved, nothing.least) == (0, pytest.approx(0, abs=0.01))


def test_from_and_to_an_empty_ring() -> None:
    assert ring_diff([], FOUR).moved == 1
    gone = ring_diff(FOUR, [])
    assert (gone.moved, gone.least) == (1, 0)
    assert member_shares([]) == []
