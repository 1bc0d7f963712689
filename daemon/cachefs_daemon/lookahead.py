"""Creates the parts that bring blocks nearer before they are read: from origins, from disk into memory, and into page
caches; and connects them with the reports of mounts, which drive them."""

import time
from dataclasses import dataclass

from cachefs.planning.prefetch.fetch_plan import FetchLimits, FetchPlan, PromotionPlan
from cachefs_daemon.config import Config
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.datasets.open_snapshots import OpenSnapshots
from cachefs_daemon.fetch.fetching import Fetching
from cachefs_daemon.fetch.origin_shares import OriginShares
from cachefs_daemon.fetch.prefetcher import Prefetcher, Promoter
from cachefs_daemon.fetch.readahead import ReadaheadFetcher
from cachefs_daemon.fetch.reader_callbacks import PageCacheCallbacks, ReaderCallbacks
from cachefs_daemon.fetch.step_timer import StepTimer
from cachefs_daemon.jobs.job_parts import JobParts
from cachefs_daemon.mounts.pushers import Pushers, TierFacts
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.ports import Placement
from cachefs_daemon.report_dispatcher import JobConsumersByMount, ReportDispatcher, ReportHandlers
from cachefs_daemon.runtime.background import BackgroundWork
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage


@dataclass(frozen=True, slots=True)
class LookaheadParts:
    """The parts of the node that look ahead."""

    storage: Storage
    threads: Threads
    catalog: Catalog
    snapshots: OpenSnapshots
    fetching: Fetching
    mounts: MountRegistry
    jobs: JobParts
    placement: Placement


class NodeLookahead:
    """The prefetcher, the promoter, readahead, the pushers, and the dispatcher of reports. Used on the event loop."""

    def __init__(self, config: Config, parts: LookaheadParts) -> None:
        storage, threads, jobs = parts.storage, parts.threads, parts.jobs
        fetcher, limiter = parts.fetching.fetcher, parts.fetching.limiter
        self._parts = parts
        plan, presence = storage.planning.plan, storage.planning.presence
        audiences = JobConsumersByMount(parts.mounts, jobs.registry, parts.catalog)
        tiers = TierFacts(lambda: fetches.last_window, lambda: storage.capacity)
        self.pushers = Pushers(plan, presence, storage.planning.coverage, audiences, tiers)
        limits = FetchLimits(
            config.prefetch.safety,
            config.prefetch.stall_worth,
            config.origin.max_bytes_in_flight,
            limiter.max_planned,
            limiter.weights,
        )
        fetches = FetchPlan(plan, presence, limits, time.monotonic(), storage.planning.standing, self.pushers)
        self._fetches = fetches
        self.shares = OriginShares(
            limiter,
            fetcher.in_flight_fetches.job_bytes,
            lambda: fetches.demands,
            parts.catalog.endpoint_of,
        )
        pages = PageCacheCallbacks(self.pushers.can_push, self.pushers.push_readahead)
        self.readahead = ReadaheadFetcher(fetcher, storage, threads, parts.snapshots.get, pages)
        pace = StepTimer(plan)
        handlers = ReportHandlers(
            jobs.registry,
            jobs.attribution,
            audiences,
            self.pushers,
            pace,
            fetches.note_late_reads,
            self.readahead.note_reads,
            parts.catalog.prepare_origins,
        )
        self.dispatcher = ReportDispatcher(parts.mounts, handlers, storage.tiering, threads)
        self.background_work: list[BackgroundWork] = [self.shares.run]
        if config.prefetch.enabled:
            readers = ReaderCallbacks(self._margins, jobs.registry.note_fetched_block, self.pushers.has_active_pusher)
            promotions = PromotionPlan(plan, presence, config.prefetch.memory_ahead)
            self.background_work += [
                Prefetcher(fetches, pace, fetcher, storage.tiering, threads, readers).run,
                Promoter(promotions, pace, storage.blocks, storage.tiering, threads, readers).run,
            ]
        if config.prefetch.enabled and config.prefetch.guess:
            fetcher.add_demand_listener(self.readahead.note_demand)
            self.background_work.append(self.readahead.run)

    @property
    def copy_window(self) -> float:
        """Seconds ahead of readers within which blocks held by other nodes are fetched."""
        return self._fetches.copy_window

    def _margins(self) -> dict[str, float]:
        """Return, by consumer, the seconds by which it may be ahead of its position in the plan."""
        return {**self._parts.jobs.registry.margins(), **self._parts.placement.margins()}
