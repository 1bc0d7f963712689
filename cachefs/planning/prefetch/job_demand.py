"""Finds what each job wants of the origins, and which of its blocks are urgent.

A job wants the bytes that its readers will read within the next minute, at their own pace, and that are not on the
node. The rate that it gets beside the others follows from their weighted max-min share of the bandwidth.

A missing block is urgent if it is read so soon that it must be fetched now. A job of which all blocks will arrive in
time even at the rate that it gets beside the others has no urgent block but those that are read within a few fetches:
it would finish its epoch without a wait, so it gives way to jobs that would not (`Backlog`, for each job by itself).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachefs.planning.prefetch.fetch_window import Backlog, MissingReads, find_backlog
from cachefs.planning.requests.shares import max_min_shares
from cachefs.planning.sequences.plan import job_of_consumer

# Seconds of reads by which a job's demand is measured: at least, and at most.
_MIN_SECONDS: Final = 1.0
_MAX_SECONDS: Final = 60.0
# Jobs for which the rate beside all others is computed exactly.
_MAX_EXACT_JOBS: Final = 64


@dataclass(frozen=True, slots=True)
class JobDemand:
    """The demand of one job."""

    # Bytes a second that the job wants of the origins, by snapshot.
    wants: Mapping[str, float]
    # The blocks that must be fetched from now on; None where waiting does no harm yet.
    backlog: Backlog | None

    @property
    def bytes_per_second(self) -> float:
        """Bytes a second that the job wants of all origins."""
        return sum(self.wants.values())


def find_demands(
    missing: Iterable[MissingReads], bandwidth: float, weights: Mapping[str, float], lead: float = 0.0
) -> dict[str, JobDemand]:
    """Return the demand of each job with missing blocks.

    bandwidth: bytes per second of the origins; weights: of jobs, 1 where missing; lead: as in `find_backlog`.
    """
    parts: defaultdict[str, list[MissingReads]] = defaultdict(list)
    for one in missing:
        if len(one.seconds):
            parts[job_of_consumer(one.consumer)].append(one)
    wants = {job: _wants(blocks) for job, blocks in parts.items()}
    rates = _rates_beside_others({job: sum(one.values()) for job, one in wants.items()}, weights, bandwidth)
    return {job: JobDemand(wants[job], find_backlog(blocks, rates[job], lead)) for job, blocks in parts.items()}


def _wants(parts: list[MissingReads]) -> dict[str, float]:
    """Return by snapshot the bytes per second that a job with these missing blocks wants."""
    last = max(float(part.seconds.max()) for part in parts)
    seconds = min(max(last, _MIN_SECONDS), _MAX_SECONDS)
    wants: dict[str, float] = {}
    for part in parts:
        size = float(part.sizes[part.seconds <= seconds].sum())
        wants[part.snapshot] = wants.get(part.snapshot, 0.0) + size / seconds
    return wants


def _rates_beside_others(
    wants: Mapping[str, float], weights: Mapping[str, float], bandwidth: float
) -> Mapping[str, float]:
    """Return the bytes per second that each job would get if it took all that it can beside the others."""
    if not np.isfinite(bandwidth):
        return dict.fromkeys(wants, bandwidth)
    if len(wants) > _MAX_EXACT_JOBS:
        total = sum(weights.get(job, 1.0) for job in wants)
        return {job: bandwidth * weights.get(job, 1.0) / total for job in wants}
    return {job: max_min_shares({**wants, job: np.inf}, weights, bandwidth)[job] for job in wants}
