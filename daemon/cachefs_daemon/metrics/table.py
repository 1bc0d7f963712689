"""All metrics of the daemon, and their present values.

A metric is a `Metric` with its name, type, unit, labels and stability, and a sample in one of the functions. TABLE has
all of them; docs/site/generated.py makes the tables of docs/metrics.md from it.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cachefs import __version__
from cachefs.block import TIER_NAMES
from cachefs_daemon.content.warmup import WarmupState
from cachefs_daemon.fetch.fetch_parts import ORIGIN, SOURCES, FetchResult
from cachefs_daemon.jobs.states import JobState
from cachefs_daemon.metrics.busiest import BusiestDatasets
from cachefs_daemon.node import Node
from cachefs_daemon.origin import request_counters
from cachefs_daemon.origin.endpoint import ENDPOINT_TOTALS
from cachefs_daemon.origin.kinds import KIND_NAMES
from cachefs_daemon.origin.request_counters import PURPOSES, RequestOutcome
from cachefs_daemon.store.storage import TierUsage

PREFIX: Final = "cachefs_"
# Stands for all datasets that are not among the busiest. No dataset can have this name.
OTHER: Final = "(other)"


class MetricKind(StrEnum):
    """Types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"


class Stability(StrEnum):
    """The promise that name, labels and meaning of a metric stay."""

    # Name, labels and meaning change with a major version only.
    STABLE = "stable"
    # They may change with any version.
    EXPERIMENTAL = "experimental"


