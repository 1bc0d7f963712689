"""Decisions of the service, on nodes that say what tests want."""

import asyncio
import time

from cachefs_scheduler.config import DatasetSection
from cachefs_scheduler.duties import advisor as advising

from cachefs.observe_messages import OrderKind
from cachefs.scheduling_messages import Ask, Policy
from tests.unit.scheduler.duties.viewed import SIZE, Duties


def ask(job: str, dataset: str = "set", policy: Policy = Policy.SUSPEND, jobs: int = 1) -> Ask:
    return Ask(job=job, dataset=dataset, policy=policy, max_jobs_per_copy=jobs)


def test_a_node_that_drains_does_not_make_all_others_alike() -> None:
    duties = Duties()
    duties.say("old", {"set": 1.0}, state="draining")
    duties.say("half", {"set": 0.5})
    duties.say("none", {"set": 0.0})
    scores = duties.advisor.rank(ask("j")).scores
    assert scores["old"] == 0.0
    assert scores["half"] == 1.0
    assert 0 < scores["none"] < scores["half"]


def test_require_refuses_nobody_for_a_node_that_cannot_give_what_it_has() -> None:
    duties = Duties()
    duties.say("old", {"set": 1.0}, state="draining")
    duties.say("dead", {"set": 1.0}, state="away")
    duties.say("none", {"set": 0.0})
    assert duties.advisor.rank(ask("j", policy=Policy.REQUIRE)).refused == {}
    duties.say("half", {"set": 0.5})
    assert "none" in duties.advisor.rank(ask("j", policy=Policy.REQUIRE)).refused


def test_a_preload_ends_whose_job_has_ended_before_the_node_was_told() -> None:
    async def told() -> None:
        duties = Duties()
        duties.daemons.slow = OrderKind.WARM
        duties.say("n", {"set": 0.0})
        duties.advisor.placed("j", ["n"], ask("j"))
        await asyncio.sleep(0)
        duties.advisor.ended("j")
        duties.daemons.go.set()
        for _ in range(10):
            await asyncio.sleep(0)
        kinds = [order.kind for _, order in duties.daemons.orders]
        assert kinds[-1] == OrderKind.STOP
        assert OrderKind.WARM in kinds

    asyncio.run(told())


def test_a_job_whose_nodes_are_gone_does_not_keep_its_slot() -> None:
    duties = Duties()
    duties.say("n", {"set": 1.0})
    duties.advisor.placed("j", ["gone"], ask("j"))
    known = duties.book.get("j")
    assert known is not None
    known.touched -= 10_000
    duties.advisor.forget_lapsed()
    assert duties.book.get("j") is None


def test_a_job_that_gets_no_node_gives_its_slot_to_the_next_one() -> None:
    duties = Duties()
    duties.say("n", {"set": 1.0})
    assert duties.advisor.admit(ask("large")).go
    assert not duties.advisor.admit(ask("small")).go
    known = duties.book.get("large")
    assert known is not None
    known.admitted -= advising.START_WITHIN + 1
    duties.advisor.forget_lapsed()
    duties.advisor.settle()
    assert duties.advisor.admit(ask("small")).go
    assert duties.advisor.admit(ask("large")).go  # it may start still


def test_many_jobs_that_wait_are_asked_for_in_little_time() -> None:
    duties = Duties()
    for number in range(50):
        duties.say(f"n{number}", {"set": 1.0})
    duties.advisor.admit(ask("first", jobs=1))
    looks = 0
    give_out = duties.advisor.turns.give_out

    def counted(now: float) -> list[object]:
        nonlocal looks
        looks += 1
        return list(give_out(now))

    duties.advisor.turns.give_out = counted  # type: ignore[method-assign,assignment]
    for number in range(60):
        duties.advisor.admit(ask(f"j{number}", jobs=1))
    begun = looks
    for number in range(60):
        duties.advisor.admit(ask(f"j{number}", jobs=1))
    assert looks == begun  # who waits already is told what is known


def test_least_recently_used_goes_first_and_nothing_that_a_job_was_placed_on() -> None:
    async def evicted() -> None:
        lru = DatasetSection(cleanup="lru")
        duties = Duties(a=lru, b=lru, c=lru)
        duties.say("n", {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, jobs=("a",), room=3)
        duties.cleaning.step()
        duties.say("n", {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, room=3)
        now = time.monotonic()
        duties.advisor.reads.note("n", "s-a", now - 10)
        duties.advisor.reads.note("n", "s-b", now - 1000)
        duties.advisor.reads.note("n", "s-c", now - 5000)
        duties.advisor.placed("other", ["n"], ask("other", "c"))  # it has not begun to read
        duties.advisor.placed("j", ["n"], ask("j", "d"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert duties.daemons.of(OrderKind.EVICT) == [("n", "b")]

    asyncio.run(evicted())


def test_a_copy_that_a_job_was_placed_on_is_not_let_go() -> None:
    duties = Duties()
    duties.say("n", {"set": 1.0})
    duties.advisor.placed("j", ["n"], ask("j"))
    assert not duties.advisor.placement.release("set", "s-set", "n")


def test_two_datasets_with_one_snapshot_have_the_careful_policy() -> None:
    duties = Duties(a=DatasetSection(cleanup="ttl", ttl=1.0), b=DatasetSection(cleanup="pin"))
    rules = duties.policies.rules({"a": "s", "b": "s", "c": "t"})
    assert rules["s"].kind == "pin"


def test_orders_of_pins_are_bounded_however_many_nodes_there_are() -> None:
    async def pinned() -> None:
        duties = Duties(set=DatasetSection(cleanup="pin"))
        duties.daemons.slow = OrderKind.PIN
        for number in range(300):
            duties.say(f"n{number}", {"set": 0.5})
        duties.cleaning.step()
        under_way = len(asyncio.all_tasks()) - 1
        assert 0 < under_way <= 64
        await duties.warmings.close()

    asyncio.run(pinned())


def test_snapshots_that_no_node_has_any_more_are_forgotten() -> None:
    duties = Duties()
    duties.say("n", {f"set{number}": 1.0 for number in range(5)})
    duties.say("n", {"set0": 1.0})
    duties.view.forget_unknown({"s-set1"})
    known = [number for number in range(5) if duties.view.cluster.snapshot(f"s-set{number}") is not None]
    assert known == [0, 1]
    assert duties.view.cluster.holders("s-set0")["n"].bytes == SIZE


def test_a_job_that_runs_already_is_not_preloaded_by_a_service_that_hears_of_it_late() -> None:
    async def told() -> None:
        duties = Duties()
        duties.say("n", {"set": 0.5}, jobs=("set",))
        duties.advisor.placed("j", ["n"], ask("j"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert duties.daemons.orders == []

    asyncio.run(told())
