"""How many connections a server takes: strangers do not keep members out."""

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from cachefs_daemon.peers.crowd import MOST, MOST_OF_MEMBER, MOST_UNKNOWN, MOST_UNKNOWN_OF_ADDRESS, Caller, Crowd


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with closing(socket.socket()) as one:
        yield one


def test_for_one_more_from_an_address_its_oldest_stranger_goes(connection: socket.socket) -> None:
    crowd = Crowd()
    neighbour = Caller("10.0.0.1", connection)
    assert crowd.enter(neighbour) is None
    strangers = [Caller("10.0.0.66", connection) for _ in range(1000)]
    gone = [crowd.enter(one) for one in strangers]
    assert gone == [None] * MOST_UNKNOWN_OF_ADDRESS + strangers[:-MOST_UNKNOWN_OF_ADDRESS]
    # Also a member that shares it comes in.
    member = Caller("10.0.0.66", connection)
    assert crowd.enter(member) is strangers[-MOST_UNKNOWN_OF_ADDRESS]
    for one in (member, neighbour):
        assert not crowd.recognise(one, "a")


def test_many_addresses_cannot_keep_members_out(connection: socket.socket) -> None:
    crowd = Crowd()
    there = Caller("10.0.0.1", connection)
    assert crowd.enter(there) is None
    assert not crowd.recognise(there, "a")
    strangers = [Caller(f"10.1.{n // 250}.{n % 250}", connection) for n in range(1000)]
    gone = [crowd.enter(one) for one in strangers]
    assert gone == [None] * MOST_UNKNOWN + strangers[:-MOST_UNKNOWN]
    another = Caller("10.0.0.2", connection)
    assert crowd.enter(another) is strangers[-MOST_UNKNOWN]
    assert not crowd.recognise(another, "b")


def test_there_is_a_bound_of_all(connection: socket.socket) -> None:
    crowd = Crowd()
    callers = [Caller("10.0.0.1", connection) for _ in range(MOST)]
    for number, one in enumerate(callers):
        assert crowd.enter(one) is None
        assert not crowd.recognise(one, f"{number % 100}")
    more = Caller("10.0.0.1", connection)
    assert crowd.enter(more) is more
    crowd.leave(callers[0], "0")
    assert crowd.enter(more) is None
    assert crowd.size == MOST


def test_one_member_has_a_bound_and_everything_is_given_back(connection: socket.socket) -> None:
    crowd = Crowd()
    callers = [Caller("10.0.0.1", connection) for _ in range(MOST_OF_MEMBER + 1)]
    for number, one in enumerate(callers):
        assert crowd.enter(one) is None
        assert bool(crowd.recognise(one, "a")) is (number == MOST_OF_MEMBER)
    for one in callers:
        crowd.leave(one, "a")
    assert crowd.size == 0
    assert crowd.enter(callers[0]) is None
    assert not crowd.recognise(callers[0], "a")
