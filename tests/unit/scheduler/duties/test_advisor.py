"""Decisions of the service, on nodes that say what tests want."""

import asyncio
import time

import msgspec
import pytest

from cachefs.observe_messages import CommandKind
from cachefs.scheduling_messages import PlacementPolicy, PlacementRequest
from cachefs_scheduler.config import DatasetSection
from cachefs_scheduler.duties import advisor as advising
from cachefs_scheduler.duties import node_warmups as warming_up
from tests import virtual_time
from tests.unit.scheduler.duties.viewed import SIZE, Duties


def ask(
    job: str, dataset: str = "set", policy: PlacementPolicy = PlacementPolicy.SUSPEND, jobs: int = 1
) -> PlacementRequest:
    return PlacementRequest(job=job, dataset=dataset, policy=policy, max_jobs_per_copy=jobs)


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
    assert duties.advisor.rank(ask("j", policy=PlacementPolicy.REQUIRE)).refused == {}
    duties.say("half", {"set": 0.5})
    assert "none" in duties.advisor.rank(ask("j", policy=PlacementPolicy.REQUIRE)).refused


def test_a_preload_ends_whose_job_has_ended_before_the_node_was_told() -> None:
    async def told() -> None:
        duties = Duties()
        duties.daemons.slow = CommandKind.WARM
        duties.say("n", {"set": 0.0})
        duties.advisor.note_placed("j", ["n"], ask("j"))
        await asyncio.sleep(0)
        duties.advisor.note_ended("j")
        duties.daemons.go.set()
        await virtual_time.settle()
        kinds = [order.kind for _, order in duties.daemons.orders]
        assert kinds[-1] == CommandKind.STOP
        assert CommandKind.WARM in kinds

    virtual_time.run(told())


def test_a_job_whose_nodes_are_gone_does_not_keep_its_slot() -> None:
    duties = Duties()
    duties.say("n", {"set": 1.0})
    duties.advisor.note_placed("j", ["gone"], ask("j"))
    known = duties.book.get("j")
    assert known is not None
    known.mentioned_at -= 10_000
    duties.advisor.forget_lapsed()
    assert duties.book.get("j") is None


def test_a_job_that_gets_no_node_gives_its_slot_to_the_next_one() -> None:
    duties = Duties()
    duties.say("n", {"set": 1.0})
    assert duties.advisor.admit(ask("large")).go
    assert not duties.advisor.admit(ask("small")).go
    known = duties.book.get("large")
    assert known is not None
    known.admitted_at -= advising.START_SECONDS + 1
    duties.advisor.forget_lapsed()
    duties.advisor.evaluate_queue()
    assert duties.advisor.admit(ask("small")).go
    assert duties.advisor.admit(ask("large")).go  # it may start still


def test_many_jobs_that_wait_are_asked_for_in_little_time() -> None:
    duties = Duties()
    for number in range(50):
        duties.say(f"n{number}", {"set": 1.0})
    duties.advisor.admit(ask("first", jobs=1))
    looks = 0
    give_out = duties.advisor.queue.admit_waiting

    def counted(now: float) -> list[object]:
        nonlocal looks
        looks += 1
        return list(give_out(now))

    duties.advisor.queue.admit_waiting = counted  # type: ignore[method-assign,assignment]
    for number in range(60):
        duties.advisor.admit(ask(f"j{number}", jobs=1))
    begun = looks
    for number in range(60):
        duties.advisor.admit(ask(f"j{number}", jobs=1))
    assert looks == begun  # who waits already is told what is known


def test_names_that_a_user_makes_up_take_one_slot_of_a_node() -> None:
    duties = Duties(set=DatasetSection(max_jobs_per_copy=2))
    duties.say("n0", {"set": 1.0}, named={f"x{number}~control": "set" for number in range(50)})
    assert duties.advisor.admit(ask("honest", jobs=2)).go
    late = duties.advisor.admit(ask("late", jobs=2))
    assert not late.go
    assert "2 jobs read 1 copy" in late.why


