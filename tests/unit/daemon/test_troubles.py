"""The list of troubles follows from what the node's parts know: each read is counted once, for what it waits for."""

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.errors import CachefsError, ObjectChanged, OriginAccessDenied, OriginUnavailable
from cachefs.messages import Trouble
from cachefs.trouble_texts import Cause
from cachefs_daemon import troubles as module
from cachefs_daemon.fetch.waiting_reads import (
    LATE_PUBLICATION_SECONDS,
    MAX_FAILURES,
    FailedRead,
    ReadAttribution,
    ReadFailure,
    ReadFailures,
    WaitingRead,
)
from cachefs_daemon.origin.endpoint import Endpoint
from cachefs_daemon.origin.outage import Outage
from cachefs_daemon.origin.retry import Failure
from cachefs_daemon.ports import AwayNode
from cachefs_daemon.troubles import (
    CachedValue,
    ServerWithDatasets,
    TierTrouble,
    TroubleInputs,
    Troubles,
    derive_troubles,
    without_old_failures,
)

NOW = 1_000_000.0
LOOP = 500.0


def server(name: str = "S3 at x", silent: float = 0.0) -> ServerWithDatasets:
    endpoint = Endpoint(name, 8)
    status = endpoint.status()
    if silent:
        status = type(status)(name, 8, 8, 0, 0.0, 0, 0, 0, silent=silent, last_asked=1.0, reason="refused")
    return ServerWithDatasets(endpoint, status, ["one"])


def read(of: ServerWithDatasets, since: float, **fields: Any) -> WaitingRead:
    values = {"snapshot": "one", "has_permit": True, **fields}
    return WaitingRead(key=b"k", endpoint=of.endpoint, since=since, **values)


def found(*servers: ServerWithDatasets, **fields: Any) -> TroubleInputs:
    values: dict[str, Any] = {"reads": [], "failures": [], "nodes": [], "tiers": [], "datasets": {"one": "pets"}}
    return TroubleInputs(servers=servers, loop_now=LOOP, **{**values, **fields})


def told(one: Trouble) -> tuple[str, str, int, float]:
    return one.cause, one.subject, one.waiting, one.longest


def test_a_node_that_is_well_has_none() -> None:
    assert derive_troubles(found(server()), NOW) == []


def test_reads_wait_for_an_origin_that_is_silent() -> None:
    away = server(silent=30.0)
    [one] = derive_troubles(found(away, reads=[read(away, 490.0), read(away, 495.0, has_permit=False)]), NOW)
    assert told(one) == (Cause.ORIGIN, "S3 at x", 2, 10.0)
    assert (one.since, one.last, one.reason, one.snapshots) == (NOW - 30, NOW - 1, "refused", ["one"])
    [idle] = derive_troubles(found(away), NOW)
    assert told(idle) == (Cause.ORIGIN, "S3 at x", 0, 0.0)


@pytest.mark.parametrize(
    ("fields", "cause", "subject"),
    [
        ({}, Cause.SLOW, "S3 at x"),
        ({"has_permit": False}, Cause.SLOT, "S3 at x"),
        ({"peers": ("b",)}, Cause.SLOW_PEER, "b"),
        ({"trouble": OriginAccessDenied("expired")}, Cause.REFUSED, "pets"),
    ],
)
def test_each_read_waits_for_one_thing(fields: dict[str, Any], cause: Cause, subject: str) -> None:
    well = server()
    [one] = derive_troubles(found(well, reads=[read(well, 480.0, **fields), read(well, 490.0, **fields)]), NOW)
    assert told(one) == (cause, subject, 2, 20.0)
    assert one.since == NOW - 20.0


def test_only_a_node_that_is_away_is_said_not_to_answer() -> None:
    """A home that waits for its own origin is well, so a restart of it would help nothing."""
    well = server()
    reads = [read(well, 480.0, peers=("b",)), read(well, 490.0, peers=("c",))]
    troubles = derive_troubles(found(well, reads=reads, nodes=[AwayNode("b", "cut off", NOW - 9)]), NOW)
    assert [told(one) for one in troubles] == [(Cause.SLOW_PEER, "c", 1, 10.0), (Cause.PEER, "b", 1, 20.0)]


def test_a_read_that_waits_for_a_slot_says_how_many_there_are() -> None:
    well = server()
    [one] = derive_troubles(found(well, reads=[read(well, 480.0, has_permit=False)]), NOW)
    assert one.reason == "it gets 8 of 8 requests at once"
    width = type(well.status)("S3 at x", 2, 8, 9, 0.0, 0, 0, 0)
    busy = ServerWithDatasets(well.endpoint, width, ["one"])
    waiting = [read(well, 480.0, has_permit=False, trouble=OriginUnavailable("SlowDown"))]
    [one] = derive_troubles(found(busy, reads=waiting), NOW)
    assert (one.cause, one.reason) == (Cause.SLOT, "it gets 2 of 8 requests at once: SlowDown")
    [one] = derive_troubles(found(well, reads=waiting), NOW)
    assert (one.cause, one.reason) == (Cause.SLOW, "SlowDown")


