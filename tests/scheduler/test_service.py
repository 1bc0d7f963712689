"""cachefs-scheduler against real daemons: what it knows, which nodes it prefers, and what it has them do."""

import json
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from cachefs.errors import ConfigError, NotFound
from cachefs.observe_messages import CommandKind, NodeCommand
from cachefs.scheduling_messages import (
    ADMISSIONS_PATH,
    ADMIT_PATH,
    ENDED_PATH,
    EXPLAIN_PATH,
    PLACED_PATH,
    POLICY_PATH,
    QUEUE_PATH,
    RANK_PATH,
    RESIZED_PATH,
    SCALE_PATH,
    DatasetPolicy,
    JobAdmission,
    JobAdmissions,
    JobEndReport,
    JobExplanation,
    PlacementPolicy,
    PlacementReport,
    PlacementRequest,
    PolicyStatus,
    QueueStatus,
    Ranking,
    RankRequest,
    ScaleRequest,
    ScaleResult,
)
from cachefs_tools.cachectl import main
from tests.cachectl import run_here
from tests.scheduler.observed import Observed, made_files, observed
from tests.scheduler.running import COMMAND, MODULE, SECONDS, Nothing, Scheduler, scheduler
from tests.warm_python import warm

FILES = 512


def cachectl_sched(*words: str) -> subprocess.CompletedProcess[str]:
    return run_here(main, "cachectl", ["sched", *words])


@dataclass(frozen=True)
class Place:
    """Three daemons, each alone, with one dataset; and a service that follows them."""

    nodes: list[Observed]
    scheduler: Scheduler

    def rank(self, policy: PlacementPolicy = PlacementPolicy.PREFER) -> Ranking:
        return self.scheduler.client.post(
            RANK_PATH, RankRequest(ask=PlacementRequest(job="slurm:0", dataset="set", policy=policy)), Ranking
        )

    def warm(self, node: int, part: float = 1.0) -> None:
        shards = bytes([255] * round(32 * part) + [0] * (32 - round(32 * part)))
        self.nodes[node].order(NodeCommand(kind=CommandKind.WARM, id=uuid.uuid4().hex, dataset="set", shards=shards))
        self.holds(node, part)

    def evict(self, node: int) -> None:
        self.nodes[node].order(NodeCommand(kind=CommandKind.EVICT, dataset="set"))
        self.holds(node, 0.0)

    def holds(self, node: int, part: float) -> None:
        name = self.nodes[node].name
        self.scheduler.until(lambda: abs(self.scheduler.held(name) - part) < 0.01)

    def admit(self, job: str, **fields: object) -> JobAdmission:
        ask = PlacementRequest(job=job, dataset="set", policy=PlacementPolicy.SUSPEND, max_jobs_per_copy=1, **fields)  # type: ignore[arg-type]
        return self.scheduler.client.post(ADMIT_PATH, ask, JobAdmission)

    def end(self, *jobs: str) -> None:
        for job in jobs:
            self.scheduler.client.post(ENDED_PATH, JobEndReport(job=job), Nothing)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    work = tmp_path_factory.mktemp("p")
    made_files(work / "set", FILES)
    with ExitStack() as stack:
        nodes = [stack.enter_context(observed(work / f"n{number}", f"n{number}")) for number in range(3)]
        for node in nodes:
            node.daemon.add_dataset("set", f"file://{work}/set")
        running = stack.enter_context(
            scheduler(work / "sched", [node.address for node in nodes], {"defaults": {"preload": True}})
        )
        found = Place(nodes, running)
        running.until(lambda: (status := running.status()) is not None and status.fresh == 3)
        yield found


@pytest.fixture(autouse=True)
def _clean(place: Place) -> Iterator[None]:
    yield
    for job in place.scheduler.client.get(QUEUE_PATH, QueueStatus).jobs:
        place.end(job.job)
    for number in range(3):
        if place.scheduler.held(f"n{number}"):
            place.evict(number)


def test_nodes_that_hold_more_are_better(place: Place) -> None:
    place.warm(0)
    place.warm(1, 0.5)
    found = place.rank()
    assert found.scores["n0"] == 1.0
    assert found.scores["n0"] > found.scores["n1"] > found.scores["n2"] > 0
    assert place.rank(PlacementPolicy.REQUIRE).refused.keys() == {"n2"}


def test_a_job_that_is_placed_finds_its_data_there(place: Place) -> None:
    ask = PlacementRequest(job="slurm:1", dataset="set")
    place.scheduler.client.post(PLACED_PATH, PlacementReport(job="slurm:1", nodes=["n2"], ask=ask), Nothing)
    place.holds(2, 1.0)
    # It has two nodes now, and leaves the one it was on: what it had there goes once others have it.
    place.scheduler.client.post(RESIZED_PATH, PlacementReport(job="slurm:1", nodes=["n0", "n1"]), Nothing)
    place.holds(0, 0.5)
    place.holds(1, 0.5)
    place.holds(2, 0.0)
    found = place.scheduler.client.get(EXPLAIN_PATH, JobExplanation, job="slurm:1")
    assert found.placed == ["n0", "n1"]
    assert found.state == "placed"
    assert {one.node for one in found.nodes} == {"n0", "n1", "n2"}


