"""An overview of the node and its cluster."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachefs import __version__
from cachefs.block import TIER_NAMES
from cachefs.cluster_messages import ClusterStatus
from cachefs.trouble_texts import describe_trouble
from cachefs_daemon.content.warmup import WarmupState
from cachefs_daemon.node import Node
from cachefs_daemon.origin import request_counters
from cachefs_daemon.store.storage import TierUsage

# The latest errors, other nodes and warmups that are shown.
MAX_ERRORS: Final = 20
MAX_MEMBERS: Final = 64
MAX_WARMUPS: Final = 5
# Characters of a message.
MAX_TEXT: Final = 500


@dataclass(frozen=True, slots=True)
class TierRow:
    """A tier, or the page caches: bytes."""

    name: str
    used: int
    # Its configured budget, and its present limit.
    budget: int
    limit: int
    blocks: int | None = None
    policy: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class OverviewTotals:
    """Counts since the daemon started."""

    # Bytes from origins, from other nodes, to other nodes, and pushed into page caches.
    origin_bytes: int
    peer_bytes: int
    served_bytes: int
    pushed_bytes: int
    # Requests to origins for bytes, and the failed ones among them.
    requests: int
    failed: int
    # Reads that reached mounts: those answered by a tier; those that waited for a fetch.
    hits: int
    misses: int
    # Seconds that reads have waited, all together.
    waited: float


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A node of the cluster."""

    name: str
    state: str
    zone: str
    is_me: bool
    # The share of all blocks whose home it is.
    share: float
    # Bytes of its tiers.
    capacity: int
    # Bytes that came from it, and bytes sent to it.
    received: int
    given: int
    is_cooling: bool


@dataclass(frozen=True, slots=True)
class ClusterOverview:
    """The cluster as this node knows it."""

    name: str
    source: str
    problem: str
    states: dict[str, int]
    # This node first, then in the order of names.
    members: list[MemberRow]


@dataclass(frozen=True, slots=True)
class WarmupRow:
    """A warmup that runs."""

    dataset: str
    bytes: int
    total: int
    # Whether it is a warmup of the cluster; what it waits for, or which node is behind and why.
    cluster: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A failure."""

    # Unix seconds of the last time, and how often.
    when: float
    count: int
    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class Overview:
    """The state of the node: tiers, totals, mounts, datasets, jobs, cluster, errors and troubles."""

    # Unix seconds of this node, and the start of its daemon.
    now: float
    began: float
    # Changes with each start of the daemon, when counts begin at 0.
    instance: str
    name: str
    version: str
    tiers: list[TierRow]
    totals: OverviewTotals
    # Reads of origins and peers that are in progress: blocks and bytes.
    in_flight: tuple[int, int]
    mounts: int
    dead_mounts: int
    datasets: int
    lost_datasets: int
    jobs: dict[str, int]
    warmups: list[WarmupRow]
    cluster: ClusterOverview | None
    errors: list[ErrorRow]
    # Failures of all kinds.
    error_count: int
    # Present troubles, as text, the worst first.
    troubles: list[str]


def overview(node: Node, usage: Sequence[TierUsage]) -> Overview:
    """Return the overview. Call on the event loop; takes a millisecond. usage: of the tiers."""
    alive = Counter(view.alive for view in node.mounts.views())
    return Overview(
        now=time.time(),
        began=node.began,
        instance=node.instance,
        name=node.cluster.name,
        version=__version__,
        tiers=[*map(_tier, usage), *_page_caches(node)],
        totals=_totals(node),
        in_flight=node.fetcher.in_flight,
        mounts=alive[True],
        dead_mounts=alive[False],
        datasets=len(node.catalog),
        lost_datasets=sum(dataset.current is None for dataset in node.catalog),
        jobs={state: count for state, count in Counter(job.state for job in node.jobs).items() if count},
        warmups=_warmups(node),
        cluster=_cluster(status) if (status := node.cluster.status()).name else None,
        errors=[
            ErrorRow(one.when, one.count, one.subject[:MAX_TEXT], one.message[:MAX_TEXT])
            for one in node.errors.views()[:MAX_ERRORS]
        ],
        error_count=node.errors.count,
        troubles=[describe_trouble(trouble, time.time())[:MAX_TEXT] for trouble in node.troubles.present_troubles()],
    )


def _tier(usage: TierUsage) -> TierRow:
    return TierRow(usage.name, usage.used, usage.budget, usage.limit, usage.blocks, usage.policy, usage.problem)


def _page_caches(node: Node) -> list[TierRow]:
    used, budget = node.lookahead.pushers.page_cache_use()
    return [TierRow("page cache", used, budget, budget)] if budget else []


def _totals(node: Node) -> OverviewTotals:
    counts, peers = node.mounts.counters(), node.cluster.peer_counts()
    reads = request_counters.total_counters().counters_for("read")
    return OverviewTotals(
        origin_bytes=node.fetcher.fetched_bytes,
        peer_bytes=peers.bytes,
        served_bytes=peers.served_bytes,
        pushed_bytes=node.lookahead.pushers.counters()["stored_bytes"],
        requests=sum(read.requests for read in reads),
        failed=sum(read.failed for read in reads),
        hits=sum(counts[f"hits_{tier}"] for tier in TIER_NAMES),
        misses=counts["misses"],
        waited=sum(seconds for _, seconds in node.jobs.stalls.totals_of_sources().values()),
    )


def _warmups(node: Node) -> list[WarmupRow]:
    shown = [one for one in node.warmups() if one.state in (WarmupState.RUNNING, WarmupState.WAITING)]
    return [
        WarmupRow(one.dataset, one.bytes, one.bytes_total, one.cluster, one.reason[:MAX_TEXT])
        for one in shown[:MAX_WARMUPS]
    ]


def _cluster(status: ClusterStatus) -> ClusterOverview:
    members = [
        MemberRow(
            name=member.name,
            state=member.state,
            zone=member.zone,
            is_me=member.id == status.me,
            share=member.share,
            capacity=member.memory + member.ssd,
            received=member.traffic.bytes_in,
            given=member.traffic.bytes_out,
            is_cooling=member.traffic.cooling,
        )
        for member in sorted(status.members, key=lambda one: one.id != status.me)[:MAX_MEMBERS]
    ]
    states = dict(Counter(member.state for member in status.members))
    return ClusterOverview(status.name, status.source, status.problem, states, members)
