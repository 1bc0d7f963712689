"""What the service says of daemons that do not answer it, or not as they should."""

import asyncio
import logging
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.observe_messages import MAX_SNAPSHOTS, ClusterMember, NodeLoad, NodeReport, RunningJob, SnapshotReport
from cachefs.scheduling_messages import PlacementRequest
from cachefs_scheduler.config import ObservedClusterSection, SchedulerConfig
from cachefs_scheduler.view.daemon_follower import DaemonFollower
from cachefs_scheduler.view.observer_client import NodeRequestFailed, ObserverClient
from cachefs_scheduler.view.reported_cluster import ReportedCluster
from tests import virtual_time
from tests.unit.scheduler.duties.viewed import Duties


async def _closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")  # what is left unread would reset the connection
    writer.close()


async def _until_said(caplog: pytest.LogCaptureFixture, where: str) -> None:
    server = await asyncio.start_server(_closes, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = SchedulerConfig(cluster=ObservedClusterSection(nodes=(f"127.0.0.1:{port - 1}",)))
    asking = ObserverClient(config.cluster)
    following = asyncio.create_task(DaemonFollower(ReportedCluster(config), asking, [("127.0.0.1", port)]).run())
    try:
        async with asyncio.timeout(20):
            while where not in caplog.text:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)
    finally:
        following.cancel()
        await asking.close()
        server.close()
    assert f"127.0.0.1:{port - 1}: the daemon closed the connection" in caplog.text


def test_a_daemon_with_certificates_closes_the_connection_of_a_service_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        virtual_time.run(_until_said(caplog, "if the daemon uses TLS, set cluster.tls_ca"))


NONSENSE = {
    "deep": b"\x81\xa1y" + b"\x91" * 100_000 + b"\x00",
    "negative": msgspec.msgpack.encode(
        {"id": "n", "name": "n", "instance": "1", "version": 1, "full": True, "used": -1}
    ),
    "not a number": msgspec.msgpack.encode(
        {"id": "n", "name": "n", "instance": "1", "version": 1, "full": True, "load": {"demand": math.nan}}
    ),
    "fewer readers than none": msgspec.msgpack.encode(
        {"id": "n", "name": "n", "instance": "1", "version": 1, "full": True, "jobs": [["j", "s", -1, 1.0]]}
    ),
    "huge": msgspec.msgpack.encode(
        {"id": "n", "name": "n", "instance": "1", "version": 1, "full": True, "capacity": (1 << 64) - 1}
    ),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
def test_a_daemon_that_says_nonsense_is_one_that_does_not_answer(nonsense: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(nonsense)
        writer.write(head + nonsense)
        await writer.drain()
        writer.close()

    async def asked() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        asking = ObserverClient(ObservedClusterSection(nodes=("127.0.0.1:7380",)))
        try:
            with pytest.raises(NodeRequestFailed, match="the daemon sent an invalid response"):
                await asking.fetch_report("127.0.0.1", port, None, 0.0, 0.0)
            with pytest.raises(NodeRequestFailed, match="the daemon sent an invalid response"):
                await asking.fetch_members("127.0.0.1", port)
        finally:
            await asking.close()
            server.close()

    virtual_time.run(asked())


def test_a_node_that_names_ever_more_snapshots_is_not_believed() -> None:
    view = ReportedCluster(SchedulerConfig())
    view.update_members({"n": ClusterMember(id="n", name="n", host="n", control_port=1)})
    node = view.nodes["n"]
    for turn in range(3):
        snapshots = [SnapshotReport(f"s{turn}-{number}", 1, 1) for number in range(MAX_SNAPSHOTS // 2)]
        report = NodeReport("n", "n", "1", turn, full=False, snapshots=snapshots)
        if turn < 2:
            view.merge_report(node, report)
        else:
            with pytest.raises(ValueError, match="more than"):
                view.merge_report(node, report)
    assert len(node.snapshots) == MAX_SNAPSHOTS


@given(rate=st.floats(0.0, 1e15), peak=st.floats(0.0, 1e15))
def test_no_rate_of_a_node_makes_scores_that_are_no_numbers(rate: float, peak: float) -> None:
    duties = Duties()
    duties.say("full", {"set": 1.0})
    duties.say("odd", {"set": 0.1})
    node = duties.view.nodes["odd"]
    assert node.report is not None
    load = NodeLoad(origin_rate=peak, peer_rate=peak, fetched=rate, received=rate, given=rate, demand=rate)
    jobs = [RunningJob("j", "s-set", 1, rate)]
    duties.view.merge_report(node, msgspec.structs.replace(node.report, full=False, load=load, jobs=jobs))
    for ask in (PlacementRequest(job="a", dataset="set"), PlacementRequest(job="a", dataset="set", rate=rate, ranks=7)):
        scores = duties.advisor.rank(ask, ["full", "odd", "unknown"]).scores
        assert all(0 <= score <= 1 for score in scores.values()), scores
        duties.advisor.assign(ask)
