import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.planning.scheduling.copies import SlotRequest, choose_next, order_waiting


def waiting(job, user="u", priority=0, since=0.0, snapshot="s"):
    return SlotRequest(job, snapshot, user, priority, since)


def order(jobs, running=None, now=100.0, **more):
    return [one.job for one in order_waiting(jobs, running or {}, now, **more)]


def test_priority_then_share_then_age():
    jobs = [waiting("old"), waiting("high", priority=5, since=9), waiting("young", since=50)]
    assert order(jobs) == ["high", "old", "young"]
    assert order([waiting("a1", "a"), waiting("a2", "a", since=1), waiting("b1", "b", since=50)]) == ["a1", "b1", "a2"]
    assert order([waiting("a1", "a"), waiting("b1", "b", since=50)], {"a": 1}) == ["b1", "a1"]


def test_who_waits_long_goes_first():
    jobs = [waiting("low", priority=-5), waiting("high", priority=5, since=50)]
    assert order(jobs, now=100, max_wait=200) == ["high", "low"]
    assert order(jobs, now=100, max_wait=80) == ["low", "high"]


def test_only_those_with_a_slot_go():
    jobs = [waiting("s1"), waiting("s2", since=1), waiting("t1", snapshot="t", since=2), waiting("x", snapshot="x")]
    assert [one.job for one in choose_next(jobs, {"s": 1, "t": 5}, {}, 10.0)] == ["s1", "t1"]
    assert choose_next(jobs, {"s": 0}, {}, 10.0) == []


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3), st.integers(0, 40)), min_size=1, max_size=40),
    st.integers(5, 30),
)
def test_nobody_starves(jobs, patience):
    """One slot each second, while a user with the highest priority asks for one each second too."""
    queue = {f"{i}": waiting(f"{i}", user, priority, float(since)) for i, (user, priority, since) in enumerate(jobs)}
    started: dict[str, float] = {}
    now = 0.0
    while len(started.keys() & queue.keys()) < len(queue):
        greedy = waiting(f"greedy{now}", "greedy", 9, now)
        queued = [one for name, one in queue.items() if name not in started and one.since <= now]
        chosen = choose_next([*queued, greedy], {"s": 1}, {}, now, patience)
        assert len(chosen) == 1
        started[chosen[0].job] = now
        now += 1
        # Once a job is overdue, only those go before it that waited longer.
        assert now <= 41 + patience + len(jobs) + 1
    for name, one in queue.items():
        older = sum(other.since <= one.since for other in queue.values())
        assert started[name] <= one.since + patience + 1 + older


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.integers(0, 9)), max_size=30), st.integers(0, 9)
)
def test_everybody_has_one_turn(jobs, patience):
    queue = [waiting(f"{i}", user, priority, float(since)) for i, (user, priority, since) in enumerate(jobs)]
    found = order_waiting(queue, {"a": 3}, 9.0, patience)
    assert sorted(one.job for one in found) == sorted(one.job for one in queue)


@pytest.mark.parametrize("patience", [1e9, 10.0], ids=["in time", "overdue"])
def test_who_asks_for_a_thousand_slots_delays_nobody_by_more_than_one(patience):
    # One slot: nobody has a job running when it is free, and the flood is older.
    queue = [waiting(f"flood{number}", "a") for number in range(1000)]
    queue += [waiting("b1", "b", since=20), waiting("b2", "b", since=20), waiting("c1", "c", since=21)]
    served, started = {}, []
    for turn in range(8):
        now = 100.0 + turn
        [chosen] = choose_next(queue, {"s": 1}, {}, now, patience, served)
        queue.remove(chosen)
        served[chosen.user] = now
        started.append(chosen.user)
    assert started == ["a", "b", "c", "a", "b", "a", "a", "a"]


def test_new_users_do_not_keep_one_waiting_who_had_a_slot():
    served = {"a": 100.0}
    early = [waiting("a1", "a"), waiting("n1", "new", since=50)]
    assert [one.user for one in order_waiting(early, {}, 200.0, 9, served)] == ["new", "a"]
    late = [waiting("a1", "a"), waiting("n1", "new", since=101)]
    assert [one.user for one in order_waiting(late, {}, 200.0, 9, served)] == ["a", "new"]
