"""What the service has nodes evict and pin, and on which replica."""

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from cachefs_scheduler.api.answers import Answers
from cachefs_scheduler.config import DatasetSection
from cachefs_scheduler.duties.reads import IN_USE
from cachefs_scheduler.duties.warming import Warming

from cachefs.errors import Busy
from cachefs.observe_messages import Member, NodeReport, Order, OrderKind
from cachefs.scheduling_messages import Ask, DatasetPolicy, ScaleAsk
from tests import virtual_time
from tests.unit.scheduler.duties.viewed import Duties

TTL = DatasetSection(cleanup="ttl", ttl=600.0)


def run(work: Callable[[], None]) -> None:
    """Do the work on an event loop, and let orders go out."""

    async def running() -> None:
        work()
        await virtual_time.settle()

    virtual_time.run(running())


def wait(duties: Duties, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service looks at all nodes, and then virtual time passes."""
    duties.cleaning.step()
    now = duties.view.now()
    monkeypatch.setattr(duties.view, "now", lambda: now + seconds)


def report_reads(duties: Duties, node: str, reads: int, dataset: str = "set") -> None:
    """The daemon of a node has counted so many looks that found reads of a dataset."""
    state = duties.view.nodes[node]
    assert state.report is not None
    snapshots = [
        msgspec.structs.replace(one, reads=reads) for one in state.snapshots.values() if one.datasets == [dataset]
    ]
    report: NodeReport = msgspec.structs.replace(
        state.report, snapshots=snapshots, version=state.report.version + 1, full=False
    )
    duties.view.take(state, report)


def evicted(duties: Duties) -> list[str]:
    return sorted(node for node, _ in duties.daemons.of(OrderKind.EVICT))


@pytest.mark.parametrize(
    ("read", "gone"), [((), ["n1", "n2"]), (("n2",), [])], ids=["no reader", "a mount of n2, and no published job"]
)
def test_no_node_loses_what_a_reader_of_any_node_uses(
    read: tuple[str, ...], gone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    duties = Duties(set=TTL)
    for node in ("n1", "n2"):
        duties.say(node, {"set": 1.0})
        report_reads(duties, node, 3)

    def clean() -> None:
        wait(duties, TTL.ttl - 10, monkeypatch)
        for node in read:
            report_reads(duties, node, 4)
        wait(duties, 20, monkeypatch)
        duties.cleaning.step()

    run(clean)
    assert evicted(duties) == gone


def test_a_node_that_joins_sets_no_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    for node in ("n1", "n2"):
        duties.say(node, {"set": 1.0})
        report_reads(duties, node, 3)

    def clean() -> None:
        for number in range(4):
            wait(duties, TTL.ttl / 2, monkeypatch)
            duties.say(f"spot{number}", {"set": 0.1})
        duties.cleaning.step()

    run(clean)
    assert {"n1", "n2"} <= set(evicted(duties))


def test_a_copy_that_comes_to_a_node_stays_there_for_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    duties.say("n1", {"set": 1.0})
    duties.say("n2", {"set": 0.0})

    def clean() -> None:
        wait(duties, TTL.ttl - 10, monkeypatch)
        duties.say("n2", {"set": 1.0})  # an administrator warms it up for a job of tomorrow
        wait(duties, 20, monkeypatch)
        duties.cleaning.step()
        assert evicted(duties) == []  # not given yet
        wait(duties, 0, monkeypatch)

    run(clean)
    assert evicted(duties) == ["n1"]


def test_a_daemon_that_starts_again_has_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    duties.say("n1", {"set": 1.0})
    report_reads(duties, "n1", 3)

    def clean() -> None:
        wait(duties, TTL.ttl - 100, monkeypatch)
        report_reads(duties, "n1", 1)  # a mount that is idle has read something some time ago
        wait(duties, 110, monkeypatch)
        duties.cleaning.step()

    run(clean)
    assert evicted(duties) == ["n1"]


def test_homes_keep_what_a_published_job_of_another_node_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    duties.say("n1", {"set": 0.5})
    duties.say("n2", {"set": 1.0}, jobs=("set",))

    def clean() -> None:
        wait(duties, 2 * TTL.ttl, monkeypatch)
        duties.cleaning.step()

    run(clean)
    assert evicted(duties) == []


def test_a_preload_takes_no_room_from_what_is_being_read() -> None:
    lru = DatasetSection(cleanup="lru")
    duties = Duties(set=lru, idle=lru)
    duties.advisor.reads.note("s-idle", time.monotonic() - 3600)
    duties.advisor.reads.note("s-set", time.monotonic() - 5000)
    duties.say("n", {"set": 1.0, "idle": 1.0, "new": 0.0}, room=2)
    report_reads(duties, "n", 1, "set")
    run(lambda: duties.advisor.placed("j", ["n"], Ask(job="j", dataset="new")))
    assert duties.daemons.of(OrderKind.EVICT) == [("n", "idle")]


def test_a_replica_that_begins_to_lead_evicts_nothing_that_a_mount_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=DatasetSection(cleanup="lru"))
    duties.say("n", {"set": 1.0, "new": 0.0}, room=1)
    report_reads(duties, "n", 41)

    def act() -> None:
        duties.cleaning.step()
        duties.advisor.placed("j", ["n"], Ask(job="j", dataset="new"))
        assert duties.daemons.of(OrderKind.EVICT) == []
        wait(duties, IN_USE + 1, monkeypatch)  # and its number of reads is still 41
        duties.advisor.placed("k", ["n"], Ask(job="k", dataset="new"))

    run(act)
    assert duties.daemons.of(OrderKind.EVICT) == [("n", "set")]


def test_a_replica_that_follows_records_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    duties.say("n1", {"set": 1.0})
    duties.say("n2", {"set": 0.0})
    refusal = duties.warmings.refusal

    def act() -> None:
        duties.warmings.refusal = lambda: FOLLOWS
        duties.advisor.placed("j", ["n2"], Ask(job="j", dataset="set"))
        wait(duties, 2 * TTL.ttl, monkeypatch)
        wait(duties, 1, monkeypatch)
        duties.advisor.ended("j")
        duties.warmings.refusal = refusal
        duties.cleaning.step()

    run(act)
    assert evicted(duties) == []


def test_a_service_that_was_away_for_long_asks_mounts_before_it_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    duties.advisor.reads.restore("", "s-set", time.monotonic() - 2 * TTL.ttl)
    duties.say("n1", {"set": 1.0})
    duties.view.meet({name: Member(id=name, name=name, host=name, control_port=1) for name in ("n1", "n2")})

    def act() -> None:
        wait(duties, 5, monkeypatch)
        duties.cleaning.step()  # n2 has yet to be heard
        duties.say("n2", {"set": 0.0})
        report_reads(duties, "n2", 41)
        wait(duties, 5, monkeypatch)
        duties.cleaning.step()

    run(act)
    assert evicted(duties) == []


def test_a_copy_is_released_once_no_mount_of_its_node_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties()
    for node in ("n1", "n2"):
        duties.say(node, {"set": 1.0})

    def act() -> None:
        duties.advisor.placed("j", ["n1"], Ask(job="j", dataset="set"))
        report_reads(duties, "n1", 1)
        duties.advisor.resized("j", ["n2"])
        for reads in range(1, 4):  # another program reads on n1, and the job on n2
            report_reads(duties, "n1", reads)
            report_reads(duties, "n2", reads)
            duties.advisor.moves.settle()
            wait(duties, IN_USE - 20, monkeypatch)
        assert not duties.advisor.placement.release("set", "s-set", "n1")
        wait(duties, 30, monkeypatch)
        report_reads(duties, "n2", 4)
        duties.advisor.moves.settle()

    run(act)
    assert evicted(duties) == ["n1"]


FOLLOWS = "this replica of cachefs-scheduler does not lead; the replica that does is b"


def test_a_replica_that_does_not_lead_orders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    duties.say("n1", {"set": 1.0})

    def act() -> None:
        wait(duties, 2 * TTL.ttl, monkeypatch)
        duties.warmings.refusal = lambda: FOLLOWS
        duties.cleaning.step()
        assert not duties.warmings.tell("n1", Order(kind=OrderKind.PIN, dataset="set"))
        assert not duties.warmings.begin(Warming("w", "n1", "set", "s-set", "preload", "j", None))

    run(act)
    assert duties.daemons.orders == []


def test_orders_that_were_not_given_yet_are_not_given_once_another_replica_leads() -> None:
    duties = Duties(set=TTL)
    duties.say("n1", {"set": 1.0})

    def act() -> None:
        assert duties.warmings.tell("n1", Order(kind=OrderKind.PIN, dataset="set"))
        duties.warmings.refusal = lambda: FOLLOWS

    run(act)
    assert duties.daemons.orders == []


def test_an_administrator_is_told_which_replica_to_ask() -> None:
    duties = Duties()
    duties.say("n1", {"set": 1.0})
    answers = Answers(duties.view, duties.advisor, duties.warmings, lambda: FOLLOWS)

    async def ask() -> None:
        with pytest.raises(Busy, match="the replica that does is b: ask that one"):
            answers.change_policy(DatasetPolicy(dataset="set", cleanup="pin"))
        with pytest.raises(Busy, match="the replica that does is b: ask that one"):
            await answers.scale(ScaleAsk(drain="n1"))
        with suppress(Busy):
            await answers.scale(ScaleAsk(dataset="set", copies=2))

    virtual_time.run(ask())
    assert duties.policies.of("set").cleanup == "none"
    assert duties.daemons.orders == []
