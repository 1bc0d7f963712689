"""Cached copies of a snapshot: how many jobs may read each at once, where another is made, and when copies are evicted.

A **cached copy** is a set of nodes that together have at least ENOUGH_HELD of the snapshot: a single node with that
much; or else the remaining nodes of a zone; or else the remaining nodes of all zones. Each node belongs to one copy at
most. A job reads one copy: the one on whose nodes most of it runs, or else the one with the fewest jobs.

The limit is the number of jobs that may read a copy at once. There is always at least one copy: where no node has the
data yet, the first jobs make it. `plan_clone` plans another copy of a snapshot whose copies are all busy: on which
nodes, and how long it takes to make.

`expired_evictions` and `evictions_for_room` decide what to evict from nodes when jobs have ended, by the rule of each
dataset: nothing (the default, and for pinned data), data unread for some time (TTL), or the data read least recently
when room is needed. Data that a running job reads, and pinned data, stay in any case. A node's tiers evict by
themselves; these rules are for an administrator who wants datasets to go as wholes.

`order_waiting` orders the jobs that wait for a slot. Higher priorities go first; among equals, the user with fewest
running jobs; then the user who has waited longest, for a first slot or since the last one. Jobs that have waited longer
than *patience* go before all others, by that last rule alone. Therefore no job waits for ever: other users have one
turn each before the next one of its user. A user who asks for thousands of slots at once delays each other user by at
most one.
"""

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal

import numpy as np

from cachefs.planning.scheduling.cluster_facts import GRACE_SECONDS, ClusterFacts
from cachefs.planning.scheduling.estimates import estimates
from cachefs.planning.scheduling.facts import JobRequest, NodeFacts
from cachefs.planning.scheduling.spread import NodeValues, Rows

# Seconds.
MAX_WAIT_SECONDS: Final = 3600.0
# Most nodes of one copy. A snapshot that needs more is not cloned.
MAX_NODES_OF_COPY: Final = 64
# Part of a snapshot: a job that finds this much does not notice what is missing.
ENOUGH_HELD: Final = 0.9
# Tolerance, as parts of nodes and of their shards are rounded differently.
_TOLERANCE: Final = 0.01


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
    found = list(_by_users((job for job in jobs if now - job.since > max_wait), None, last, now))
    counts = Counter(running)
    counts.update(one.user for one in found)
    others = sorted((job for job in jobs if now - job.since <= max_wait), key=lambda one: -one.priority)
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
    for job in jobs:
        of_user.setdefault(job.user, deque()).append(job)

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


@dataclass(frozen=True, slots=True)
class CleaningRule:
    """The rule for a snapshot that no job reads."""

    kind: Literal["keep", "pin", "ttl", "lru"] = "keep"
    # For "ttl": seconds since the last read.
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "ttl" and not self.seconds > 0:
            raise ValueError(f"a TTL is a number of seconds above 0, not {self.seconds}")


@dataclass(frozen=True, slots=True)
class Eviction:
    """An advised eviction of a snapshot from a node."""

    node: str
    snapshot: str
    bytes: int
    # The reason, as text.
    reason: str


def expired_evictions(nodes: Sequence[NodeFacts], rules: Mapping[str, CleaningRule]) -> tuple[Eviction, ...]:
    """Return the evictions of data unread for longer than their rules allow. rules: by snapshot; "keep" where missing.

    A node without a report for longer than the TTL is skipped, as its data may have been read meanwhile. A healthy node
    may be silent for half a minute, so a shorter TTL does not skip it.
    """
    return tuple(
        Eviction(node.name, snapshot, copy.bytes, f"no reader has used it for {copy.idle + node.age:,.0f} s")
        for node in nodes
        for snapshot, copy in node.copies.items()
        if (rule := rules.get(snapshot)) is not None
        and rule.kind == "ttl"
        and copy.idle > rule.seconds
        and node.age <= max(rule.seconds, GRACE_SECONDS)
        and _is_evictable(node, snapshot)
    )


