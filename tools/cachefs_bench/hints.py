"""`cachefs-bench hints`: checks whether scores rank nodes as a job's first epoch does.

Runs four real daemons with different parts of a dataset, on hosts with slow links, a real cachefs-scheduler that
follows them, and the same job on each node in turn. The last node is the home of nearly all blocks and holds all of
them, so the other nodes hold exactly the parts they were given. Then the service and daemons are stopped, and the
answers meanwhile are recorded.
"""

import http.client
import itertools
import json
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import numpy as np

from cachefs.errors import CachefsError
from cachefs.messages import Empty, OriginOptions
from cachefs.observe_messages import COMMAND_PATH, OBSERVER_HEADER, CommandKind, NodeCommand
from cachefs.rpc import DATASET_LIST
from cachefs.scheduling_messages import (
    ADMIT_PATH,
    ENDED_PATH,
    EXPLAIN_PATH,
    NODES_PATH,
    RANK_PATH,
    JobAdmission,
    JobEndReport,
    JobExplanation,
    NodesStatus,
    PlacementRequest,
    Ranking,
    RankRequest,
)
from cachefs_bench.cluster.run import READ_DEADLINE
from cachefs_bench.lab.bridge import bridge_network
from cachefs_bench.lab.cluster import PORT, ClusterSettings, LabCluster, create_cluster
from cachefs_bench.lab.host import LabHost, wait_for
from cachefs_bench.lab.job import JobSettings, start_job
from cachefs_bench.lab.node import LabNode
from cachefs_bench.lab.scratch import scratch_directory
from cachefs_bench.lab.scratch_node import DATASET, NodeSettings, TierSettings, list_dataset
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import run_throttle
from cachefs_bench.origin_server import BUCKET, run_filled_server
from cachefs_bench.scenario import DatasetShape
from cachefs_tools.cachectl.sched import SchedulerClient
from cachefs_tools.child_programs import KILL_WITH_PARENT, program_path

NAME: Final = "bench-scheduler"
SHARDS: Final = 256
SECONDS: Final = 60.0
# Seconds for which daemons are suspended, and the pause between requests meanwhile.
SILENT_SECONDS: Final = 5.0
_PAUSE: Final = 0.05
# Tolerance, as a share of the dataset.
_TOLERANCE: Final = 0.03


@dataclass(frozen=True, slots=True)
class HintsLoad:
    """The extent of the measurement."""

    files: int = 2000
    size: int = 110_000
    parts: tuple[float, ...] = (0.0, 0.3, 0.6)  # of the dataset, on all nodes but the last
    rounds: int = 2
    rate: float = 1500.0  # samples per second of a job that never waits
    bandwidth: float = 40e6  # bytes per second of the origin
    megabits: float = 500.0  # per second, of the link to each node