def test_a_job_of_several_nodes_that_no_scheduler_has_told_of_takes_one_slot() -> None:
    duties = Duties(set=DatasetSection(max_jobs_per_copy=2))
    for node in ("n0", "n1", "n2"):
        duties.say(node, {"set": 1.0 if node == "n0" else 0.2}, named={"wide": "set", f"x-{node}": "set"})
    assert duties.advisor.admit(ask("honest", jobs=2)).go
    assert not duties.advisor.admit(ask("late", jobs=2)).go


def test_least_recently_used_goes_first_and_nothing_that_a_job_was_placed_on() -> None:
    async def evicted() -> None:
        lru = DatasetSection(cleanup="lru")
        duties = Duties(a=lru, b=lru, c=lru)
        now = time.monotonic()
        duties.advisor.reads.note_read("s-b", now - 1000)
        duties.advisor.reads.note_read("s-c", now - 5000)
        duties.say("n", {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, jobs=("a",), room=3)
        duties.cleaning.clean_next()
        duties.say("n", {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, room=3)
        duties.advisor.note_placed("other", ["n"], ask("other", "c"))  # it has not begun to read
        duties.advisor.note_placed("j", ["n"], ask("j", "d"))
        await virtual_time.settle()
        assert duties.daemons.of(CommandKind.EVICT) == [("n", "b")]

    virtual_time.run(evicted())


def test_a_copy_that_a_job_was_placed_on_is_not_let_go() -> None:
    duties = Duties()
    duties.say("n", {"set": 1.0})
    duties.advisor.note_placed("j", ["n"], ask("j"))
    assert not duties.advisor.placement.evict_copy("set", "s-set", "n")


def test_two_datasets_with_one_snapshot_have_the_careful_policy() -> None:
    duties = Duties(a=DatasetSection(cleanup="ttl", ttl=1.0), b=DatasetSection(cleanup="pin"))
    rules = duties.policies.cleanup_rules({"a": "s", "b": "s", "c": "t"})
    assert rules["s"].kind == "pin"


def test_orders_of_pins_are_bounded_however_many_nodes_there_are() -> None:
    async def pinned() -> None:
        duties = Duties(set=DatasetSection(cleanup="pin"))
        duties.daemons.slow = CommandKind.PIN
        for number in range(300):
            duties.say(f"n{number}", {"set": 0.5})
        duties.cleaning.clean_next()
        under_way = len(asyncio.all_tasks()) - 1
        assert 0 < under_way <= 64
        await duties.warmings.close()

    virtual_time.run(pinned())


def test_snapshots_that_no_node_has_any_more_are_forgotten() -> None:
    duties = Duties()
    duties.say("n", {f"set{number}": 1.0 for number in range(5)})
    duties.say("n", {"set0": 1.0})
    duties.view.forget_unknown({"s-set1"})
    known = [number for number in range(5) if duties.view.cluster.snapshot_facts(f"s-set{number}") is not None]
    assert known == [0, 1]
    assert duties.view.cluster.holders("s-set0")["n"].bytes == SIZE


def test_a_job_that_runs_already_is_not_preloaded_by_a_service_that_hears_of_it_late() -> None:
    async def told() -> None:
        duties = Duties()
        duties.say("n", {"set": 0.5}, jobs=("set",))
        duties.advisor.note_placed("j", ["n"], ask("j"))
        await virtual_time.settle()
        assert duties.daemons.orders == []

    virtual_time.run(told())


def test_many_jobs_that_end_at_once_do_not_have_all_others_looked_at_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    # With 9,000 that wait, 50 that end took 17 s, and 1,900 that are forgotten a minute; nobody else was answered.
    duties = Duties()
    duties.say("n", {"set": 1.0})
    for number in range(200):
        duties.advisor.admit(ask(f"j{number}"))
    looks: list[float] = []
    give_out = duties.advisor.queue.admit_waiting
    monkeypatch.setattr(duties.advisor.queue, "admit_waiting", lambda now: looks.append(now) or give_out(now))
    monkeypatch.setattr(advising, "_SHORT_SECONDS", 0.0)
    monkeypatch.setattr(advising, "_MAX_TIME_SHARE", 1e-9)  # the next look is years away
    for number in range(100):
        duties.advisor.note_ended(f"j{number}")
    assert len(looks) <= 1
    for one in duties.book:
        one.mentioned_at -= 10_000
    duties.advisor.forget_lapsed()
    assert len(duties.book) == 0
    assert len(looks) <= 2


def test_a_user_who_floods_the_queue_delays_others_by_one_job() -> None:
    duties = Duties()
    duties.say("n", {"set": 1.0})
    asks = [msgspec.structs.replace(ask(f"a{number}"), user="a") for number in range(20)]
    asks += [msgspec.structs.replace(ask("b0"), user="b")]
    for one in asks:
        duties.advisor.admit(one)
    started = []
    for _ in range(3):
        [running] = [one.request.job for one in duties.book if one.has_slot]
        started.append(running)
        duties.advisor.note_ended(running)
        duties.advisor.evaluate_queue()
    assert started == ["a0", "a1", "b0"]  # a1 was asked for before b0 was


def test_a_warm_up_is_lost_with_its_node_or_its_daemon() -> None:
    async def lost() -> None:
        duties = Duties(set=DatasetSection(max_copies=2))
        duties.say("full", {"set": 1.0})
        for node in ("restarted", "silent", "well"):
            duties.say(node, {"set": 0.0})
        for node in ("restarted", "silent", "well"):
            duties.advisor.note_placed(f"j-{node}", [node], ask(f"j-{node}", policy=PlacementPolicy.PREFER))
        await virtual_time.settle()
        one = {warming.node: warming for warming in duties.warmings}
        assert {warming.state for warming in one.values()} == {"running"}
        now = time.monotonic()
        for node in duties.view:
            node.reported_at = now
        one["restarted"].reported_at = now - warming_up.UNREPORTED_SECONDS - 1
        duties.view.nodes["silent"].reported_at = now - warming_up.SILENT_SECONDS - 1
        one["silent"].reported_at = now - warming_up.SILENT_SECONDS - 1
        ended: list[str] = []
        duties.warmings.add_end_listener(lambda warming: ended.append(warming.node))
        duties.warmings.drop_lost(now)
        assert {node: warming.state for node, warming in one.items()} == {
            "restarted": "failed", "silent": "failed", "well": "running",
        }  # fmt: skip
        duties.view.nodes.pop("well")
        duties.warmings.drop_lost(now)
        assert sorted(ended) == ["restarted", "silent", "well"]

    virtual_time.run(lost())


def test_what_is_brought_lets_nothing_go_that_another_job_is_about_to_read() -> None:
    async def brought() -> None:
        duties = Duties(old=DatasetSection(cleanup="lru"), idle=DatasetSection(cleanup="lru"))
        duties.say("a", {"set": 0.0, "old": 1.0, "idle": 0.9}, room=2)
        duties.say("b", {"set": 1.0})
        duties.advisor.note_placed("reads", ["a"], ask("reads", "old", PlacementPolicy.PREFER))
        duties.advisor.note_placed("new", ["a"], ask("new", "set", PlacementPolicy.PREFER))
        await virtual_time.settle()
        assert duties.daemons.of(CommandKind.EVICT) == [("a", "idle")]

    virtual_time.run(brought())


def test_a_job_that_leaves_many_nodes_empties_them_all() -> None:
    async def emptied() -> None:
        duties = Duties()
        nodes = [f"n{number}" for number in range(100)]
        for node in (*nodes, "new"):
            duties.say(node, {"set": 1.0})
        duties.advisor.note_placed("j", nodes, ask("j", policy=PlacementPolicy.PREFER))
        duties.advisor.note_resized("j", ["new"])
        for _ in range(5):
            duties.advisor.moves.evict_left_nodes()
            await virtual_time.settle()
        assert sorted(duties.daemons.of(CommandKind.EVICT)) == sorted((node, "set") for node in nodes)

    virtual_time.run(emptied())