def evictions_for_room(
    node: NodeFacts, wanted: int, rules: Mapping[str, CleaningRule], keep: str = ""
) -> tuple[Eviction, ...]:
    """Return evictions that make *wanted* bytes fit on the node: "lru" and "ttl" data, least recently read first, and
    no more than needed. Empty where all of them would not suffice. keep: the snapshot that needs the room, never
    evicted."""
    lacking = wanted - (node.capacity - node.used)
    found: list[Eviction] = []
    oldest = sorted(node.copies, key=lambda snapshot: (-node.copies[snapshot].idle, snapshot))
    for snapshot in oldest:
        if lacking <= 0:
            break
        kind = rules.get(snapshot, CleaningRule()).kind
        size = node.copies[snapshot].bytes
        if kind in ("lru", "ttl") and size and snapshot != keep and _is_evictable(node, snapshot):
            why = f"read least recently ({node.copies[snapshot].idle:,.0f} s ago), and room is needed"
            found.append(Eviction(node.name, snapshot, size, why))
            lacking -= size
    return tuple(found) if lacking <= 0 else ()


def _is_evictable(node: NodeFacts, snapshot: str) -> bool:
    return not node.copies[snapshot].pinned and not node.jobs.get(snapshot)


@dataclass(frozen=True, slots=True)
class Clone:
    """A copy that could be made."""

    # One node, or nodes of one zone that together have room.
    nodes: tuple[str, ...]
    # Bytes that each will have, including those that it has already.
    bytes: tuple[int, ...]
    # Bytes to transfer, and the seconds that takes.
    missing_bytes: int
    seconds: float


def plan_clone(job: JobRequest, candidates: Sequence[str], cluster: ClusterFacts) -> Clone | None:
    """Return the copy that can be made soonest; None where no zone has room.

    candidates: nodes that may hold the copy and could run the job, without the nodes of existing copies. One node is
    preferred over several, since all reads are then local; among nodes with room, the one that has the copy first, such
    as one that has a part already, or a fast link to the holders.
    """
    spread = cluster.spread(job.snapshot)
    names = list(dict.fromkeys(candidates))
    rows = cluster.rows(names)
    cached = spread.held_share(rows) * spread.size * cluster.trust(rows)
    room = np.where(cluster.are_up(rows), np.maximum(cluster.room(rows), cached), 0.0)
    lacking = np.maximum(spread.size - cached, 0.0)
    alone = JobRequest(job.id, job.snapshot)
    # Seconds to fetch everything missing, for each node alone.
    seconds = estimates(alone, names, cluster).first_load if names else np.zeros(0)
    fitting = np.flatnonzero(room >= spread.size)
    if len(fitting):
        best = int(fitting[np.argmin(seconds[fitting])])
        return Clone((names[best],), (spread.size,), round(float(lacking[best])), float(seconds[best]))
    best_group = None
    zones = cluster.zones_of(rows)
    for zone in dict.fromkeys(zones.tolist()):
        group = np.flatnonzero((zones == zone) & (room > 0))
        group = group[np.argsort(-room[group], kind="stable")][:MAX_NODES_OF_COPY]
        enough = int(np.searchsorted(np.cumsum(room[group]), spread.size)) + 1
        if enough <= len(group):
            made = _clone_over_nodes(names, group[:enough].tolist(), room, cached, seconds, spread.size)
            if best_group is None or made.seconds < best_group.seconds:
                best_group = made
    return best_group


def _clone_over_nodes(
    names: Sequence[str], group: list[int], room: NodeValues, cached: NodeValues, seconds: NodeValues, size: int
) -> Clone:
    """Return a copy over several nodes, each with a part in proportion to its room."""
    parts = room[group] * size / room[group].sum()
    lacking = np.maximum(parts - cached[group], 0.0)
    # All nodes fetch their parts at the same time.
    each = seconds[group] * lacking / np.maximum(size - cached[group], 1.0)
    return Clone(
        tuple(names[position] for position in group),
        tuple(np.floor(parts).astype(np.int64).tolist()),
        round(float(lacking.sum())),
        float(each.max()),
    )


@dataclass(frozen=True, slots=True)
class CachedCopy:
    """Nodes that together have a snapshot."""

    # Names, largest parts first.
    nodes: tuple[str, ...]
    # "" where the nodes are in several zones.
    zone: str
    # Part of the snapshot that they have: 0 to 1.
    held: float
    # Number of jobs that read the copy.
    jobs: int