def test_jobs_wait_for_a_slot_and_get_it_in_turn_also_over_a_restart(place: Place) -> None:
    place.warm(0)
    first = place.admit("slurm:10", user="a")
    assert (first.go, first.targets) == (True, ["n0"])
    assert [place.admit(f"slurm:{job}", user="a").go for job in (11, 12)] == [False, False]
    assert place.admit("slurm:13", user="b", priority=5).place == 1
    state = place.scheduler.config.parent / "state/state.json"
    place.scheduler.until(lambda: state.exists() and "slurm:13" in state.read_text())
    place.scheduler.kill()
    place.scheduler.start()
    place.scheduler.until(lambda: place.scheduler.held("n0") == 1.0)
    before = place.scheduler.client.get(ADMISSIONS_PATH, JobAdmissions)
    assert [one.job for one in before.jobs if one.go] == ["slurm:10"]
    place.end("slurm:10")
    after = place.scheduler.client.get(ADMISSIONS_PATH, JobAdmissions, after=str(before.version))
    assert [one.job for one in after.jobs if one.go] == ["slurm:13"]
    place.end("slurm:13")
    assert place.admit("slurm:11", user="a").go
    assert place.admit("slurm:12", user="a").place == 1


def test_another_copy_is_made_where_the_only_one_is_busy(place: Place) -> None:
    place.warm(0)
    clone = {"dataset": "set", "policy": PlacementPolicy.CLONE, "max_jobs_per_copy": 1}
    client = place.scheduler.client
    assert client.post(ADMIT_PATH, PlacementRequest(job="slurm:20", **clone), JobAdmission).targets == ["n0"]  # type: ignore[arg-type]
    client.post(PLACED_PATH, PlacementReport(job="slurm:20", nodes=["n0"]), Nothing)
    [target] = client.post(ADMIT_PATH, PlacementRequest(job="slurm:21", **clone), JobAdmission).targets  # type: ignore[arg-type]
    assert target in ("n1", "n2")
    place.holds(int(target[1]), 1.0)
    assert place.rank().scores[target] > 0.9


def test_a_dataset_gets_more_copies_and_fewer_by_call(place: Place) -> None:
    place.warm(0)
    client = place.scheduler.client
    client.post(SCALE_PATH, ScaleRequest(dataset="set", copies=3), ScaleResult)
    for number in range(3):
        place.holds(number, 1.0)
    client.post(SCALE_PATH, ScaleRequest(dataset="set", copies=1), ScaleResult)
    place.scheduler.until(lambda: sum(place.scheduler.held(f"n{number}") for number in range(3)) == 1.0)


def test_a_copy_that_nobody_reads_goes_when_its_time_is_over(place: Place) -> None:
    place.warm(1)
    client = place.scheduler.client
    client.post(POLICY_PATH, DatasetPolicy(dataset="set", cleanup="ttl", ttl=1.0), PolicyStatus)
    place.holds(1, 0.0)
    changed = client.post(POLICY_PATH, DatasetPolicy(dataset="set", cleanup="none"), PolicyStatus)
    assert changed.policy.cleanup == "none"


def test_silent_daemons_count_less_and_answers_go_on(place: Place) -> None:
    place.warm(0)
    daemon = place.nodes[0].daemon.process
    assert daemon is not None
    before = place.rank()
    daemon.send_signal(signal.SIGSTOP)
    try:
        place.scheduler.until(lambda: place.rank().age > before.age + 2)
        assert place.rank().scores["n0"] == 1.0  # it is not silent for long
    finally:
        daemon.send_signal(signal.SIGCONT)


def test_what_makes_no_sense_is_refused_in_a_line(place: Place) -> None:
    client = place.scheduler.client
    with pytest.raises(NotFound, match="no scheduler has reported a job 'slurm:99'"):
        client.get(EXPLAIN_PATH, JobExplanation, job="slurm:99")
    with pytest.raises(ConfigError, match="ranks"):
        client.post(ADMIT_PATH, PlacementRequest(job="x", dataset="set", ranks=0), JobAdmission)
    with pytest.raises(ConfigError, match="name one of"):
        client.post(SCALE_PATH, ScaleRequest(), ScaleResult)
    with pytest.raises(ConfigError, match="cleanup 'often'"):
        client.post(POLICY_PATH, DatasetPolicy(dataset="set", cleanup="often"), PolicyStatus)
    ranking = client.post(RANK_PATH, RankRequest(ask=PlacementRequest(job="x", dataset="unheard-of")), Ranking)
    assert not ranking.scores
    assert "no node knows a dataset unheard-of" in ranking.why