class SchedulerProcess:
    """A cachefs-scheduler on a host, which can be killed and restarted."""

    def __init__(self, host: LabHost, work: Path, seeds: Sequence[str]) -> None:
        work.mkdir()
        self._host = host
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None
        nodes = ", ".join(f'"{seed}"' for seed in seeds)
        self.client = SchedulerClient(str(work / "s"))
        (work / "config.toml").write_text(
            f'[service]\nsocket = "{work}/s"\nstate_dir = "{work}/state"\n'
            f'[cluster]\nnodes = [{nodes}]\nname = "{NAME}"\n'
        )

    def start(self) -> None:
        with (self._work / "log").open("ab") as log:
            command = [program_path("cachefs-scheduler"), "--config", f"{self._work}/config.toml"]
            self._process = subprocess.Popen(
                [*KILL_WITH_PARENT, *self._host.enter_command, *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def request_ranking(self, nodes: Sequence[str] | None = None) -> Ranking | None:
        """Return a ranking; None if the service does not answer."""
        request = RankRequest(
            ask=PlacementRequest(job="bench", dataset=DATASET), candidates=list(nodes) if nodes is not None else None
        )
        with suppress(CachefsError):
            return self.client.post(RANK_PATH, request, Ranking)
        return None

    def held_shares(self) -> dict[str, float]:
        """Return by node the share of the dataset that the service believes it holds."""
        with suppress(CachefsError):
            found = self.client.get(NODES_PATH, NodesStatus).nodes
            return {
                node.name: sum(dataset.bytes / dataset.total for dataset in node.datasets if dataset.dataset == DATASET)
                for node in found
                if not node.problem
            }
        return {}


def measure(load: HintsLoad, work: Path) -> dict[str, Any]:
    """Measure everything. *work* is an empty directory."""
    with _run_cluster(load, work) as (cluster, hub, service):
        rounds = [_run_round(load, cluster, hub, service, turn) for turn in range(load.rounds)]
        without = _measure_outages(cluster, service)
    return {
        "files": load.files,
        "size": load.size,
        "origin_bandwidth": load.bandwidth,
        "link_megabits": load.megabits,
        "rounds": rounds,
        "spearman": min(one["spearman"] for one in rounds),
        "spearman_of_estimates": min(one["spearman_of_estimates"] for one in rounds),
        "taken_away": without,
    }


@contextmanager
def _run_cluster(load: HintsLoad, work: Path) -> Iterator[tuple[LabCluster, LabHost, SchedulerProcess]]:
    with ExitStack() as stack:
        server = stack.enter_context(run_filled_server(work, DatasetShape(files=load.files, size=load.size), None))
        nodes = len(load.parts) + 1
        network = stack.enter_context(bridge_network(nodes))
        for number in range(nodes):
            network.limit_bandwidth(number, load.megabits)
        listener = stack.enter_context(network.hub.listen())
        throttle = stack.enter_context(run_throttle(server.endpoint, LinkLimits(), work / "throttle.log", listener))
        room = 2 * load.files * load.size
        settings = ClusterSettings(
            NodeSettings(TierSettings(room), TierSettings(room), read_deadline=READ_DEADLINE),
            keys={"schedulers": [NAME]},
            weights={f"node{number}": 1e-6 for number in range(1, nodes)},
        )
        cluster = stack.enter_context(create_cluster(work, settings, network.hosts, network.hub, server.credentials))
        options = OriginOptions(endpoint_url=throttle.endpoint, region="us-east-1", addressing_style="path")
        cluster.start_nodes()
        list_dataset(cluster.nodes[0].client, f"s3://{BUCKET}", options)
        throttle.set_limits(LinkLimits(bandwidth=load.bandwidth))
        service = SchedulerProcess(
            network.hub, work / "scheduler", [f"{node.host.address}:{PORT}" for node in cluster.nodes]
        )
        stack.callback(service.kill)
        service.start()
        wait_for(lambda: len(service.held_shares()) == nodes, SECONDS, "the service has heard all daemons")
        for node in cluster.nodes:
            _wait_for_dataset(node)
            node.mount(DATASET)
        yield cluster, network.hub, service


def _run_round(
    load: HintsLoad, cluster: LabCluster, hub: LabHost, service: SchedulerProcess, turn: int
) -> dict[str, Any]:
    """Place the parts on other nodes than in the round before, get scores, and run the job on each node."""
    *others, home = cluster.nodes
    parts = {node.name: load.parts[(number + turn) % len(load.parts)] for number, node in enumerate(others)}
    parts[home.name] = 1.0
    for node in (home, *others):
        _fill_node(node, hub, parts[node.name], turn)
        wait_for(
            lambda name=node.name: abs(service.held_shares().get(name, -1) - parts[name]) < _TOLERANCE,  # type: ignore[misc]
            2 * SECONDS, f"{node.name} holds what it is to",
        )  # fmt: skip
    wait_for(
        lambda: all(abs(service.held_shares().get(name, -1) - part) < _TOLERANCE for name, part in parts.items()),
        SECONDS, "the service knows what each node holds",
    )  # fmt: skip
    ranking = service.request_ranking()
    assert ranking is not None
    estimated = _estimated_waits(service, list(parts))
    seconds = {node.name: _first_epoch(load, node, turn) for node in cluster.nodes}
    names = list(parts)
    return {
        "nodes": [
            {
                "node": name, "cached": parts[name], "score": round(ranking.scores[name], 3),
                "estimated_wait": round(estimated[name], 2), "first_epoch": round(seconds[name], 2),
            }
            for name in names
        ],
        "spearman": spearman([ranking.scores[name] for name in names], [-seconds[name] for name in names]),
        "spearman_of_estimates": spearman([estimated[name] for name in names], [seconds[name] for name in names]),
    }  # fmt: skip


def _wait_for_dataset(node: LabNode) -> None:
    wait_for(
        lambda: any(dataset.name == DATASET for dataset in node.client.call(DATASET_LIST, Empty()).datasets),
        SECONDS, f"{node.name} knows the dataset",
    )  # fmt: skip


def _estimated_waits(service: SchedulerProcess, nodes: Sequence[str]) -> dict[str, float]:
    """Return by node the seconds that a job would wait in its first epoch."""
    job = f"bench:{uuid.uuid4().hex[:8]}"
    service.client.post(ADMIT_PATH, PlacementRequest(job=job, dataset=DATASET), JobAdmission)
    found = service.client.get(EXPLAIN_PATH, JobExplanation, job=job)
    service.client.post(ENDED_PATH, JobEndReport(job=job), EmptyResponse)
    return {node.node: node.first for node in found.nodes if node.node in nodes}


class EmptyResponse(msgspec.Struct):
    """An empty response."""


def _fill_node(node: LabNode, hub: LabHost, part: float, turn: int) -> None:
    """Make a node hold a share of the dataset, in random shards."""
    _send_command(node, hub, NodeCommand(kind=CommandKind.EVICT, dataset=DATASET))
    chosen = np.zeros(SHARDS, np.bool_)
    chosen[np.random.default_rng(turn).permutation(SHARDS)[: round(part * SHARDS)]] = True
    if part:
        shards = np.packbits(chosen, bitorder="little").tobytes()
        _send_command(
            node, hub, NodeCommand(kind=CommandKind.WARM, id=uuid.uuid4().hex, dataset=DATASET, shards=shards)
        )


def _send_command(node: LabNode, hub: LabHost, order: NodeCommand) -> None:
    def send() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(node.host.address, PORT + 1, timeout=SECONDS)
        try:
            connection.request("POST", COMMAND_PATH, msgspec.msgpack.encode(order), {OBSERVER_HEADER: NAME})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    status, body = hub.run_in_network(send)
    if status != 200:
        raise CachefsError(f"{node.name} does not {order.kind}: {body.decode(errors='replace')[:200]}")


def _first_epoch(load: HintsLoad, node: LabNode, turn: int) -> float:
    """Return the seconds from the job's start to the end of its first epoch."""
    settings = JobSettings(
        name=f"job{turn}", dataset=DATASET, files=load.files, epochs=1, seed=turn, rate=load.rate, threads=8
    )
    began = time.monotonic()
    with start_job(settings, [node]) as job:
        job.run_epoch(0, 10 * SECONDS)
        seconds = time.monotonic() - began
        wrong = sum(result.errors + result.wrong for result in job.results())
    if wrong:
        raise CachefsError(f"{wrong} reads on {node.name} failed or were wrong")
    return seconds


def _measure_outages(cluster: LabCluster, service: SchedulerProcess) -> dict[str, Any]:
    """Record answers while half of the daemons are suspended, then without the service, then after its restart with
    suspended daemons."""
    silent = cluster.nodes[: len(cluster.nodes) // 2]
    for node in silent:
        node.suspend()
    try:
        while_silent = _poll_rankings(service, SILENT_SECONDS)
        service.kill()
        dead = _poll_rankings(service, 0.5)
        began = time.monotonic()
        service.start()
        wait_for(
            lambda: (found := service.request_ranking()) is not None and bool(found.scores),
            SECONDS,
            "the service ranks again",
        )
        again = time.monotonic() - began
        after = service.request_ranking()
    finally:
        for node in silent:
            node.resume()
    began = time.monotonic()
    wait_for(lambda: len(service.held_shares()) == len(cluster.nodes), SECONDS, "the service hears all daemons again")
    return {
        "silent_daemons": len(silent),
        "while_silent": while_silent,
        "while_the_service_is_dead": dead,
        "seconds_until_it_ranks_again": round(again, 2),
        "nodes_ranked_then": sum(score > 0 for score in after.scores.values()) if after is not None else 0,
        "seconds_until_all_are_heard_again": round(time.monotonic() - began, 2),
    }


def _poll_rankings(service: SchedulerProcess, seconds: float) -> dict[str, Any]:
    took, ages, failed = [], [], 0
    end = time.monotonic() + seconds
    for _ in itertools.count():
        began = time.monotonic()
        if began > end:
            break
        found = service.request_ranking()
        took.append(time.monotonic() - began)
        if found is None or not found.scores:
            failed += 1
        else:
            ages.append(found.age)
        time.sleep(_PAUSE)
    return {
        "asked": len(took), "failed": failed, "slowest_ms": round(1000 * max(took), 1),
        "oldest_data_seconds": round(max(ages, default=0.0), 1),
    }  # fmt: skip


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation: 1 for equal orders; ties share their ranks."""
    a, b = _ranks(one), _ranks(other)
    return round(float(np.corrcoef(a, b)[0, 1]), 3)


def _ranks(values: Sequence[float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    numbers = np.asarray(values, np.float64)
    below = (numbers[:, None] > numbers[None, :]).sum(axis=1)
    equal = (numbers[:, None] == numbers[None, :]).sum(axis=1)
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = below + (equal - 1) / 2
    return ranks


DEFAULT = HintsLoad()


@click.command("hints")
@click.option("--files", default=DEFAULT.files, show_default=True, type=click.IntRange(min=256), help="Of the dataset.")
@click.option("--rounds", default=DEFAULT.rounds, show_default=True, type=click.IntRange(min=1), help="Of all nodes.")
@click.option(
    "--rate", default=DEFAULT.rate, show_default=True, type=click.FloatRange(min=1), help="Samples/s of the job."
)
@click.option(
    "--bandwidth", default=DEFAULT.bandwidth / 1e6, show_default=True, type=click.FloatRange(min=0.1),
    help="Of the origin, in MB/s.",
)  # fmt: skip
@click.option(
    "--megabits", default=DEFAULT.megabits, show_default=True, type=click.FloatRange(min=1), help="Of each node's link."
)
def hints_command(files: int, rounds: int, rate: float, bandwidth: float, megabits: float) -> None:
    """Run the same job on four nodes that hold 0, 30, 60 and 100 % of its dataset, and compare with their scores.

    Each node has a network namespace, so it needs root. Then daemons are stopped and the service is killed, and it is
    seen what answers are like.
    """
    load = HintsLoad(files=files, rounds=rounds, rate=rate, bandwidth=bandwidth * 1e6, megabits=megabits)
    with scratch_directory("cachefs-hints-") as work:
        click.echo(json.dumps(measure(load, work), indent=2))