def test_an_origin_that_is_gone_from_the_catalog_has_a_name_all_the_same() -> None:
    [one] = derive_troubles(found(reads=[read(server("S3 at old"), 480.0)]), NOW)
    assert told(one) == (Cause.SLOW, "S3 at old", 1, 20.0)


def test_nodes_tiers_and_failures_are_among_them() -> None:
    failure = ReadFailure("one", Cause.CHANGED, NOW - 100, NOW - 70, 3, "s3://b/k has changed")
    tier = TierTrouble("ssd", "full", "has no more room", NOW - 50)
    every = derive_troubles(found(failures=[failure], nodes=[AwayNode("b", "cut off", NOW - 9)], tiers=[tier]), NOW)
    assert [(one.cause, one.subject, one.since) for one in every] == [
        (Cause.CHANGED, "pets", NOW - 100), (Cause.TIER, "ssd", NOW - 50), (Cause.PEER, "b", NOW - 9),
    ]  # fmt: skip
    assert every[0].failed == 3
    assert [one.cause for one in without_old_failures(every, NOW)] == [Cause.TIER, Cause.PEER]


def test_there_are_not_more_than_a_page_of_them() -> None:
    nodes = [AwayNode(f"n{number}", "cut off") for number in range(2 * module.MAX_TROUBLES)]
    assert len(derive_troubles(found(nodes=nodes), NOW)) == module.MAX_TROUBLES


def test_when_a_trouble_began_is_remembered_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now, now=NOW)
    monkeypatch.setattr(module, "time", clock)
    nodes = [AwayNode("b", "cut off")]
    of = Troubles(lambda: found(nodes=nodes))
    assert of.present_troubles()[0].since == NOW
    clock.now += 10
    assert of.present_troubles()[0].since == NOW
    nodes.clear()
    clock.now += 10
    assert of.present_troubles() == []
    nodes.append(AwayNode("b", "cut off"))
    clock.now += 10
    assert of.present_troubles()[0].since == clock.now


def test_a_job_is_told_of_failures_since_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = deque(FailedRead(NOW - before, b"k", "no") for before in (100, 75, 70))
    failure = ReadFailure("one", Cause.REFUSED, NOW - 100, NOW - 70, 3, "no", reads)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW, monotonic=lambda: NOW))
    of = Troubles(lambda: found(failures=[failure]), lambda snapshot, keys: [ReadAttribution("j", True)] * len(keys))
    assert [one.failed for one in of.troubles_of("j", ["one"], NOW - 100)] == [3]
    assert [one.failed for one in of.troubles_of("j", ["one"], NOW - 80)] == [2]
    assert [one.failed for one in of.troubles_of("j", ["one"], NOW - 70)] == [1]
    assert of.troubles_of("j", ["one"], NOW - 69) == []
    assert of.troubles_of("j", ["two"], NOW - 80) == []
    assert of.present_troubles() == []


def test_a_job_is_not_told_of_reads_of_another_one_that_have_failed() -> None:
    failures, now = ReadFailures(), time.time()
    for number, key in enumerate((b"a", b"a", b"?")):
        source: Any = SimpleNamespace(snapshot="one", subject=f"object {number}", key=key)
        failures.add_failure(source, CachefsError("broken"), now - 5 + number, waited=True)
    jobs = {b"a": "a", b"?": "", b"b": "b"}
    of = Troubles(
        lambda: found(failures=failures.latest_first()),
        lambda snapshot, keys: [ReadAttribution(jobs[key], True) for key in keys],
    )
    [one] = of.troubles_of("a", ["one"], now - 9)
    assert (one.failed, one.unattributed, one.last, one.reason) == (3, 1, now - 4, "object 1: broken")
    [one] = of.troubles_of("b", ["one"], now - 9)
    assert (one.failed, one.unattributed, one.last, one.reason) == (1, 1, now - 3, "object 2: broken")
    assert of.troubles_of("b", ["one"], now - 2.5) == []
    [node] = of.present_troubles()
    assert (node.failed, node.unattributed) == (3, 0)
    source = SimpleNamespace(snapshot="one", subject="object 9", key=b"a")
    failures.add_failure(source, CachefsError("broken"), now - 1, waited=True)
    of.all_troubles(fresh=True)
    assert of.troubles_of("b", ["one"], now - 2.5) == []
    failures.add_failure(source, CachefsError("broken"), now, waited=False)
    of.all_troubles(fresh=True)
    assert [each.failed for each in of.troubles_of("b", ["one"], now - 2.5)] == [0]


