"""Collects the present values of all metrics from the parts of the node."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs import __version__
from cachefs.block import TIER_NAMES
from cachefs_daemon.fetch.tally import ORIGIN, SOURCES, Became
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.metrics import table
from cachefs_daemon.metrics.busiest import Busiest
from cachefs_daemon.metrics.table import OTHER, Metric, outcome_name
from cachefs_daemon.node import Node
from cachefs_daemon.origin import ledger
from cachefs_daemon.origin.endpoint import TOTALS
from cachefs_daemon.origin.ledger import KINDS, PURPOSES, Outcome
from cachefs_daemon.store.storage import TierUsage

# Counters of mounts, by the tier that answered.
_READS: Final = {
    **{tier: (f"hits_{tier}", f"hit_bytes_{tier}") for tier in TIER_NAMES},
    "fetch": ("misses", "miss_bytes"),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    metric: Metric
    # In the order of its labels.
    labels: tuple[str, ...]
    value: float


def samples(node: Node, busiest: Busiest, usage: Sequence[TierUsage]) -> Iterator[Sample]:
    """Yield all samples. Call on the event loop. usage: of the tiers."""
    for part in (_of_mounts, _of_fetches, _of_origins, _of_page_caches, _of_peers, _of_content, _of_daemon):
        yield from part(node)
    yield from _of_tiers(usage)
    yield from _of_datasets(busiest)


def _of_mounts(node: Node) -> Iterator[Sample]:
    counts = node.mounts.counters()
    for by, (reads, size) in _READS.items():
        yield Sample(table.READS, (by,), counts[reads])
        yield Sample(table.READ_BYTES, (by,), counts[size])
    for operation in table.OPERATIONS:
        yield Sample(table.FUSE_REQUESTS, (operation,), counts[operation])
    yield Sample(table.FUSE_ERRORS, (), counts["errors"])
    yield Sample(table.BAD_COPIES, (), counts["bad"])
    waits = dict.fromkeys(table.WAITED_FOR.values, (0, 0.0))
    for source, (count, seconds) in node.jobs.stalls.of_sources().items():
        known = source if source in waits else "other"
        waits[known] = waits[known][0] + count, waits[known][1] + seconds
    for source, (count, seconds) in waits.items():
        yield Sample(table.WAITS, (source,), count)
        yield Sample(table.WAIT_SECONDS, (source,), seconds)
    alive = Counter(view.alive for view in node.mounts.views())
    yield Sample(table.MOUNTS, ("alive",), alive[True])
    yield Sample(table.MOUNTS, ("dead",), alive[False])


def _of_fetches(node: Node) -> Iterator[Sample]:
    tally, in_flight = node.fetcher.bringing.tally, node.fetcher.in_flight
    dropped = sum(one.dropped for one in ledger.total().purpose("read"))
    for source in SOURCES:
        for became in Became:
            size = tally.bytes[source, became]
            if (source, became) == (ORIGIN, Became.DISCARDED):
                size += dropped
            yield Sample(table.FETCHED_BLOCKS, (source, became), tally.blocks[source, became])
            yield Sample(table.FETCHED_BYTES, (source, became), size)
    yield Sample(table.IN_FLIGHT_BLOCKS, (), in_flight[0])
    yield Sample(table.IN_FLIGHT_BYTES, (), in_flight[1])
    yield Sample(table.GUESSED_BLOCKS, ("read",), node.guesser.counts.right)
    yield Sample(table.GUESSED_BLOCKS, ("unread",), node.guesser.counts.wrong)
    yield Sample(table.FETCH_PROCESSES, (), len(node.carrying.status()))


def _of_origins(_: Node) -> Iterator[Sample]:
    book = ledger.total()
    detours = 0
    for kind in KINDS:
        for purpose in PURPOSES:
            one, labels = book.of(kind, purpose), (kind, purpose)
            detours += one.detours
            for outcome in Outcome:
                yield Sample(table.ORIGIN_REQUESTS, (*labels, outcome_name(outcome)), one.count(outcome))
            yield Sample(table.ORIGIN_IN_FLIGHT, labels, one.in_flight)
            yield Sample(table.ORIGIN_RECEIVED, labels, one.received)
            yield Sample(table.ORIGIN_WRONG, labels, one.wrong_answers)
    yield Sample(table.ORIGIN_DETOURS, (), detours)
    yield Sample(table.ORIGIN_THROTTLED, (), TOTALS.throttled)
    yield Sample(table.ORIGIN_HEDGED, (), TOTALS.hedged)
    yield Sample(table.ORIGIN_HEDGES_WON, (), TOTALS.hedges_won)


def _of_tiers(usage: Sequence[TierUsage]) -> Iterator[Sample]:
    for tier in usage:
        labels = (tier.name,)
        yield Sample(table.TIER_BUDGET, labels, tier.budget)
        yield Sample(table.TIER_LIMIT, labels, tier.limit)
        yield Sample(table.TIER_USED, labels, tier.used)
        yield Sample(table.TIER_BLOCKS, labels, tier.blocks)
        yield Sample(table.TIER_EVICTED, labels, tier.evicted)
        yield Sample(table.TIER_PROBLEM, labels, bool(tier.problem))


def _of_page_caches(node: Node) -> Iterator[Sample]:
    counts, (held, budget) = node.pushers.counters(), node.pushers.held()
    yield Sample(table.PUSHED_BLOCKS, (), counts["stored_blocks"])
    yield Sample(table.PUSHED_BYTES, (), counts["stored_bytes"])
    yield Sample(table.PUSH_LATE, (), counts["late"])
    yield Sample(table.PUSH_WASTED, (), counts["wasted"])
    yield Sample(table.PAGES_HELD, (), held)
    yield Sample(table.PAGES_BUDGET, (), budget)


def _of_peers(node: Node) -> Iterator[Sample]:
    counts, view = node.peer_counts(), node.membership.view
    yield Sample(table.SERVED_BLOCKS, (), counts.served_blocks)
    yield Sample(table.SERVED_BYTES, (), counts.served_bytes)
    yield Sample(table.PEER_ASKED, (), counts.asked)
    yield Sample(table.PEER_NOT_HERE, (), counts.not_here)
    yield Sample(table.PEER_FAILED, (), counts.failed)
    states = Counter(str(record.state) for record in view.members) if node.config.cluster.enabled else Counter[str]()
    for state, count in sorted(states.items()):
        yield Sample(table.CLUSTER_NODES, (state,), count)
    yield Sample(table.CLUSTER_PROBLEM, (), bool(view.problem))


def _of_content(node: Node) -> Iterator[Sample]:
    yield Sample(table.DATASETS, (), len(node.catalog))
    yield Sample(table.DATASETS_LOST, (), sum(dataset.current is None for dataset in node.catalog))
    states = Counter(job.state for job in node.jobs)
    for state in JobState:
        yield Sample(table.JOBS, (state,), states[state])
    yield Sample(table.CONSUMERS, (), len(node.jobs.consumers))
    yield Sample(table.WARMUPS, (), len(node.warmups))
    yield Sample(table.REPAIRED, (), node.storage.blocks.repairs)


def _of_datasets(busiest: Busiest) -> Iterator[Sample]:
    busiest.look(time.monotonic())
    for name, row in (*busiest.rows.items(), (OTHER, busiest.others)):
        for source in SOURCES:
            yield Sample(table.DATASET_BLOCKS, (name, source), row.blocks[source])
            yield Sample(table.DATASET_BYTES, (name, source), row.bytes[source])


def _of_daemon(node: Node) -> Iterator[Sample]:
    yield Sample(table.ERRORS, (), node.errors.count)
    yield Sample(table.INFO, (__version__,), 1)
    yield Sample(table.START, (), node.began)