@dataclass(frozen=True, slots=True)
class MetricLabel:
    """A label of a metric."""

    name: str
    # All its values; none where they are bounded in another way.
    values: tuple[str, ...] = ()
    # The bound of its values where they are no fixed set.
    value_description: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Its samples are all combinations of its labels' values, or fewer."""

    name: str
    kind: MetricKind
    unit: str
    description: str
    labels: tuple[MetricLabel, ...] = ()
    stability: Stability = Stability.STABLE

    @property
    def full_name(self) -> str:
        """The name in Prometheus."""
        return PREFIX + self.name


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of a metric."""

    metric: Metric
    # In the order of its labels.
    labels: tuple[str, ...]
    value: float


def outcome_name(outcome: RequestOutcome) -> str:
    """Return the value of the label `outcome`."""
    return outcome.name.lower()


TIER: Final = MetricLabel("tier", tuple(TIER_NAMES))
ANSWERED_BY: Final = MetricLabel("answered_by", (*TIER_NAMES, "fetch"))
OPERATIONS: Final = (
    "lookup", "getattr", "readdir", "read", "open", "opendir", "statfs", "getxattr", "ioctl", "other",
)  # fmt: skip
OPERATION: Final = MetricLabel("operation", OPERATIONS)
WAITED_FOR: Final = MetricLabel("waited_for", ("origin", "peer", "ssd", "daemon", "other"))
SOURCE: Final = MetricLabel("source", SOURCES)
FETCH_OUTCOME: Final = MetricLabel("outcome", tuple(FetchResult))
ORIGIN_KIND: Final = MetricLabel("kind", KIND_NAMES)
PURPOSE: Final = MetricLabel("purpose", PURPOSES)
OUTCOME: Final = MetricLabel("outcome", tuple(outcome_name(one) for one in RequestOutcome))
DATASET: Final = MetricLabel("dataset", value_description=f"the `metrics.datasets` busiest, and `{OTHER}`")
JOB_STATE: Final = MetricLabel("state", tuple(JobState))
MOUNT_STATE: Final = MetricLabel("state", ("alive", "dead"))
NODE_STATE: Final = MetricLabel(
    "state", value_description="the states of members: joining, active, leaving and the like"
)
CARD: Final = MetricLabel("card", value_description="the network cards of this node")
READAHEAD_OUTCOME: Final = MetricLabel("outcome", ("read", "unread"))
VERSION: Final = MetricLabel("version", value_description="one")


def _counter(name: str, unit: str, what: str, *labels: MetricLabel) -> Metric:
    return Metric(f"{name}_total", MetricKind.COUNTER, unit, what, labels)


def _gauge(name: str, unit: str, what: str, *labels: MetricLabel) -> Metric:
    return Metric(name, MetricKind.GAUGE, unit, what, labels)


def _experimental(metric: Metric) -> Metric:
    return Metric(metric.name, metric.kind, metric.unit, metric.description, metric.labels, Stability.EXPERIMENTAL)


# --- reads through mounts ---------------------------------------------------------------------------------------------
READS: Final = _counter(
    "reads", "reads", "Reads that reached the mount, by source: a tier, or a fetch that they waited for. Reads that "
    "the page cache answers are not counted.", ANSWERED_BY,
)  # fmt: skip
READ_BYTES: Final = _counter("read_bytes", "bytes", "Bytes of reads that reached the mount, by source.", ANSWERED_BY)
FUSE_REQUESTS: Final = _counter("fuse_requests", "requests", "Requests of the kernel to mounts.", OPERATION)
FUSE_ERRORS: Final = _counter(
    "fuse_errors", "requests", "Requests of the kernel to mounts that failed, except for a missing name."
)
BAD_COPIES: Final = _counter(
    "bad_copies", "copies", "Copies in a tier whose bytes readers found wrong; readers then use another copy."
)
WAITS: Final = _counter("read_waits", "reads", "Reads that waited, by reason.", WAITED_FOR)
WAIT_SECONDS: Final = _counter("read_wait_seconds", "seconds", "Seconds that reads waited, by reason.", WAITED_FOR)
# Counters of mounts, by the tier that answered.
_READS: Final = {
    **{tier: (f"hits_{tier}", f"hit_bytes_{tier}") for tier in TIER_NAMES},
    "fetch": ("misses", "miss_bytes"),
}


def _mount_samples(node: Node) -> Iterator[MetricSample]:
    counts = node.mounts.counters()
    for by, (reads, size) in _READS.items():
        yield MetricSample(READS, (by,), counts[reads])
        yield MetricSample(READ_BYTES, (by,), counts[size])
    for operation in OPERATIONS:
        yield MetricSample(FUSE_REQUESTS, (operation,), counts[operation])
    yield MetricSample(FUSE_ERRORS, (), counts["errors"])
    yield MetricSample(BAD_COPIES, (), counts["bad"])
    waits = dict.fromkeys(WAITED_FOR.values, (0, 0.0))
    for source, (count, seconds) in node.jobs.stalls.totals_of_sources().items():
        known = source if source in waits else "other"
        waits[known] = waits[known][0] + count, waits[known][1] + seconds
    for source, (count, seconds) in waits.items():
        yield MetricSample(WAITS, (source,), count)
        yield MetricSample(WAIT_SECONDS, (source,), seconds)
    alive = Counter(view.alive for view in node.mounts.views())
    yield MetricSample(MOUNTS, ("alive",), alive[True])
    yield MetricSample(MOUNTS, ("dead",), alive[False])


# --- fetched blocks ---------------------------------------------------------------------------------------------------
FETCHED_BLOCKS: Final = _counter(
    "fetched_blocks", "blocks", "Blocks received, by source and outcome: stored in a tier, passed to readers as no "
    "tier could hold them, or discarded.", SOURCE, FETCH_OUTCOME,
)  # fmt: skip
FETCHED_BYTES: Final = _counter(
    "fetched_bytes", "bytes", "Bytes received, by source and outcome. Of origins, bytes of broken and cancelled "
    "responses count as discarded; so the sum is all bytes that were received for reads.", SOURCE, FETCH_OUTCOME,
)  # fmt: skip
IN_FLIGHT_BLOCKS: Final = _gauge("in_flight_blocks", "blocks", "Blocks that are being fetched.")
IN_FLIGHT_BYTES: Final = _gauge("in_flight_bytes", "bytes", "Bytes of blocks that are being fetched.")
GUESSED_BLOCKS: Final = _experimental(_counter(
    "guessed_blocks", "blocks", "Blocks that readahead fetched, once they were read or evicted unread.",
    READAHEAD_OUTCOME,
))  # fmt: skip
FETCH_PROCESSES: Final = _gauge("fetch_processes", "processes", "Fetch processes that are ready.")


def _fetch_samples(node: Node) -> Iterator[MetricSample]:
    tally, in_flight = node.fetcher.in_flight_fetches.counts, node.fetcher.in_flight
    dropped = sum(one.dropped for one in request_counters.total_counters().counters_for("read"))
    for source in SOURCES:
        for became in FetchResult:
            size = tally.bytes[source, became]
            if (source, became) == (ORIGIN, FetchResult.DISCARDED):
                size += dropped
            yield MetricSample(FETCHED_BLOCKS, (source, became), tally.blocks[source, became])
            yield MetricSample(FETCHED_BYTES, (source, became), size)
    yield MetricSample(IN_FLIGHT_BLOCKS, (), in_flight[0])
    yield MetricSample(IN_FLIGHT_BYTES, (), in_flight[1])
    yield MetricSample(GUESSED_BLOCKS, ("read",), node.lookahead.readahead.counts.right)
    yield MetricSample(GUESSED_BLOCKS, ("unread",), node.lookahead.readahead.counts.wrong)
    yield MetricSample(FETCH_PROCESSES, (), len(node.fetching.processes.status()))


# --- origins ----------------------------------------------------------------------------------------------------------
ORIGIN_REQUESTS: Final = _counter(
    "origin_requests", "requests", "Completed requests to origins, by outcome. Servers have received all but those "
    "whose outcome is `unreachable`.", ORIGIN_KIND, PURPOSE, OUTCOME,
)  # fmt: skip
ORIGIN_IN_FLIGHT: Final = _gauge(
    "origin_requests_in_flight", "requests", "Requests to origins in progress.", ORIGIN_KIND, PURPOSE
)
ORIGIN_RECEIVED: Final = _counter(
    "origin_received_bytes", "bytes", "Bytes of response bodies, of completed requests.", ORIGIN_KIND, PURPOSE
)
ORIGIN_WRONG: Final = _counter(
    "origin_wrong_answers", "answers", "Complete responses with wrong content, such as another version.",
    ORIGIN_KIND, PURPOSE,
)  # fmt: skip
ORIGIN_DETOURS: Final = _experimental(_counter("origin_detours", "reads", "Reads of S3 that went through aiobotocore."))
ORIGIN_THROTTLED: Final = _counter(
    "origin_throttled", "requests", "Requests that servers refused because there were too many."
)
ORIGIN_HEDGED: Final = _counter(
    "origin_hedged_requests", "requests", "Requests that were sent a second time because the first was late."
)
ORIGIN_HEDGES_WON: Final = _counter(
    "origin_hedges_won", "requests", "Requests that were sent twice, and whose second sending was answered first."
)


def _origin_samples(_: Node) -> Iterator[MetricSample]:
    book = request_counters.total_counters()
    detours = 0
    for kind in KIND_NAMES:
        for purpose in PURPOSES:
            one, labels = book.counters_of(kind, purpose), (kind, purpose)
            detours += one.fallback_reads
            for outcome in RequestOutcome:
                yield MetricSample(ORIGIN_REQUESTS, (*labels, outcome_name(outcome)), one.count_of(outcome))
            yield MetricSample(ORIGIN_IN_FLIGHT, labels, one.in_flight)
            yield MetricSample(ORIGIN_RECEIVED, labels, one.received)
            yield MetricSample(ORIGIN_WRONG, labels, one.wrong_responses)
    yield MetricSample(ORIGIN_DETOURS, (), detours)
    yield MetricSample(ORIGIN_THROTTLED, (), ENDPOINT_TOTALS.throttled)
    yield MetricSample(ORIGIN_HEDGED, (), ENDPOINT_TOTALS.hedged)
    yield MetricSample(ORIGIN_HEDGES_WON, (), ENDPOINT_TOTALS.hedges_won)


# --- tiers ------------------------------------------------------------------------------------------------------------
TIER_BUDGET: Final = _gauge("tier_budget_bytes", "bytes", "Bytes that the tier may use by its configuration.", TIER)
TIER_LIMIT: Final = _gauge(
    "tier_limit_bytes", "bytes", "Bytes that the tier may use now: fewer where the disk or the cgroup is full.", TIER
)
TIER_USED: Final = _gauge("tier_used_bytes", "bytes", "Bytes that the tier uses.", TIER)
TIER_BLOCKS: Final = _gauge("tier_blocks", "blocks", "Blocks in the tier.", TIER)
TIER_EVICTED: Final = _counter("tier_evicted_blocks", "blocks", "Blocks that were evicted from the tier.", TIER)
TIER_PROBLEM: Final = _gauge(
    "tier_problem", "bool", "1 while the tier cannot be used, or not fully; `cachectl status` shows the reason.", TIER
)
REPAIRED: Final = _counter("repaired_blocks", "blocks", "Blocks whose bytes were wrong, and which were dropped.")


def _tier_samples(usage: Sequence[TierUsage]) -> Iterator[MetricSample]:
    for tier in usage:
        labels = (tier.name,)
        yield MetricSample(TIER_BUDGET, labels, tier.budget)
        yield MetricSample(TIER_LIMIT, labels, tier.limit)
        yield MetricSample(TIER_USED, labels, tier.used)
        yield MetricSample(TIER_BLOCKS, labels, tier.blocks)
        yield MetricSample(TIER_EVICTED, labels, tier.evicted)
        yield MetricSample(TIER_PROBLEM, labels, bool(tier.problem))


# --- page caches ------------------------------------------------------------------------------------------------------
PUSHED_BLOCKS: Final = _counter("pushed_blocks", "blocks", "Blocks that were put into the page cache ahead of reads.")
PUSHED_BYTES: Final = _counter("pushed_bytes", "bytes", "Bytes that were put into the page cache ahead of reads.")
PUSH_LATE: Final = _experimental(
    _counter("pushed_late_blocks", "blocks", "Blocks that were read before they could be pushed.")
)
PUSH_WASTED: Final = _experimental(
    _counter("pushed_wasted_blocks", "blocks", "Blocks that were pushed, and gone before the read.")
)
PAGES_HELD: Final = _gauge("page_cache_held_bytes", "bytes", "Bytes in page caches that were pushed and not read yet.")
PAGES_BUDGET: Final = _gauge(
    "page_cache_budget_bytes", "bytes", "Limit of the bytes in page caches that were pushed and not read yet."
)


def _page_cache_samples(node: Node) -> Iterator[MetricSample]:
    counts, (held, budget) = node.lookahead.pushers.counters(), node.lookahead.pushers.page_cache_use()
    yield MetricSample(PUSHED_BLOCKS, (), counts["stored_blocks"])
    yield MetricSample(PUSHED_BYTES, (), counts["stored_bytes"])
    yield MetricSample(PUSH_LATE, (), counts["late"])
    yield MetricSample(PUSH_WASTED, (), counts["wasted"])
    yield MetricSample(PAGES_HELD, (), held)
    yield MetricSample(PAGES_BUDGET, (), budget)


# --- other nodes ------------------------------------------------------------------------------------------------------
SERVED_BLOCKS: Final = _counter("peer_served_blocks", "blocks", "Blocks sent to other nodes.")
SERVED_BYTES: Final = _counter("peer_served_bytes", "bytes", "Bytes of blocks sent to other nodes.")
PEER_ASKED: Final = _counter("peer_questions", "requests", "Requests to other nodes, one per block.")
PEER_NOT_HERE: Final = _counter(
    "peer_not_here", "requests", "Requests to other nodes that they answered without the block."
)
PEER_FAILED: Final = _counter("peer_failed", "requests", "Requests to other nodes that failed.")
PEER_CARD_BYTES: Final = _experimental(
    _counter("peer_card_bytes", "bytes", "Bytes of blocks received from other nodes, by network card.", CARD)
)
PEER_RAILS_DOWN: Final = _experimental(
    _gauge("peer_rails_down", "addresses", "Addresses that do not answer, of nodes that answer at another address.")
)
CLUSTER_NODES: Final = _gauge(
    "cluster_nodes", "nodes", "Nodes of the cluster that this node knows, by state.", NODE_STATE
)
HOT_DATASETS: Final = _experimental(
    _gauge("cluster_hot_datasets", "datasets", "Datasets that are read often enough to have second copies.")
)
SECOND_COPIES: Final = _experimental(
    _counter("peer_second_copies", "blocks", "Second copies of blocks of hot datasets, fetched from other nodes.")
)
CLUSTER_PROBLEM: Final = _gauge("cluster_problem", "bool", "1 while this node cannot read the cluster's membership.")


def _peer_samples(node: Node) -> Iterator[MetricSample]:
    counts, brief = node.cluster.peer_counts(), node.cluster.brief()
    yield MetricSample(SERVED_BLOCKS, (), counts.served_blocks)
    yield MetricSample(SERVED_BYTES, (), counts.served_bytes)
    yield MetricSample(PEER_ASKED, (), counts.asked)
    yield MetricSample(PEER_NOT_HERE, (), counts.not_here)
    yield MetricSample(PEER_FAILED, (), counts.failed)
    for card, count in sorted(counts.cards.items()):
        yield MetricSample(PEER_CARD_BYTES, (card,), count)
    yield MetricSample(PEER_RAILS_DOWN, (), counts.rails_down)
    for state, count in sorted(brief.states.items()):
        yield MetricSample(CLUSTER_NODES, (state,), count)
    yield MetricSample(HOT_DATASETS, (), len(brief.hot))
    yield MetricSample(SECOND_COPIES, (), counts.second_copies)
    yield MetricSample(CLUSTER_PROBLEM, (), bool(brief.problem))


# --- datasets, jobs, mounts -------------------------------------------------------------------------------------------
DATASETS: Final = _gauge("datasets", "datasets", "Datasets of the node.")
DATASETS_LOST: Final = _gauge("datasets_without_snapshot", "datasets", "Datasets whose snapshot is lost or damaged.")
DATASET_BLOCKS: Final = _experimental(_counter(
    "dataset_fetched_blocks", "blocks", "Blocks received for a dataset.", DATASET, SOURCE,
))  # fmt: skip
DATASET_BYTES: Final = _experimental(_counter(
    "dataset_fetched_bytes", "bytes", "Bytes received for a dataset.", DATASET, SOURCE,
))  # fmt: skip
JOBS: Final = _gauge("jobs", "jobs", "Jobs that have published what they read; of ended jobs, the last 64.", JOB_STATE)
JOBS_HELD_BACK: Final = _gauge(
    "jobs_held_back", "jobs", "Running jobs that get less than they want of an over-subscribed origin; `cachectl job "
    "show` says what each wants and gets."
)  # fmt: skip
ORIGIN_WANTED: Final = _gauge(
    "origin_wanted_bytes_per_second", "bytes/s", "Bytes a second that the jobs want of origins through this node."
)
CONSUMERS: Final = _gauge("consumers", "consumers", "Consumers of running jobs.")
MOUNTS: Final = _gauge(
    "mounts", "mounts", "Mounts of the node. Dead ones are mount points whose process is gone.", MOUNT_STATE
)
WARMUPS: Final = _gauge("warmups", "warmups", "Warmups in progress.")
WARMUP_WANTED: Final = _experimental(_gauge(
    "warmup_wanted_bytes", "bytes", "Bytes that the warmups in progress fetch to this node.", DATASET,
))  # fmt: skip
WARMUP_FETCHED: Final = _experimental(_gauge(
    "warmup_fetched_bytes", "bytes", "The part of `warmup_wanted_bytes` that has come.", DATASET,
))  # fmt: skip


def _content_samples(node: Node) -> Iterator[MetricSample]:
    yield MetricSample(DATASETS, (), len(node.catalog))
    yield MetricSample(DATASETS_LOST, (), sum(dataset.current is None for dataset in node.catalog))
    states = Counter(job.state for job in node.jobs)
    for state in JobState:
        yield MetricSample(JOBS, (state,), states[state])
    yield MetricSample(CONSUMERS, (), len(node.jobs.consumers))
    yield MetricSample(JOBS_HELD_BACK, (), node.lookahead.shares.held_back)
    uses = node.lookahead.shares.local_uses.values()
    yield MetricSample(ORIGIN_WANTED, (), sum(use.wants for jobs in uses for use in jobs.values()))
    yield MetricSample(WARMUPS, (), len(node.content.warmups))
    wanted, fetched = Counter[str](), Counter[str]()
    for run in node.content.warmups:
        if run.state == WarmupState.RUNNING:
            wanted[run.blocks_to_fetch.dataset] += run.blocks_to_fetch.bytes
            fetched[run.blocks_to_fetch.dataset] += run.bytes
    for name, size in wanted.items():
        yield MetricSample(WARMUP_WANTED, (name,), size)
        yield MetricSample(WARMUP_FETCHED, (name,), fetched[name])
    yield MetricSample(REPAIRED, (), node.storage.blocks.repairs)


def _dataset_samples(busiest: BusiestDatasets) -> Iterator[MetricSample]:
    busiest.select_busiest(time.monotonic())
    for name, row in (*busiest.rows.items(), (OTHER, busiest.others)):
        for source in SOURCES:
            yield MetricSample(DATASET_BLOCKS, (name, source), row.blocks[source])
            yield MetricSample(DATASET_BYTES, (name, source), row.bytes[source])


# --- the daemon -------------------------------------------------------------------------------------------------------
ERRORS: Final = _counter("errors", "failures", "Failures that were recorded; `cachectl errors` lists the last ones.")
INFO: Final = _gauge("build_info", "1", "Always 1; its label is the version of the daemon.", VERSION)
START: Final = _gauge("start_time_seconds", "seconds", "When the daemon started: unix time.")


def _daemon_samples(node: Node) -> Iterator[MetricSample]:
    yield MetricSample(ERRORS, (), node.errors.count)
    yield MetricSample(INFO, (__version__,), 1)
    yield MetricSample(START, (), node.began)


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


def _all() -> Iterator[Metric]:
    for value in list(globals().values()):
        if isinstance(value, Metric):
            yield value


TABLE: Final = tuple(_all())