def test_whose_a_failed_read_is_settles_after_a_while_or_when_the_job_ends() -> None:
    """The job that has read may not be published yet, and another one is the only one there."""
    failures, now, jobs = ReadFailures(), time.time(), [ReadAttribution("well", is_sure=False)]
    source: Any = SimpleNamespace(snapshot="one", subject="object", key=b"k")
    failures.add_failure(source, CachefsError("broken"), now, waited=True)
    of = Troubles(lambda: found(failures=failures.latest_first()), lambda snapshot, keys: jobs * len(keys))
    assert of.troubles_of("well", ["one"], 0.0) == []
    jobs = [ReadAttribution("", is_sure=False)]
    of.all_troubles(fresh=True)
    assert of.troubles_of("well", ["one"], 0.0) == []
    failures.latest_first()[0].reads[0].when -= LATE_PUBLICATION_SECONDS
    of.all_troubles(fresh=True)
    assert [one.unattributed for one in of.troubles_of("well", ["one"], 0.0)] == [1]
    jobs = [ReadAttribution("well", is_sure=False)]
    failures.add_failure(source, CachefsError("broken"), now, waited=True)
    of.troubles_of("other", ["two"], 0.0, fresh=True)  # the end of a job settles nothing of what that has not read
    assert [(one.failed, one.unattributed) for one in of.troubles_of("well", ["one"], 0.0)] == [(1, 1)]
    assert [(one.failed, one.unattributed) for one in of.troubles_of("well", ["one"], 0.0, fresh=True)] == [(2, 1)]


def test_reads_that_wait_are_a_job_s_trouble_though_others_have_failed_for_another_job() -> None:
    failures, source = ReadFailures(), SimpleNamespace(snapshot="one", subject="object", key=b"k")
    failures.add_failure(source, OriginAccessDenied("no"), NOW, waited=True)  # type: ignore[arg-type]
    reads = [read(server(), 490.0, trouble=OriginAccessDenied("no"))]
    of = Troubles(
        lambda: found(failures=failures.latest_first(), reads=reads),
        lambda snapshot, keys: [ReadAttribution("a", is_sure=True)],
    )
    assert [(one.waiting, one.failed, one.last) for one in of.troubles_of("b", ["one"], 0.0)] == [(1, 0, NOW)]


def test_the_parts_are_not_looked_at_more_often_than_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = time.monotonic(), list[int]()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    value = CachedValue(lambda: looks.append(1) or len(looks))
    assert [value.get() for _ in range(100)] == [1] * 100
    now += module.CACHE_SECONDS
    assert value.get() == 2
    assert value.get(fresh=True) == 3


def test_failures_are_kept_by_snapshot_and_cause() -> None:
    failures = ReadFailures()
    source: Any = SimpleNamespace(snapshot="one", subject="s3://b/k", key=b"k")
    for error, waited in ((OriginAccessDenied("no"), True), (OriginAccessDenied("s3://b/k: no"), False)):
        failures.add_failure(source, error, NOW, waited=waited)
    failures.add_failure(source, ObjectChanged("gone"), NOW + 1, waited=True)
    failures.add_failure(source, CachefsError("broken"), NOW + 2, waited=False)
    assert [(one.cause, one.waited, one.message) for one in failures.latest_first()] == [
        (Cause.FAILED, 0, "s3://b/k: broken"), (Cause.CHANGED, 1, "s3://b/k: gone"), (Cause.REFUSED, 1, "s3://b/k: no"),
    ]  # fmt: skip
    for number in range(2 * MAX_FAILURES):
        failures.add_failure(
            SimpleNamespace(snapshot=str(number), subject="x", key=b""), CachefsError("x"), NOW, waited=True
        )  # type: ignore[arg-type]
    assert len(failures.latest_first()) == MAX_FAILURES


def test_an_endpoint_says_why_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    from cachefs_daemon.origin import outage as outages

    now = 100.0
    monkeypatch.setattr(outages, "time", SimpleNamespace(monotonic=lambda: now))
    endpoint, outage = Endpoint("S3 at x", 8), Outage("S3 at x")
    for _ in range(2):
        endpoint.note_failure("", Failure(OriginUnavailable("connection refused"), True), outage)
        now += 2.0
    status = endpoint.status()
    assert (status.silent, status.last_asked, status.reason) == (4.0, 2.0, "connection refused")
    outage.note_response()
    status = endpoint.status()
    assert (status.silent, status.last_asked, status.reason) == (0.0, 0.0, "")
