"""Shares the bytes of one origin among jobs: weighted max-min, carried out by start-time fair queueing.

**The share** (`max_min_shares`). A job that wants less than its share gets what it wants; what it leaves is divided
among the others in proportion to their weights, and so on (progressive filling: Bertsekas and Gallager, "Data
Networks", 2nd edition, 1992, section 6.5.2).

**The order** (`FairOrder`) in which requests of several jobs go to the origin, so that each job gets its share. The
rate of an origin is not known and changes, so no share is computed for it: requests carry virtual times. A request of
b bytes of a job of weight w starts at the time at which the job's last one finishes, or at the virtual time where the
job had nothing to request, and finishes b / w later. The request with the earliest start goes next, and the virtual
time is its start (Goyal, Vin and Cheng, "Start-time Fair Queueing: A Scheduling Algorithm for Integrated Services
Packet Switching Networks", SIGCOMM 1996, section 2; with several requests in flight: Jin, Chase and Kaur, "Interposed
Proportional Sharing for a Storage Service Utility", SIGMETRICS 2004, section 3). Two jobs that both wait never differ
by more than one request of each, in bytes divided by weight, whatever the sizes of their requests. A job that has
nothing to request gives its share away at once, and cannot save it up.
"""

import itertools
from collections.abc import Mapping
from typing import Final

# Bounds of a job's weight.
MIN_WEIGHT: Final = 0.01
MAX_WEIGHT: Final = 100.0
# Bytes, divided by the weight, that a job may get later because its requests had to wait while those of others could be
# sent: for example while it only reads ahead, and all room for reads ahead is taken.
MAX_CLAIM: Final = 32 << 20
# Jobs with a virtual time, beyond those that wait, before those whose time tells nothing are forgotten.
_MAX_STALE: Final = 256


def max_min_shares(wants: Mapping[str, float], weights: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Return what each job gets of *capacity* bytes a second, by name.

    wants: bytes a second that each job wants, inf for all it can get. weights: 1 for jobs that are missing.
    """
    shares = dict.fromkeys(wants, 0.0)
    # In the order in which jobs are satisfied while the level, bytes per weight, rises.
    order = sorted(wants, key=lambda job: wants[job] / weights.get(job, 1.0))
    left = max(0.0, capacity)
    remaining = list(itertools.accumulate(weights.get(job, 1.0) for job in reversed(order)))
    for job in order:
        shares[job] = min(wants[job], left * (weights.get(job, 1.0) / remaining.pop()))
        left = max(0.0, left - shares[job])
    return shares


class FairOrder:
    """Start-time fair queueing over the jobs that read from one server."""

    __slots__ = ("_starts", "_virtual_time", "_waiting")

    def __init__(self) -> None:
        self._virtual_time = 0.0
        self._starts: dict[str, float] = {}  # by job: virtual start of its next request
        self._waiting: set[str] = set()  # jobs that claim service

    def claim(self, job: str, weight: float) -> float:
        """Return the virtual start of the next request of *job*, which waits: the smallest goes first. Until
        `withdraw`, the job loses nothing while requests of others are sent, up to MAX_CLAIM."""
        start = self._starts.get(job, 0.0)
        earliest = self._virtual_time
        if job in self._waiting:
            earliest -= MAX_CLAIM / weight
        else:
            self._waiting.add(job)
        if start < earliest:
            start = self._starts[job] = earliest
        return start

    def withdraw(self, job: str) -> None:
        """Record that *job* has no request that waits. When no job has, all begin anew."""
        self._waiting.discard(job)
        if not self._waiting and self._starts:
            self._virtual_time = 0.0
            self._starts.clear()

    def charge(self, job: str, size: int, weight: float) -> None:
        """Record that a request of *job* for *size* bytes is sent. While no job waits, that counts for nothing."""
        if not self._waiting:
            return
        start = self._starts.get(job, 0.0)
        if job not in self._waiting:
            start = max(start, self._virtual_time)
        self._virtual_time = max(self._virtual_time, start)
        self._starts[job] = start + size / weight
        if len(self._starts) > _MAX_STALE + 2 * len(self._waiting):
            self._starts = {
                one: tag for one, tag in self._starts.items() if one in self._waiting or tag > self._virtual_time
            }
