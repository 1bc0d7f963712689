"""How many connections a server takes: strangers do not keep members out."""

from cachefs_daemon.peers.crowd import MOST_OF_MEMBER, MOST_UNKNOWN, MOST_UNKNOWN_OF_ADDRESS, Crowd


def test_one_address_cannot_keep_others_out() -> None:
    crowd = Crowd()
    refused = [crowd.enter("10.0.0.66") for _ in range(1000)]
    assert sum(not why for why in refused) == MOST_UNKNOWN_OF_ADDRESS
    assert not crowd.enter("10.0.0.1")
    assert not crowd.recognise("10.0.0.1", "a")


def test_many_addresses_cannot_keep_members_out_that_are_there() -> None:
    crowd = Crowd()
    assert not crowd.enter("10.0.0.1")
    assert not crowd.recognise("10.0.0.1", "a")
    taken = sum(not crowd.enter(f"10.1.{n // 250}.{n % 250}") for n in range(5000))
    assert taken == MOST_UNKNOWN
    crowd.leave("10.1.0.0", "")
    assert not crowd.enter("10.0.0.1")


def test_one_member_has_a_bound_and_everything_is_given_back() -> None:
    crowd = Crowd()
    for number in range(MOST_OF_MEMBER + 1):
        assert not crowd.enter("10.0.0.1")
        assert bool(crowd.recognise("10.0.0.1", "a")) is (number == MOST_OF_MEMBER)
    for _ in range(MOST_OF_MEMBER + 1):
        crowd.leave("10.0.0.1", "a")
    assert crowd.size == 0
    assert not crowd.enter("10.0.0.1")
    assert not crowd.recognise("10.0.0.1", "a")
