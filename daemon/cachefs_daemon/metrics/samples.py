"""Collects the present values of all metrics from the parts of the node."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cachefs import __version__
from cachefs.block import TIER_NAMES
from cachefs_daemon.fetch.fetch_parts import ORIGIN, SOURCES, FetchResult
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.metrics import table
from cachefs_daemon.metrics.busiest import BusiestDatasets
from cachefs_daemon.metrics.table import OTHER, Metric, outcome_name
from cachefs_daemon.node import Node
from cachefs_daemon.origin import request_counters
from cachefs_daemon.origin.endpoint import ENDPOINT_TOTALS
from cachefs_daemon.origin.kinds import KIND_NAMES
from cachefs_daemon.origin.request_counters import PURPOSES, RequestOutcome
from cachefs_daemon.store.storage import TierUsage

# Counters of mounts, by the tier that answered.
_READS: Final = {
    **{tier: (f"hits_{tier}", f"hit_bytes_{tier}") for tier in TIER_NAMES},
    "fetch": ("misses", "miss_bytes"),
}


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of a metric."""

    metric: Metric
    # In the order of its labels.
    labels: tuple[str, ...]
    value: float


def collect_samples(node: Node, busiest: BusiestDatasets, usage: Sequence[TierUsage]) -> Iterator[MetricSample]:
    """Yield all samples. Call on the event loop. usage: of the tiers."""
    for part in (
        _mount_samples,
        _fetch_samples,
        _origin_samples,
        _page_cache_samples,
        _peer_samples,
        _content_samples,
        _daemon_samples,
    ):
        yield from part(node)
    yield from _tier_samples(usage)
    yield from _dataset_samples(busiest)


def _mount_samples(node: Node) -> Iterator[MetricSample]:
    counts = node.mounts.counters()
    for by, (reads, size) in _READS.items():
        yield MetricSample(table.READS, (by,), counts[reads])
        yield MetricSample(table.READ_BYTES, (by,), counts[size])
    for operation in table.OPERATIONS:
        yield MetricSample(table.FUSE_REQUESTS, (operation,), counts[operation])
    yield MetricSample(table.FUSE_ERRORS, (), counts["errors"])
    yield MetricSample(table.BAD_COPIES, (), counts["bad"])
    waits = dict.fromkeys(table.WAITED_FOR.values, (0, 0.0))
    for source, (count, seconds) in node.jobs.stalls.totals_of_sources().items():
        known = source if source in waits else "other"
        waits[known] = waits[known][0] + count, waits[known][1] + seconds
    for source, (count, seconds) in waits.items():
        yield MetricSample(table.WAITS, (source,), count)
        yield MetricSample(table.WAIT_SECONDS, (source,), seconds)
    alive = Counter(view.alive for view in node.mounts.views())
    yield MetricSample(table.MOUNTS, ("alive",), alive[True])
    yield MetricSample(table.MOUNTS, ("dead",), alive[False])


def _fetch_samples(node: Node) -> Iterator[MetricSample]:
    tally, in_flight = node.fetcher.in_flight_fetches.counts, node.fetcher.in_flight
    dropped = sum(one.dropped for one in request_counters.total_counters().counters_for("read"))
    for source in SOURCES:
        for became in FetchResult:
            size = tally.bytes[source, became]
            if (source, became) == (ORIGIN, FetchResult.DISCARDED):
                size += dropped
            yield MetricSample(table.FETCHED_BLOCKS, (source, became), tally.blocks[source, became])
            yield MetricSample(table.FETCHED_BYTES, (source, became), size)
    yield MetricSample(table.IN_FLIGHT_BLOCKS, (), in_flight[0])
    yield MetricSample(table.IN_FLIGHT_BYTES, (), in_flight[1])
    yield MetricSample(table.GUESSED_BLOCKS, ("read",), node.lookahead.readahead.counts.right)
    yield MetricSample(table.GUESSED_BLOCKS, ("unread",), node.lookahead.readahead.counts.wrong)
    yield MetricSample(table.FETCH_PROCESSES, (), len(node.fetching.processes.status()))


