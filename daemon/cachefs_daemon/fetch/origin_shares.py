"""Measures what each job wants of each origin and gets, and says which jobs an over-subscribed origin holds back.

The limiter decides by the requests that wait, and needs none of these figures (cachefs.planning.requests.shares): they
are for people. In a cluster, the figures of other nodes are added, since each node fetches a part of every job's
blocks.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from cachefs.job_messages import OriginShare
from cachefs.messages import Trouble
from cachefs.planning.prefetch.job_demand import JobDemand
from cachefs.planning.requests.shares import max_min_shares
from cachefs.sizes import format_size
from cachefs.trouble_texts import Cause
from cachefs_daemon.fetch.concurrency_limiter import ConcurrencyLimiter
from cachefs_daemon.origin.endpoint import Endpoint

# Seconds between two measurements, and the time constant of their mean.
SAMPLE_SECONDS: Final = 1.0
_MEAN_SECONDS: Final = 5.0
# A job is held back if its urgent reads wait in this part of the measurements, and it gets less than this part of what
# it wants.
_HELD_BACK_SHARE: Final = 0.5
_MIN_GIVEN_SHARE: Final = 0.95
# Below this rate in bytes per second a job neither wants nor gets anything.
_MIN_RATE: Final = 1.0


@dataclass(slots=True)
class OriginUse:
    """The use of one origin by one job, as means of the last seconds."""

    # Bytes a second that the job wants, and gets.
    wants: float = 0.0
    gets: float = 0.0
    # The part of the time in which its urgent reads have waited for their turn.
    waits: float = 0.0

    def add_sample(self, wants: float, gets: float, waits: bool, weight: float) -> None:
        self.wants += weight * (wants - self.wants)
        self.gets += weight * (gets - self.gets)
        self.waits += weight * (waits - self.waits)

    @property
    def is_over(self) -> bool:
        return max(self.wants, self.gets) < _MIN_RATE and self.waits < 0.01


# By name of an origin's server and name of a job.
UsesByOrigin = Mapping[str, Mapping[str, OriginUse]]


class OriginShares:
    """Keeps the demand of each job at each origin, and what it gets. Used on the event loop."""

    def __init__(
        self,
        limiter: ConcurrencyLimiter,
        fetched: Counter[tuple[str, Endpoint]],
        demands: Callable[[], Mapping[str, JobDemand]],
        endpoint_of: Callable[[str], Endpoint | None],
    ) -> None:
        """fetched: bytes that were fetched by job and server; jobs that have ended are removed from it. demands:
        returns the demand of each job. endpoint_of: returns the server of a snapshot, by the snapshot's id."""
        self._limiter = limiter
        self._fetched = fetched
        self._fetched_before: dict[tuple[str, Endpoint], int] = {}
        self._demands = demands
        self._endpoint_of = endpoint_of
        self._sampled_at = time.monotonic()
        self._uses: dict[str, dict[str, OriginUse]] = {}
        self._held_since: dict[tuple[str, str], float] = {}  # by job and origin: unix time
        self._remote_uses: Mapping[str, UsesByOrigin] = {}  # by id of another node
        self._total: UsesByOrigin = {}  # through all nodes, as of the last sample or news of other nodes

    @property
    def local_uses(self) -> UsesByOrigin:
        """The uses of origins through this node."""
        return self._uses

    def take_remote_uses(self, uses: Mapping[str, UsesByOrigin]) -> None:
        """Count the uses of origins through other nodes, by their ids, in place of those counted before."""
        if uses != self._remote_uses:
            self._remote_uses = uses
            self._total = self._sum_uses()

    async def run(self) -> None:
        """Measure as long as the daemon runs."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.sample(time.monotonic())

    def sample(self, now: float) -> None:
        """Measure. now: monotonic seconds."""
        seconds, self._sampled_at = max(1e-3, now - self._sampled_at), now
        weight = min(1.0, seconds / _MEAN_SECONDS)
        wants: Counter[tuple[str, str]] = Counter()
        for job, demand in self._demands().items():
            for snapshot, rate in demand.wants.items():
                if (endpoint := self._endpoint_of(snapshot)) is not None:
                    wants[endpoint.name, job] += int(rate)
        gets: Counter[tuple[str, str]] = Counter()
        for (job, endpoint), size in self._fetched.items():
            gets[endpoint.name, job] += size - self._fetched_before.get((job, endpoint), 0)
        self._fetched_before = dict(self._fetched)
        waits = {(server.name, job) for server, job in self._limiter.urgent_jobs() if isinstance(server, Endpoint)}
        known = {(origin, job) for origin, uses in self._uses.items() for job in uses}
        for origin, job in known | wants.keys() | gets.keys() | waits:
            use = self._uses.setdefault(origin, {}).setdefault(job, OriginUse())
            key = origin, job
            use.add_sample(wants[key], gets[key] / seconds, key in waits, weight)
        self._uses = {
            origin: left
            for origin, uses in self._uses.items()
            if (left := {job: use for job, use in uses.items() if not use.is_over})
        }
        for job, endpoint in [key for key in self._fetched if key[0] not in self._uses.get(key[1].name, {})]:
            del self._fetched[job, endpoint], self._fetched_before[job, endpoint]
        self._total = self._sum_uses()
        self._note_held_back()

    def _note_held_back(self) -> None:
        held = {(job, share.origin) for job in self._jobs() for share in self.shares_of(job) if share.held_back}
        self._held_since = {key: self._held_since.get(key, time.time()) for key in held}

    def _jobs(self) -> set[str]:
        return {job for uses in self._uses.values() for job in uses if job}

    def _sum_uses(self) -> UsesByOrigin:
        """Return the uses of origins through all nodes. Each job's shares are asked for several times a second, so the
        sum is kept."""
        total: defaultdict[str, dict[str, OriginUse]] = defaultdict(dict)
        for node in (self._uses, *self._remote_uses.values()):
            for origin, uses in node.items():
                for job, use in uses.items():
                    one = total[origin].setdefault(job, OriginUse())
                    one.wants += use.wants
                    one.gets += use.gets
                    one.waits = max(one.waits, use.waits)
        return total

    def shares_of(self, job: str) -> list[OriginShare]:
        """Return the share that a job has of each origin it uses."""
        found = []
        for origin, uses in sorted(self._total.items()):
            if job not in uses:
                continue
            wants = {one: max(use.wants, use.gets) for one, use in uses.items()}
            given = sum(use.gets for use in uses.values())
            own = uses[job]
            is_held = own.waits >= _HELD_BACK_SHARE and own.gets < _MIN_GIVEN_SHARE * own.wants
            found.append(
                OriginShare(
                    origin=origin,
                    wants=own.wants,
                    gets=own.gets,
                    weight=self._limiter.weights.get(job, 1.0),
                    held_back=is_held,
                    share=max_min_shares(wants, self._limiter.weights, given)[job] if is_held else 0.0,
                    jobs=sum(bool(one) and wants[one] >= _MIN_RATE for one in uses),
                    all_want=sum(wants.values()),
                    all_get=given,
                    fetched=sum(
                        size for (one, endpoint), size in self._fetched.items() if (one, endpoint.name) == (job, origin)
                    ),
                )
            )
        return found

    @property
    def held_back(self) -> int:
        """The number of jobs that an over-subscribed origin holds back now."""
        return len({job for job, _ in self._held_since})

    def troubles_of(self, job: str) -> list[Trouble]:
        """Return a trouble for each over-subscribed origin that holds the job back."""
        now = time.time()
        return [
            Trouble(Cause.SHARE, share.origin, self._held_since.get((job, share.origin), now), now, _reason(share))
            for share in self.shares_of(job)
            if share.held_back
        ]


def _reason(share: OriginShare) -> str:
    rates = {name: f"{format_size(int(getattr(share, name)))}/s" for name in ("wants", "gets", "all_want", "all_get")}
    if share.jobs < 2:
        return f"the job wants {rates['wants']} and gets {rates['gets']}; no other job uses it"
    return (
        f"{share.jobs:,} jobs want {rates['all_want']} and get {rates['all_get']}; this one wants {rates['wants']} and "
        f"gets {rates['gets']}, a share of {format_size(int(share.share))}/s with weight {share.weight:g}"
    )
