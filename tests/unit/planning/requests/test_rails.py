"""Which rail a request takes: the one that brings it first, the near one of two that are equal, and never a slow one
only since the fast one is full."""

import heapq

from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.requests.rails import NEAR_TIE, RailLoad, RailRate, choose_rail

sizes = st.integers(0, 64 << 20)
rates = st.one_of(st.just(0.0), st.floats(1e5, 1e11))
rails = st.builds(
    RailLoad,
    in_flight=sizes,
    rate=rates,
    card_in_flight=sizes,
    card_rate=rates,
    distance=st.sampled_from([0.0, 10.0, 15.5, 21.0, 32.0]),
    used_at=st.floats(0, 1e6),
    has_room=st.booleans(),
)
measured = st.builds(
    RailLoad, in_flight=sizes, rate=st.floats(1e5, 1e11), card_in_flight=sizes, card_rate=st.floats(1e5, 1e11)
)
lengths = st.integers(1, 4 << 20)


def seconds(rail: RailLoad, length: int) -> float:
    return max((rail.in_flight + length) / rail.rate, (rail.card_in_flight + length) / rail.card_rate)


@given(st.lists(rails, min_size=1, max_size=8), lengths)
def test_a_rail_has_room_if_it_is_chosen_and_none_is_not_chosen_where_all_have_room(
    loads: list[RailLoad], length: int
) -> None:
    at = choose_rail(loads, length)
    if at is None:
        assert not all(load.has_room for load in loads)
    else:
        assert loads[at].has_room


@given(st.lists(measured, min_size=1, max_size=8), lengths)
def test_the_chosen_rail_brings_the_block_first_or_nearly_so(loads: list[RailLoad], length: int) -> None:
    at = choose_rail(loads, length)
    assert at is not None
    best = min(seconds(load, length) for load in loads)
    assert seconds(loads[at], length) <= best * NEAR_TIE


@given(st.lists(measured, min_size=2, max_size=8), lengths, sizes)
def test_bytes_on_a_rail_never_draw_more_to_it(loads: list[RailLoad], length: int, more: int) -> None:
    at = choose_rail(loads, length)
    for other in range(len(loads)):
        if other != at:
            load = loads[other]
            heavier = RailLoad(load.in_flight + more, load.rate, load.card_in_flight + more, load.card_rate)
            changed = choose_rail([*loads[:other], heavier, *loads[other + 1 :]], length)
            assert changed is not None
            # The rail may only win a near tie that it was in before.
            assert changed != other or seconds(load, length) <= NEAR_TIE * min(seconds(one, length) for one in loads)


@given(measured, st.permutations([10.0, 17.0, 21.0]), lengths)
def test_the_nearest_of_equal_rails_is_chosen(load: RailLoad, distances: list[float], length: int) -> None:
    loads = [RailLoad(load.in_flight, load.rate, load.card_in_flight, load.card_rate, each) for each in distances]
    assert choose_rail(loads, length) == distances.index(10.0)


@given(measured, lengths)
def test_a_near_rail_that_is_clearly_slower_is_not_chosen(load: RailLoad, length: int) -> None:
    slower = RailLoad(2 * load.in_flight + length, load.rate, 2 * load.card_in_flight + length, load.card_rate, 10.0)
    far = RailLoad(load.in_flight, load.rate, load.card_in_flight, load.card_rate, 32.0)
    if seconds(slower, length) > NEAR_TIE * seconds(far, length):
        assert choose_rail([slower, far], length) == 1


def test_a_request_waits_for_a_fast_rail_rather_than_take_a_slow_one() -> None:
    fast = RailLoad(1 << 20, 1e9, 1 << 20, 1e9, has_room=False)
    slow = RailLoad(0, 1e7, 0, 1e7)
    assert choose_rail([fast, slow], 128 << 10) is None
    assert choose_rail([RailLoad(32 << 20, 1e9, 32 << 20, 1e9, has_room=False), slow], 128 << 10) == 1


def test_a_rail_without_a_measurement_is_tried_like_the_best() -> None:
    busy = RailLoad(1 << 20, 1e9, 1 << 20, 1e9)
    assert choose_rail([busy, RailLoad()], 1 << 20) == 1
    assert choose_rail([RailLoad(used_at=2.0), RailLoad(used_at=1.0)], 1 << 20) == 1
    assert choose_rail([RailLoad(in_flight=1 << 20), RailLoad(used_at=9.0)], 1 << 10) == 1


@given(st.lists(st.floats(2.5e8, 1e9), min_size=2, max_size=4), st.integers(64 << 10, 1 << 20))
def test_the_bytes_of_rails_follow_their_rates(speeds: list[float], length: int) -> None:
    """Together the rails deliver the sum of their rates. Four requests for each rail are always on the way."""
    now, sent, free_at, in_flight = 0.0, [0] * len(speeds), [0.0] * len(speeds), [0] * len(speeds)
    arrivals: list[tuple[float, int]] = []
    for _ in range(400):
        if len(arrivals) == 4 * len(speeds):
            now, at = heapq.heappop(arrivals)
            in_flight[at] -= length
        loads = [RailLoad(count, speed, count, speed) for count, speed in zip(in_flight, speeds, strict=True)]
        chosen = choose_rail(loads, length)
        assert chosen is not None
        free_at[chosen] = max(now, free_at[chosen]) + length / speeds[chosen]
        in_flight[chosen] += length
        sent[chosen] += length
        heapq.heappush(arrivals, (free_at[chosen], chosen))
    for count, speed in zip(sent, speeds, strict=True):
        assert abs(count - 400 * length * speed / sum(speeds)) <= 8 * length


def test_a_rate_is_what_came_while_bytes_were_in_flight() -> None:
    rate = RailRate()
    assert rate.value(0.0) == 0.0
    rate.note_request(1.0)
    for step in range(1, 11):
        rate.note_received(100_000, 1.0 + step * 0.01)
    assert 0.9e7 < rate.value(1.2) < 1.6e7
    rate.note_idle()
    rate.note_received(1000, 5.0)  # nothing was known to be on the way
    assert rate.value(5.0) > 0.9e7
    assert rate.value(100.0) == 0.0, "the rail is measured anew"
