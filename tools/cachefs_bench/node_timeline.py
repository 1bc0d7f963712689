"""Samples a node's counters four times a second while jobs run."""

import bisect
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import psutil

from cachefs.errors import CachefsError
from cachefs.messages import Empty
from cachefs.rpc import STATUS
from cachefs_bench.training_node import TrainingNode

PERIOD_SECONDS: Final = 0.25


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
