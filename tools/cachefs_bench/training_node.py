"""A complete node for one run of `cachefs-bench train`: a throttled S3 server, a daemon with small tiers, and a mount.

`record_node` samples the node's counters four times a second while jobs run.
"""

import bisect
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from cachefs.errors import CachefsError
from cachefs.messages import Empty, OriginOptions
from cachefs.rpc import STATUS, DaemonClient
from cachefs_bench.lab.scratch_node import (
    DATASET,
    NodeSettings,
    TierSettings,
    list_dataset,
    memory_directory,
    run_daemon,
)
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.lab.throttle import Throttle, run_throttle
from cachefs_bench.origin_server import BUCKET, OriginServer
from cachefs_bench.scenario import Scenario
from cachefs_daemon.store.capacity import metadata_reserve
from cachefs_daemon.store.segment_writer import span
from cachefs_tools.child_programs import mount_dataset

# The daemon requires room for one block of the largest size, whatever the sizes of the files.
BLOCK_SIZE: Final = 256 << 10
MIN_TIER: Final = BLOCK_SIZE + (64 << 10)
SEGMENT_SIZE: Final = 16 << 20
PERIOD_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class TrainingNode:
    """The running node."""

    client: DaemonClient
    socket: Path
    mountpoint: Path
    throttle: Throttle
    capacity: int  # samples that fit into the tiers


def budget_for(size: int) -> int:
    """Return the budget of a tier for blocks of *size* bytes in all.

    The tier reserves 1/128 of its budget for the file system (see cachefs_daemon.store.capacity.metadata_reserve).
    """
    return size + max(metadata_reserve(0), size // 127 + 1) if size else 0


def held_samples(scenario: Scenario) -> int:
    """Return the number of samples that the tiers hold together."""
    return round(scenario.tiers.capacity * scenario.shape.files)


def node_settings(scenario: Scenario) -> NodeSettings:
    """Return settings with tiers of the capacity. Raises CachefsError if the daemon would refuse them."""
    record = span(scenario.shape.size)
    if scenario.shape.size > BLOCK_SIZE:
        raise CachefsError(f"files of {scenario.shape.size} bytes are more than one block of {BLOCK_SIZE}")
    cached = held_samples(scenario)
    in_memory = round(scenario.tiers.memory * cached)
    # Tiers that hold everything need not be exact. Spare room keeps the budgets from having any effect.
    spare = 32 << 20 if scenario.tiers.capacity >= 1 else 0
    memory_budget, ssd_budget = (budget_for(blocks * record) + spare for blocks in (in_memory, cached - in_memory))
    if memory_budget < MIN_TIER or 0 < ssd_budget < MIN_TIER:
        raise CachefsError("a tier would be smaller than one block; use more files or a larger capacity")
    memory, ssd = (TierSettings(budget, SEGMENT_SIZE) for budget in (memory_budget, ssd_budget))
    return NodeSettings(memory, ssd, BLOCK_SIZE, scenario.policy)


@contextmanager
def run_training_node(work: Path, server: OriginServer, scenario: Scenario) -> Iterator[TrainingNode]:
    """Run a new, empty node with the dataset listed and mounted. The origin is throttled after the listing."""
    settings = node_settings(scenario)
    mountpoint = work / "mnt"
    with ExitStack() as stack:
        memory = stack.enter_context(memory_directory("cachefs-bench-"))
        throttle = stack.enter_context(run_throttle(server.endpoint, LinkLimits(), work / "throttle.log"))
        node = stack.enter_context(run_daemon(work, memory, settings, server.credentials))
        options = OriginOptions(endpoint_url=throttle.endpoint, region="us-east-1", addressing_style="path")
        list_dataset(node.client, f"s3://{BUCKET}", options)
        # Jobs that drop the pages they have read would also drop pushed pages.
        pushing = "push" if scenario.keep_pages else "no_push"
        stack.enter_context(mount_dataset(DATASET, mountpoint, node.socket, work / "mount.log", [pushing]))
        throttle.set_limits(scenario.limits)
        yield TrainingNode(node.client, node.socket, mountpoint, throttle, held_samples(scenario))


@dataclass(frozen=True, slots=True)
class NodeSample:
    """Counters of the node at one moment, or their growth between two."""

    when: float  # seconds of CLOCK_MONOTONIC
    hits: int  # reads that found their block on the node, as the mount last reported them
    misses: int  # reads that did not, as the mount last reported them
    origin_bytes: int  # counted by the proxy
    origin_requests: int  # counted by the proxy
    refused: int  # requests that the proxy answered with 503

    def __sub__(self, before: "NodeSample") -> "NodeSample":
        return NodeSample(
            self.when - before.when, self.hits - before.hits, self.misses - before.misses,
            self.origin_bytes - before.origin_bytes, self.origin_requests - before.origin_requests,
            self.refused - before.refused,
        )  # fmt: skip


@dataclass(slots=True)
class NodeTimeline:
    """The moments in order of time, and processor use over the whole time."""

    samples: list[NodeSample] = field(default_factory=list)
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # by process, over the whole time
    busy_cores: float = 0.0  # of the whole machine, on average

    def sample_at(self, when: float) -> NodeSample:
        """Return the last moment at or before *when*, or the first moment if there is none."""
        number = bisect.bisect_right(self.samples, when, key=lambda moment: moment.when)
        return self.samples[max(0, number - 1)]


@contextmanager
def record_node(node: TrainingNode) -> Iterator[NodeTimeline]:
    """Record the node while the block runs. The timeline is complete when the block has ended."""
    timeline = NodeTimeline([_take_sample(node)])
    cpu, busy = _cpu_seconds(node), _busy_seconds()
    over = threading.Event()

    def record() -> None:
        while not over.wait(PERIOD_SECONDS):
            timeline.samples.append(_take_sample(node))

    thread = threading.Thread(target=record, name="timeline")
    thread.start()
    try:
        yield timeline
        # The mount reports its work within a second.
        time.sleep(1.5)
    finally:
        over.set()
        thread.join()
    timeline.samples.append(_take_sample(node))
    timeline.busy_cores = (_busy_seconds() - busy) / (timeline.samples[-1].when - timeline.samples[0].when)
    timeline.cpu_seconds = {name: after - cpu[name] for name, after in _cpu_seconds(node).items()}


def _take_sample(node: TrainingNode) -> NodeSample:
    when = time.monotonic()
    (mount,) = node.client.call(STATUS, Empty()).mounts
    proxy = node.throttle.read_counters()
    # The counters are empty before the mount's first report.
    counters = Counter(mount.counters)
    return NodeSample(
        when, counters["hits_memory"] + counters["hits_ssd"], counters["misses"], proxy.bytes, proxy.requests,
        proxy.refused,
    )  # fmt: skip


def _cpu_seconds(node: TrainingNode) -> dict[str, float]:
    status = node.client.call(STATUS, Empty())
    pids = {"daemon": status.pid, "mount": status.mounts[0].pid, "proxy": node.throttle.pid}
    try:
        return {name: _cpu_seconds_of(psutil.Process(pid)) for name, pid in pids.items()}
    except psutil.NoSuchProcess as error:
        raise CachefsError(f"a process of the node has died: {error}") from None


def _cpu_seconds_of(process: psutil.Process) -> float:
    """Return the processor seconds of the process and its children, where a mount does its work."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children()))


def _busy_seconds() -> float:
    """Return the processor seconds of all processes of the machine since its start."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)
