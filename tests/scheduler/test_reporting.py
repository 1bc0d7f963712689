"""What a daemon tells observers, and what schedulers may order, over its control endpoint."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachefs.messages import Selection
from cachefs.observe_messages import COMMAND_PATH, REPORT_PATH, CommandKind, NodeCommand, NodeReport
from cachefs.rpc import EVICT
from tests.mounting import mounted
from tests.scheduler.observed import LOOKER, SCHEDULER, Observed, made_files, observed

FILES = 1024


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    work = tmp_path_factory.mktemp("r")
    made_files(work / "set", FILES)
    with observed(work / "node") as running:
        running.daemon.add_dataset("set", f"file://{work}/set")
        yield running


def held(report: NodeReport) -> int:
    [snapshot] = report.snapshots
    return snapshot.memory + snapshot.ssd


def test_a_node_tells_what_it_has_as_blocks_come_and_go(node: Observed) -> None:
    first = node.report()
    assert (first.name, first.full, first.state) == ("node1", True, "active")
    assert first.capacity > 0
    assert first.snapshots[0].datasets == ["set"]
    shards = np.zeros(256, np.bool_)
    shards[64:128] = True
    packed = np.packbits(shards, bitorder="little").tobytes()
    done = node.order(NodeCommand(kind=CommandKind.WARM, id="w1", dataset="set", shards=packed))
    assert done.blocks == FILES // 4
    warm = node.until(lambda report: held(report) == done.bytes, first)
    parts = np.frombuffer(warm.snapshots[0].shards, np.uint8)
    assert (parts[64:128] == 255).all()
    assert not parts[:64].any()
    assert not parts[128:].any()
    assert warm.snapshots[0].blocks == FILES
    ended = node.until(lambda report: report.warmups[0].state == "done")
    assert ended.warmups[0].blocks == FILES // 4
    # The same order once more is none.
    assert node.order(NodeCommand(kind=CommandKind.WARM, id="w1", dataset="set", shards=packed)) == done
    node.daemon.client.call(EVICT, Selection(dataset="set"))
    node.until(lambda report: held(report) == 0)


def test_pins_limits_and_evictions_are_carried_out(node: Observed) -> None:
    node.order(NodeCommand(kind=CommandKind.WARM, id="w2", dataset="set"))
    node.until(lambda report: held(report) == 10_000 * FILES)
    node.order(NodeCommand(kind=CommandKind.PIN, dataset="set"))
    assert node.until(lambda report: report.snapshots[0].pinned)
    node.order(NodeCommand(kind=CommandKind.UNPIN, dataset="set"))
    node.order(NodeCommand(kind=CommandKind.LIMIT, dataset="set", ttl=3600.0, share=1.0))
    freed = node.order(NodeCommand(kind=CommandKind.EVICT, dataset="set"))
    assert (freed.blocks, freed.bytes) == (FILES, 10_000 * FILES)
    assert not node.until(lambda report: held(report) == 0).snapshots[0].pinned


def test_reads_of_a_mount_are_told_though_no_job_has_published_them(node: Observed, tmp_path: Path) -> None:
    with mounted(node.daemon.socket, "set", tmp_path / "m") as mount:
        before = node.until(lambda report: bool(report.snapshots))
        path = next(path for path in mount.rglob("*") if path.is_file())
        path.read_bytes()
        node.until(lambda report: report.snapshots[0].reads == before.snapshots[0].reads + 1, before)


@pytest.mark.parametrize(
    ("who", "order", "status", "why"),
    [
        (LOOKER, NodeCommand(kind=CommandKind.EVICT, dataset="set"), 403, "add it to cluster.schedulers"),
        ("nobody", NodeCommand(kind=CommandKind.EVICT, dataset="set"), 403, "'nobody' is not an observer of this node"),
        (SCHEDULER, NodeCommand(kind=CommandKind.EVICT, dataset="other"), 409, "other"),
        (SCHEDULER, NodeCommand(kind=CommandKind.WARM, dataset="set", id="x", shards=b"1"), 409, "no shards"),
        (SCHEDULER, NodeCommand(kind=CommandKind.LIMIT, dataset="set"), 409, "a share or a ttl"),
        (SCHEDULER, NodeCommand(kind=CommandKind.LIMIT, dataset="set", share=7.0), 409, "at most 1"),
        (SCHEDULER, NodeCommand(kind=CommandKind.DRAIN), 409, "no other node"),
        (SCHEDULER, b"\xff\x00nonsense", 409, "invalid command"),
        (SCHEDULER, b"\x81\xa1y" + b"\x91" * 10_000 + b"\x00", 409, "invalid command"),
        (SCHEDULER, b"\x81\xa4kind\xa1\xff", 409, "invalid command"),
        (SCHEDULER, NodeCommand(kind=CommandKind.LIMIT, dataset="set", share=math.nan), 409, "share"),
        (SCHEDULER, NodeCommand(kind=CommandKind.LIMIT, dataset="set", ttl=math.nan), 409, "ttl"),
        (SCHEDULER, NodeCommand(kind=CommandKind.LIMIT, dataset="set", ttl=math.inf), 409, "ttl"),
        (SCHEDULER, NodeCommand(kind=CommandKind.EVICT, dataset="../../etc"), 409, "../../etc"),
        (SCHEDULER, NodeCommand(kind=CommandKind.PIN, dataset=""), 409, "dataset"),
        (
            SCHEDULER,
            NodeCommand(kind=CommandKind.WARM, dataset="set", id="x\n2026-01-01 a line of the log"),
            409,
            "invalid command",
        ),
    ],
)
def test_orders_that_make_no_sense_are_refused(
    node: Observed, who: str, order: NodeCommand | bytes, status: int, why: str
) -> None:
    answer = node.post(COMMAND_PATH, order, who)
    assert answer.status_code == status
    assert why in answer.text


def test_strangers_and_observers_elsewhere_are_refused(node: Observed) -> None:
    assert node.get(REPORT_PATH, "stranger").status_code == 403
    assert node.get("/state", LOOKER).status_code == 403
    assert node.get(REPORT_PATH, after="many").status_code == 409


def test_a_poll_without_news_ends_in_time_and_says_nothing_new(node: Observed) -> None:
    known = node.until(lambda report: True)
    news = node.report(known, wait=0.5)
    assert not news.full
    assert not news.snapshots
