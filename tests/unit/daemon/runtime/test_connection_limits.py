"""How many connections a server keeps, and which one goes: neither strangers nor idle members keep members out."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from cachefs_daemon.runtime.connection_limits import ConnectionBounds, ConnectionLimits

BOUNDS = ConnectionBounds(total=200, unknown=100, unknown_of_address=20, of_member=10)


@dataclass(eq=False)
class Caller:
    address: str


def limits(bounds: ConnectionBounds = BOUNDS) -> ConnectionLimits[Caller]:
    return ConnectionLimits(bounds)


def test_for_one_more_from_an_address_its_oldest_stranger_goes() -> None:
    found, neighbour = limits(), Caller("10.0.0.1")
    assert found.add(neighbour) is None
    strangers = [Caller("10.0.0.66") for _ in range(80)]
    assert [found.add(one) for one in strangers] == [None] * 20 + strangers[:-20]
    # Also a member that shares the address comes in.
    member = Caller("10.0.0.66")
    assert found.add(member) is strangers[-20]
    assert found.identify(member, "a")
    assert found.identify(neighbour, "a")


def test_many_addresses_cannot_keep_members_out() -> None:
    found, there = limits(), Caller("10.0.0.1")
    assert found.add(there) is None
    assert found.identify(there, "a")
    strangers = [Caller(f"10.1.{n // 250}.{n % 250}") for n in range(150)]
    assert [found.add(one) for one in strangers] == [None] * 100 + strangers[:-100]
    another = Caller("10.0.0.2")
    assert found.add(another) is strangers[-100]
    assert found.identify(another, "b")


def full(found: ConnectionLimits[Caller]) -> list[Caller]:
    """Members' connections, as many as there may be."""
    callers = [Caller(f"10.0.0.{number}") for number in range(BOUNDS.total)]
    for number, one in enumerate(callers):
        assert found.add(one) is None
        assert found.identify(one, f"{number % 50}")
    return callers


def test_in_a_full_house_the_member_that_has_been_idle_for_longest_goes() -> None:
    found = limits()
    callers = full(found)
    for one in (*callers[7:], *callers[:7]):
        found.mark_idle(one)
    found.mark_busy(callers[7])  # it is asked again
    found.mark_busy(callers[8])
    found.mark_idle(callers[8])  # and has been idle for the shortest time now
    for number in range(3):
        newcomer = Caller("10.9.9.9")
        assert found.add(newcomer) is callers[9 + number]
        assert found.identify(newcomer, "new")
    for one in callers[9:12]:
        assert found.identify(one, "9")  # what was on its way is answered, or not
        found.remove(one)
        found.remove(one)
    assert len(found) == BOUNDS.total


def test_a_stranger_goes_before_a_member() -> None:
    found = limits()
    callers = full(found)
    found.remove(callers[0])
    stranger = Caller("10.8.8.8")
    assert found.add(stranger) is None
    for one in callers[1:]:
        found.mark_idle(one)
    assert found.add(Caller("10.9.9.9")) is stranger


def test_a_newcomer_is_refused_where_all_others_are_in_use() -> None:
    found = limits()
    callers, late = full(found), Caller("10.9.9.9")
    assert found.add(late) is late
    assert len(found) == BOUNDS.total
    found.remove(callers[0])
    assert found.add(late) is None


def test_one_member_has_a_bound_and_everything_is_given_back() -> None:
    found = limits()
    callers = [Caller("10.0.0.1") for _ in range(BOUNDS.of_member + 1)]
    for number, one in enumerate(callers):
        assert found.add(one) is None
        assert found.identify(one, "a") is (number < BOUNDS.of_member)
    for one in callers:
        found.remove(one)
    assert len(found) == 0
    assert found.add(callers[0]) is None
    assert found.identify(callers[0], "a")


@given(st.lists(st.tuples(st.sampled_from("erulx"), st.integers(0, 30), st.integers(0, 3)), max_size=200))
def test_whatever_happens_the_bounds_hold(steps: list[tuple[str, int, int]]) -> None:
    bounds = ConnectionBounds(total=8, unknown=5, unknown_of_address=3, of_member=4)
    found = ConnectionLimits[Caller](bounds)
    callers = [Caller(f"10.0.0.{number % 3}") for number in range(31)]
    there: set[Caller] = set()
    for what, number, member in steps:
        one = callers[number]
        if what == "e" and one not in there:
            leaves = found.add(one)
            if leaves is not one:
                there.add(one)
            if leaves is not None and leaves is not one:
                assert leaves in there
                there.discard(leaves)
                found.remove(leaves)
        elif what == "r" and one in there:
            found.identify(one, str(member))
        elif what == "u":
            found.mark_busy(one)
        elif what == "x":
            found.mark_idle(one)
        elif what == "l":
            found.remove(one)
            there.discard(one)
        assert len(found) == len(there) <= bounds.total
