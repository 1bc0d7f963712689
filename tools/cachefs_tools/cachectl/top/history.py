"""Derives rates from successive pictures, over the last minutes."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cachefs.job_messages import JobView
from cachefs.messages import Status
from cachefs_tools.cachectl.stats import sample_progress
from cachefs_tools.cachectl.top.picture import Picture

# Rates kept of each flow: as many as the widest terminal shows.
MAX_POINTS: Final = 400
# Seconds over which job rates and waiting shares are averaged.
AVERAGE_SECONDS: Final = 10.0


def _reads(status: Status) -> int:
    return sum(tier.hits for tier in status.tiers) + status.misses


# Name of a flow -> its counter in a status, since the daemon started.
FLOWS: Final[Mapping[str, Callable[[Status], int]]] = {
    "origin": lambda status: status.fetched_bytes,
    "peers in": lambda status: status.peers.bytes,
    "peers out": lambda status: status.peers.served_bytes,
    "reads": _reads,
    "misses": lambda status: status.misses,
}
# Flows in bytes.
BYTE_FLOWS: Final = ("origin", "peers in", "peers out")


@dataclass(slots=True)
class RateHistory:
    """Rates of one daemon. Counts from before a restart are discarded."""

    # By name: the flow per second, oldest first.
    flows: dict[str, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=MAX_POINTS) for name in FLOWS}, init=False
    )
    # Per second: counters by mount id and name; hits by tier name.
    mounts: dict[tuple[str, str], float] = field(default_factory=dict, init=False)
    hits: dict[str, float] = field(default_factory=dict, init=False)
    # Over the last seconds, by job: share of time (0 to 1) that its consumers waited; samples per second.
    waited: dict[str, float] = field(default_factory=dict, init=False)
    samples: dict[str, float] = field(default_factory=dict, init=False)
    _last: Picture | None = field(default=None, init=False)
    # The last seconds: monotonic time, and jobs by name.
    _jobs: deque[tuple[float, dict[str, JobView]]] = field(default_factory=deque, init=False)

    def add_picture(self, picture: Picture) -> None:
        """Add the next picture."""
        before, self._last = self._last, picture
        if before is None or before.status.instance != picture.status.instance:
            self._jobs.clear()
            self.mounts, self.hits = {}, {}
        elif (seconds := picture.when - before.when) > 0:
            self._add_rates(before.status, picture.status, seconds)
        self._add_job_rates(picture)

    def rate(self, flow: str) -> float:
        """Return the present flow per second."""
        points = self.flows[flow]
        return points[-1] if points else 0.0

    def _add_rates(self, before: Status, now: Status, seconds: float) -> None:
        for name, count in FLOWS.items():
            self.flows[name].append(max(0, count(now) - count(before)) / seconds)
        known = {mount.id: mount.counters for mount in before.mounts}
        self.mounts = {
            (mount.id, counter): max(0, mount.counters.get(counter, 0) - known[mount.id].get(counter, 0)) / seconds
            for mount in now.mounts
            if mount.id in known
            for counter in ("requests", "read")
        }
        hits = {tier.name: tier.hits for tier in before.tiers}
        self.hits = {tier.name: max(0, tier.hits - hits.get(tier.name, 0)) / seconds for tier in now.tiers}

    def _add_job_rates(self, picture: Picture) -> None:
        jobs = {job.job: job for job in picture.jobs.jobs}
        self._jobs.append((picture.when, jobs))
        while len(self._jobs) > 2 and self._jobs[1][0] <= picture.when - AVERAGE_SECONDS:
            self._jobs.popleft()
        then, before = self._jobs[0]
        self.waited, self.samples = {}, {}
        for name in jobs.keys() & before.keys() if (seconds := picture.when - then) > 0 else ():
            earlier = {consumer.consumer: consumer for consumer in before[name].consumers}
            known = [consumer for consumer in jobs[name].consumers if consumer.consumer in earlier]
            reported = reported_wait_share(before[name], jobs[name])
            stalled = jobs[name].stall_seconds - before[name].stall_seconds
            by_stalls = stalled_share(stalled, seconds, len(jobs[name].consumers))
            self.waited[name] = by_stalls if reported is None else reported
            self.samples[name] = sum(sample_progress(earlier[one.consumer], one) for one in known) / seconds


def reported_wait_share(before: JobView, now: JobView) -> float | None:
    """Return the share of time, 0 to 1, that a job's training loops waited for batches, according to its programs; None
    if they do not report it, or no loader was busy."""
    earlier = {consumer.consumer: consumer.loader for consumer in before.consumers}
    waited = busy = 0.0
    for consumer in now.consumers:
        then = earlier.get(consumer.consumer)
        if consumer.loader is not None and then is not None:
            waited += max(0.0, consumer.loader.waited - then.waited)
            busy += max(0.0, consumer.loader.busy - then.busy)
    return min(1.0, waited / busy) if busy > 0 else None


def stalled_share(waited: float, seconds: float, consumers: int) -> float:
    """Return the share of time, 0 to 1, for consumers that have waited *waited* seconds together. Capped at 1, since
    several reads of a consumer with workers may wait at once."""
    return min(1.0, max(0.0, waited) / (seconds * max(1, consumers)))


def relative_levels(points: Iterable[float], count: int) -> list[float]:
    """Return the last *count* points relative to the largest of them, padded with 0."""
    last = list(points)[-count:] if count > 0 else []
    most = max(last, default=0.0)
    return list(itertools.chain([0.0] * (count - len(last)), (point / most if most else 0.0 for point in last)))