@dataclass(frozen=True, slots=True)
class JobSlots:
    """The job slots of one snapshot."""

    # Jobs that may run at once, and that run.
    limit: int
    running: int
    copies: tuple[CachedCopy, ...]
    # Nodes of copies with a free slot, those with fewest jobs first; empty where no node has the data, and any node may
    # run the job.
    nodes: tuple[str, ...]

    @property
    def free(self) -> int:
        return max(0, self.limit - self.running)


def cached_copies(
    snapshot: str, cluster: ClusterFacts, running: Iterable[Collection[str]] = (), enough: float = ENOUGH_HELD
) -> tuple[CachedCopy, ...]:
    """Return the copies of a snapshot, the most complete first. Silent nodes count as in estimates.

    running: the nodes of each job that reads the snapshot, or is about to.
    """
    holders = sorted(cluster.holders(snapshot))
    if not holders:
        return ()
    spread, rows = cluster.spread(snapshot), cluster.rows(holders)
    cached = spread.held_share(rows) * cluster.trust(rows)
    order = np.argsort(-cached, kind="stable")
    rows, cached = rows[order], cached[order]
    names = [holders[position] for position in order.tolist()]

    alone = cached >= enough
    groups = [[position] for position in np.flatnonzero(alone).tolist()]
    remaining = np.flatnonzero(~alone & (cached > 0))
    zones = cluster.zones_of(rows)
    together: dict[int, float] = {}  # parts of groups of several nodes, by the group's first node
    for zone in dict.fromkeys(zones[remaining].tolist()):
        of_zone = remaining[zones[remaining] == zone]
        # Shards are examined only where the parts sum up to enough: with 5,000 nodes they take 100 ms.
        if (
            cached[of_zone].sum() >= enough - _TOLERANCE
            and (part := _combined_share(snapshot, rows[of_zone], cluster)) >= enough
        ):
            groups.append(of_zone.tolist())
            together[int(of_zone[0])] = part
            remaining = remaining[zones[remaining] != zone]
    if (
        cached[remaining].sum() >= enough - _TOLERANCE
        and (part := _combined_share(snapshot, rows[remaining], cluster)) >= enough
    ):
        groups.append(remaining.tolist())
        together[int(remaining[0])] = part
    jobs = _jobs_by_copy([{names[position] for position in group} for group in groups], running)
    return tuple(
        CachedCopy(
            tuple(names[position] for position in group),
            _zone_of(names[group[0]], cluster) if len(set(zones[group].tolist())) == 1 else "",
            min(1.0, together.get(group[0], float(cached[group[0]]))),
            reading,
        )
        for group, reading in zip(groups, jobs, strict=True)
    )


def job_slots(copies: Sequence[CachedCopy], limit: int, running: int, making: int = 0) -> JobSlots:
    """Return the job slots. limit: jobs that may read each copy at once (0: no limit).

    running: jobs that read the snapshot anywhere, including those that may start and have not yet; making: copies that
    are being made, which count already.
    """
    if not limit:
        return JobSlots(
            running + 1_000_000, running, tuple(copies), tuple(node for copy in copies for node in copy.nodes)
        )
    free = sorted((copy for copy in copies if copy.jobs < limit), key=lambda copy: copy.jobs)
    total = limit * max(1, len(copies) + making)
    return JobSlots(total, running, tuple(copies), tuple(node for copy in free for node in copy.nodes))


def _combined_share(snapshot: str, rows: Rows, cluster: ClusterFacts) -> float:
    """Return the part of a snapshot that these nodes have together: 0 to 1."""
    parts = cluster.spread(snapshot).matrix_of(rows) * cluster.trust(rows)[:, None]
    return float(np.minimum(parts.sum(axis=0), 1.0).mean())


def _jobs_by_copy(groups: Sequence[set[str]], running: Iterable[Collection[str]]) -> list[int]:
    """Return how many of the running jobs read each copy."""
    of_node = {name: number for number, group in enumerate(groups) for name in group}
    jobs, elsewhere = [0] * len(groups), 0
    for nodes in running:
        on = Counter(of_node[name] for name in nodes if name in of_node)
        if on:
            jobs[on.most_common(1)[0][0]] += 1
        else:
            elsewhere += 1
    for _ in range(elsewhere if jobs else 0):
        jobs[jobs.index(min(jobs))] += 1
    return jobs


def _zone_of(name: str, cluster: ClusterFacts) -> str:
    facts = cluster.reported_facts(name)
    return facts.zone if facts else ""
