"""What the service has nodes evict and pin, and on which replica."""

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest

from cachefs.errors import Busy
from cachefs.observe_messages import ClusterMember, CommandKind, NodeCommand, NodeReport
from cachefs.scheduling_messages import DatasetPolicy, PlacementRequest, ScaleRequest
from cachefs_scheduler.api.handlers import ApiHandlers
from cachefs_scheduler.config import DatasetSection
from cachefs_scheduler.duties.node_warmups import NodeWarmup
from cachefs_scheduler.duties.snapshot_reads import IN_USE_SECONDS
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
    duties.cleaning.clean_next()
    now = duties.view.advance_clock()
    monkeypatch.setattr(duties.view, "advance_clock", lambda: now + seconds)


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
    duties.view.merge_report(state, report)


def evicted(duties: Duties) -> list[str]:
    return sorted(node for node, _ in duties.daemons.of(CommandKind.EVICT))


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
        duties.cleaning.clean_next()

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
        duties.cleaning.clean_next()

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
        duties.cleaning.clean_next()
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
        duties.cleaning.clean_next()

    run(clean)
    assert evicted(duties) == ["n1"]


def test_homes_keep_what_a_published_job_of_another_node_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    duties.say("n1", {"set": 0.5})
    duties.say("n2", {"set": 1.0}, jobs=("set",))

    def clean() -> None:
        wait(duties, 2 * TTL.ttl, monkeypatch)
        duties.cleaning.clean_next()

    run(clean)
    assert evicted(duties) == []


def test_a_preload_takes_no_room_from_what_is_being_read() -> None:
    lru = DatasetSection(cleanup="lru")
    duties = Duties(set=lru, idle=lru)
    duties.advisor.reads.note_read("s-idle", time.monotonic() - 3600)
    duties.advisor.reads.note_read("s-set", time.monotonic() - 5000)
    duties.say("n", {"set": 1.0, "idle": 1.0, "new": 0.0}, room=2)
    report_reads(duties, "n", 1, "set")
    run(lambda: duties.advisor.note_placed("j", ["n"], PlacementRequest(job="j", dataset="new")))
    assert duties.daemons.of(CommandKind.EVICT) == [("n", "idle")]


def test_a_replica_that_begins_to_lead_evicts_nothing_that_a_mount_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=DatasetSection(cleanup="lru"))
    duties.say("n", {"set": 1.0, "new": 0.0}, room=1)
    report_reads(duties, "n", 41)

    def act() -> None:
        duties.cleaning.clean_next()
        duties.advisor.note_placed("j", ["n"], PlacementRequest(job="j", dataset="new"))
        assert duties.daemons.of(CommandKind.EVICT) == []
        wait(duties, IN_USE_SECONDS + 1, monkeypatch)  # and its number of reads is still 41
        duties.advisor.note_placed("k", ["n"], PlacementRequest(job="k", dataset="new"))

    run(act)
    assert duties.daemons.of(CommandKind.EVICT) == [("n", "set")]


def test_a_replica_that_follows_records_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    duties.say("n1", {"set": 1.0})
    duties.say("n2", {"set": 0.0})
    refusal = duties.warmings.reason_to_send_nothing

    def act() -> None:
        duties.warmings.reason_to_send_nothing = lambda: FOLLOWS
        duties.advisor.note_placed("j", ["n2"], PlacementRequest(job="j", dataset="set"))
        wait(duties, 2 * TTL.ttl, monkeypatch)
        wait(duties, 1, monkeypatch)
        duties.advisor.note_ended("j")
        duties.warmings.reason_to_send_nothing = refusal
        duties.cleaning.clean_next()

    run(act)
    assert evicted(duties) == []


def test_a_service_that_was_away_for_long_asks_mounts_before_it_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    duties.advisor.reads.restore("", "s-set", time.monotonic() - 2 * TTL.ttl)
    duties.say("n1", {"set": 1.0})
    duties.view.update_members(
        {name: ClusterMember(id=name, name=name, host=name, control_port=1) for name in ("n1", "n2")}
    )

    def act() -> None:
        wait(duties, 5, monkeypatch)
        duties.cleaning.clean_next()  # n2 has yet to be heard
        duties.say("n2", {"set": 0.0})
        report_reads(duties, "n2", 41)
        wait(duties, 5, monkeypatch)
        duties.cleaning.clean_next()

    run(act)
    assert evicted(duties) == []


def test_a_copy_is_released_once_no_mount_of_its_node_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties()
    for node in ("n1", "n2"):
        duties.say(node, {"set": 1.0})

    def act() -> None:
        duties.advisor.note_placed("j", ["n1"], PlacementRequest(job="j", dataset="set"))
        report_reads(duties, "n1", 1)
        duties.advisor.note_resized("j", ["n2"])
        for reads in range(1, 4):  # another program reads on n1, and the job on n2
            report_reads(duties, "n1", reads)
            report_reads(duties, "n2", reads)
            duties.advisor.moves.evict_left_nodes()
            wait(duties, IN_USE_SECONDS - 20, monkeypatch)
        assert not duties.advisor.placement.evict_copy("set", "s-set", "n1")
        wait(duties, 30, monkeypatch)
        report_reads(duties, "n2", 4)
        duties.advisor.moves.evict_left_nodes()

    run(act)
    assert evicted(duties) == ["n1"]


FOLLOWS = "this replica of cachefs-scheduler does not lead; the leader is b"


def test_a_replica_that_does_not_lead_orders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    duties = Duties(set=TTL)
    duties.say("n1", {"set": 1.0})

    def act() -> None:
        wait(duties, 2 * TTL.ttl, monkeypatch)
        duties.warmings.reason_to_send_nothing = lambda: FOLLOWS
        duties.cleaning.clean_next()
        assert not duties.warmings.send_command("n1", NodeCommand(kind=CommandKind.PIN, dataset="set"))
        assert not duties.warmings.begin_warmup(NodeWarmup("w", "n1", "set", "s-set", "preload", "j", None))

    run(act)
    assert duties.daemons.orders == []


def test_orders_that_were_not_given_yet_are_not_given_once_another_replica_leads() -> None:
    duties = Duties(set=TTL)
    duties.say("n1", {"set": 1.0})

    def act() -> None:
        assert duties.warmings.send_command("n1", NodeCommand(kind=CommandKind.PIN, dataset="set"))
        duties.warmings.reason_to_send_nothing = lambda: FOLLOWS

    run(act)
    assert duties.daemons.orders == []


def test_an_administrator_is_told_which_replica_to_ask() -> None:
    duties = Duties()
    duties.say("n1", {"set": 1.0})
    answers = ApiHandlers(duties.view, duties.advisor, duties.warmings, lambda: FOLLOWS)

    async def ask() -> None:
        with pytest.raises(Busy, match="the leader is b: send the request to the leader"):
            answers.change_policy(DatasetPolicy(dataset="set", cleanup="pin"))
        with pytest.raises(Busy, match="the leader is b: send the request to the leader"):
            await answers.scale(ScaleRequest(drain="n1"))
        with suppress(Busy):
            await answers.scale(ScaleRequest(dataset="set", copies=2))

    virtual_time.run(ask())
    assert duties.policies.effective_policy("set").cleanup == "none"
    assert duties.daemons.orders == []