def test_cachectl_shows_it_in_80_columns_and_as_json(place: Place) -> None:
    place.warm(0)
    assert place.admit("slurm:30-a-job-with-a-long-name-that-goes-on-and-on", user="someone").go
    for command in (["status"], ["queue", "--json"], ["policy", "set"]):
        done = cachectl_sched(*command, "--scheduler", str(place.scheduler.socket))
        assert done.returncode == 0, done.stderr
        shown = done.stdout
        assert "set" in shown
        if "--json" in command:
            assert json.loads(shown)["jobs"][0]["user"] == "someone"
        else:
            assert max(map(len, shown.splitlines())) <= 80


def test_cachectl_says_in_a_line_that_no_service_answers(tmp_path: Path) -> None:
    failed = cachectl_sched("status", "--scheduler", str(tmp_path / "none"))
    assert failed.returncode == 3
    assert "no cachefs-scheduler answers at" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("socket", "another cachefs-scheduler keeps its queue there"),
        ("state_dir", "another cachefs-scheduler answers at"),
    ],
)
def test_a_second_service_says_so_and_leaves_the_first_alone(
    place: Place, tmp_path: Path, other: str, why: str
) -> None:
    lines = place.scheduler.config.read_text().splitlines()
    config = tmp_path / "c"
    config.write_text(
        "\n".join(f'{other} = "{tmp_path}/o"' if line.startswith(f'"{other}"') else line for line in lines)
    )
    ended = warm(MODULE).run([sys.executable, COMMAND, "--config", str(config)], timeout=SECONDS)
    assert ended.returncode == 1
    assert why in ended.stderr
    assert "Traceback" not in ended.stderr
    assert place.scheduler.status() is not None


@pytest.mark.parametrize(
    "body", [b"\xff", b'{"job":"\xff","dataset":"set"}', b'{"more":' + b"[" * 100_000, b"[]", b"null", b"{"]
)
def test_what_is_no_message_is_refused_in_a_line(place: Place, body: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(place.scheduler.socket))
        head = f"POST {ADMIT_PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":' in answer


def test_a_node_is_not_said_to_drain_where_orders_are_switched_off(place: Place, tmp_path: Path) -> None:
    with scheduler(tmp_path, [node.address for node in place.nodes], {"cluster": {"orders": False}}) as running:
        running.until(lambda: (status := running.status()) is not None and status.fresh == 3)
        with pytest.raises(ConfigError, match="this service sends no commands"):
            running.client.post(SCALE_PATH, ScaleRequest(drain="n0"), ScaleResult)


def test_a_pinned_copy_stays_until_its_policy_is_another_one(place: Place) -> None:
    client, node = place.scheduler.client, place.nodes[0]
    place.warm(0)
    place.warm(1)
    client.post(POLICY_PATH, DatasetPolicy(dataset="set", cleanup="pin"), PolicyStatus)
    try:
        for each in place.nodes[:2]:
            each.until(lambda report: any(one.pinned for one in report.snapshots))
        done = client.post(SCALE_PATH, ScaleRequest(dataset="set", copies=1), ScaleResult)
        assert any("stays: a job or a mount reads the copy, or the copy is pinned" in line for line in done.text)
        assert place.scheduler.held("n0") == place.scheduler.held("n1") == 1.0
    finally:
        client.post(POLICY_PATH, DatasetPolicy(dataset="set", cleanup="none"), PolicyStatus)
    node.until(lambda report: report.snapshots and not any(one.pinned for one in report.snapshots))


def test_a_preload_makes_room_of_what_was_read_least_recently(tmp_path: Path) -> None:
    """The node's tiers have room for one of the two datasets."""
    size = 16 * 10**6
    for name in ("old", "new"):
        made_files(tmp_path / name, 64, size // 64)
    tier = {"budget": "12MiB", "segment_size": "4MiB"}
    tiers = {"memory": tier, "ssd": tier, "daemon": {"block_size": "1MiB"}}
    with observed(tmp_path / "n", "n0", tiers) as node:
        for name in ("old", "new"):
            node.daemon.add_dataset(name, f"file://{tmp_path}/{name}")
        sections = {"defaults": {"preload": True, "cleanup": "lru"}}
        with scheduler(tmp_path / "sched", [node.address], sections) as running:
            running.until(lambda: (status := running.status()) is not None and status.datasets == 2)
            client = running.client
            client.post(
                PLACED_PATH,
                PlacementReport(job="slurm:1", nodes=["n0"], ask=PlacementRequest(job="slurm:1", dataset="old")),
                Nothing,
            )
            running.until(lambda: running.held("n0", "old") > 0.9)
            client.post(ENDED_PATH, JobEndReport(job="slurm:1"), Nothing)
            client.post(
                PLACED_PATH,
                PlacementReport(job="slurm:2", nodes=["n0"], ask=PlacementRequest(job="slurm:2", dataset="new")),
                Nothing,
            )
            running.until(lambda: running.held("n0", "new") > 0.9)
            running.until(lambda: running.held("n0", "old") == 0.0)
            assert "n0: evicting old: read least recently" in running.log.read_text()