def _origin_samples(_: Node) -> Iterator[MetricSample]:
    book = request_counters.total_counters()
    detours = 0
    for kind in KIND_NAMES:
        for purpose in PURPOSES:
            one, labels = book.counters_of(kind, purpose), (kind, purpose)
            detours += one.fallback_reads
            for outcome in RequestOutcome:
                yield MetricSample(table.ORIGIN_REQUESTS, (*labels, outcome_name(outcome)), one.count_of(outcome))
            yield MetricSample(table.ORIGIN_IN_FLIGHT, labels, one.in_flight)
            yield MetricSample(table.ORIGIN_RECEIVED, labels, one.received)
            yield MetricSample(table.ORIGIN_WRONG, labels, one.wrong_responses)
    yield MetricSample(table.ORIGIN_DETOURS, (), detours)
    yield MetricSample(table.ORIGIN_THROTTLED, (), ENDPOINT_TOTALS.throttled)
    yield MetricSample(table.ORIGIN_HEDGED, (), ENDPOINT_TOTALS.hedged)
    yield MetricSample(table.ORIGIN_HEDGES_WON, (), ENDPOINT_TOTALS.hedges_won)


def _tier_samples(usage: Sequence[TierUsage]) -> Iterator[MetricSample]:
    for tier in usage:
        labels = (tier.name,)
        yield MetricSample(table.TIER_BUDGET, labels, tier.budget)
        yield MetricSample(table.TIER_LIMIT, labels, tier.limit)
        yield MetricSample(table.TIER_USED, labels, tier.used)
        yield MetricSample(table.TIER_BLOCKS, labels, tier.blocks)
        yield MetricSample(table.TIER_EVICTED, labels, tier.evicted)
        yield MetricSample(table.TIER_PROBLEM, labels, bool(tier.problem))


def _page_cache_samples(node: Node) -> Iterator[MetricSample]:
    counts, (held, budget) = node.lookahead.pushers.counters(), node.lookahead.pushers.page_cache_use()
    yield MetricSample(table.PUSHED_BLOCKS, (), counts["stored_blocks"])
    yield MetricSample(table.PUSHED_BYTES, (), counts["stored_bytes"])
    yield MetricSample(table.PUSH_LATE, (), counts["late"])
    yield MetricSample(table.PUSH_WASTED, (), counts["wasted"])
    yield MetricSample(table.PAGES_HELD, (), held)
    yield MetricSample(table.PAGES_BUDGET, (), budget)


def _peer_samples(node: Node) -> Iterator[MetricSample]:
    counts, brief = node.cluster.peer_counts(), node.cluster.brief()
    yield MetricSample(table.SERVED_BLOCKS, (), counts.served_blocks)
    yield MetricSample(table.SERVED_BYTES, (), counts.served_bytes)
    yield MetricSample(table.PEER_ASKED, (), counts.asked)
    yield MetricSample(table.PEER_NOT_HERE, (), counts.not_here)
    yield MetricSample(table.PEER_FAILED, (), counts.failed)
    for state, count in sorted(brief.states.items()):
        yield MetricSample(table.CLUSTER_NODES, (state,), count)
    yield MetricSample(table.CLUSTER_PROBLEM, (), bool(brief.problem))


def _content_samples(node: Node) -> Iterator[MetricSample]:
    yield MetricSample(table.DATASETS, (), len(node.catalog))
    yield MetricSample(table.DATASETS_LOST, (), sum(dataset.current is None for dataset in node.catalog))
    states = Counter(job.state for job in node.jobs)
    for state in JobState:
        yield MetricSample(table.JOBS, (state,), states[state])
    yield MetricSample(table.CONSUMERS, (), len(node.jobs.consumers))
    yield MetricSample(table.WARMUPS, (), len(node.content.warmups))
    yield MetricSample(table.REPAIRED, (), node.storage.blocks.repairs)


def _dataset_samples(busiest: BusiestDatasets) -> Iterator[MetricSample]:
    busiest.select_busiest(time.monotonic())
    for name, row in (*busiest.rows.items(), (OTHER, busiest.others)):
        for source in SOURCES:
            yield MetricSample(table.DATASET_BLOCKS, (name, source), row.blocks[source])
            yield MetricSample(table.DATASET_BYTES, (name, source), row.bytes[source])


def _daemon_samples(node: Node) -> Iterator[MetricSample]:
    yield MetricSample(table.ERRORS, (), node.errors.count)
    yield MetricSample(table.INFO, (__version__,), 1)
    yield MetricSample(table.START, (), node.began)
