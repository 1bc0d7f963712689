"""What the service has nodes evict and pin, and on which replica."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from cachefs_scheduler.api.answers import Answers
from cachefs_scheduler.config import DatasetSection
from cachefs_scheduler.duties.warming import Warming

from cachefs.errors import Busy
from cachefs.observe_messages import NodeReport, Order, OrderKind
from cachefs.scheduling_messages import Ask, DatasetPolicy, ScaleAsk
from tests.unit.scheduler.duties.viewed import Duties

TTL = DatasetSection(cleanup="ttl", ttl=600.0)


def run(work: Callable[[], None]) -> None:
    """Do the work on an event loop, and let orders go out."""

    async def running() -> None:
        work()
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(running())


def wait(duties: Duties, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service looks at all nodes, and then virtual time passes."""
    duties.cleaning.step()
    now = duties.view.now()
    monkeypatch.setattr(duties.view, "now", lambda: now + seconds)


def report_reads(duties: Duties, node: str, reads: int) -> None:
    """The daemon of a node has counted so many looks that found reads."""
    state = duties.view.nodes[node]
    assert state.report is not None
    snapshots = [msgspec.structs.replace(one, reads=reads) for one in state.snapshots.values()]
    report: NodeReport = msgspec.structs.replace(state.report, snapshots=snapshots, version=state.report.version + 1)
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
    duties.say("n", {"set": 1.0, "idle": 1.0, "new": 0.0}, room=2)
    duties.advisor.reads.note("n", "s-idle", time.monotonic() - 3600)
    duties.advisor.reads.note("n", "s-set", time.monotonic() - 5000)
    duties.advisor.reads.count("n", "s-set", 1, time.monotonic() - 20)
    duties.advisor.reads.count("n", "s-set", 2, time.monotonic() - 20)
    run(lambda: duties.advisor.placed("j", ["n"], Ask(job="j", dataset="new")))
    assert duties.daemons.of(OrderKind.EVICT) == [("n", "idle")]


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

    asyncio.run(ask())
    assert duties.policies.of("set").cleanup == "none"
    assert duties.daemons.orders == []
