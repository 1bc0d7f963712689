"""What a node did, and when: its counters, sampled while jobs run."""

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
from cachefs_tools.bench.training_node import TrainingNode

PERIOD: Final = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one moment (CLOCK_MONOTONIC). hits, misses: reads at the mount that found their block on the node,
    and that did not, as the mount last reported them; origin_bytes, origin_requests, refused: counted by the proxy."""

    when: float
    hits: int
    misses: int
    origin_bytes: int
    origin_requests: int
    refused: int

    def __sub__(self, before: "Sample") -> "Sample":
        return Sample(
            self.when - before.when, self.hits - before.hits, self.misses - before.misses,
            self.origin_bytes - before.origin_bytes, self.origin_requests - before.origin_requests,
            self.refused - before.refused,
        )  # fmt: skip


@dataclass(slots=True)
class Timeline:
    """cpu_seconds: by process, over the whole time; busy_cores: of the whole machine, on average."""

    samples: list[Sample] = field(default_factory=list)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    busy_cores: float = 0.0

    def at(self, when: float) -> Sample:
        """The last sample taken at *when* or before, or the first there is."""
        number = bisect.bisect_right(self.samples, when, key=lambda sample: sample.when)
        return self.samples[max(0, number - 1)]


@contextmanager
def recorded(node: TrainingNode) -> Iterator[Timeline]:
    """Complete once the block has ended."""
    timeline = Timeline([_take(node)])
    cpu, busy = _cpu_seconds(node), _busy_seconds()
    over = threading.Event()

    def record() -> None:
        while not over.wait(PERIOD):
            timeline.samples.append(_take(node))

    thread = threading.Thread(target=record, name="timeline")
    thread.start()
    try:
        yield timeline
        # What the mount has done by now it reports within a second.
        time.sleep(1.5)
    finally:
        over.set()
        thread.join()
    timeline.samples.append(_take(node))
    timeline.busy_cores = (_busy_seconds() - busy) / (timeline.samples[-1].when - timeline.samples[0].when)
    timeline.cpu_seconds = {name: after - cpu[name] for name, after in _cpu_seconds(node).items()}


def _take(node: TrainingNode) -> Sample:
    when = time.monotonic()
    (mount,) = node.client.call(STATUS, Empty()).mounts
    proxy = node.throttle.counters()
    # Empty before the mount's first report.
    counters = Counter(mount.counters)
    return Sample(
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
    """With its children: a mount works in those."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children()))


def _busy_seconds() -> float:
    """Processor seconds of all processes of the machine since it started."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - times.iowait)
