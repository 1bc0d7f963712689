"""Passes reports between mounts, jobs and pushers: the one place of the node where they meet.

A mount reports the blocks it has read. Jobs learn their consumers' positions from these reports, pushers learn what is
in the mount's page cache, the prefetcher wakes up, and the tiers' policies count the uses. Pushers ask for their
audience: the consumers that read what their mount shows.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachefs.job_messages import JobProgress, JobProgressResponse
from cachefs.messages import MountReport, Stall
from cachefs.mount_spec import MountSpec
from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.pagecache.push_lookahead import PushReader
from cachefs.planning.pagecache.push_plan import MountConsumers
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.fetch.step_timer import StepTimer
from cachefs_daemon.jobs.attribution import Attribution
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.mounts.mount_affinity import MountAffinity
from cachefs_daemon.mounts.pushers import Pushers
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.threads import Threads

log = logging.getLogger(__name__)

# Seconds for which reports are gathered: following the reads of several workers costs as much as those of one, 0.4 ms.
# Workers that report at about the same time get their replies together, so they report together from then on.
GATHER_SECONDS: Final = 0.01
# Uses that are counted on the event loop while the store's lock is free: 1 us each, and a thread takes 100 us.
MAX_COUNTED_ON_LOOP: Final = 128


class JobConsumersByMount:
    """The consumers for which pages are pushed into each mount: see
    `cachefs_daemon.mounts.pushers.MountConsumersSource`."""

    def __init__(self, mounts: MountRegistry, jobs: JobRegistry, catalog: Catalog) -> None:
        self._mounts = mounts
        self._jobs = jobs
        self._catalog = catalog
        self._affinity = MountAffinity()  # the mounts through which each consumer reads
        self._mounts_by_snapshot: dict[str, list[str]] = {}  # by snapshot: ids of the mounts that show it

    def readers(self) -> Sequence[PushReader]:
        """Return all consumers of running jobs whose position is known."""
        return self._jobs.push_readers(0.0)

    def consumers_of(self, mount: str, latency: float) -> MountConsumers:
        """Return the consumers that read what *mount* shows. latency: seconds that a command to the mount's pusher
        takes; blocks that a consumer reads within them would come too late."""
        readers = self._jobs.push_readers(latency)
        shown = {snapshot for snapshot in {reader.snapshot for reader in readers} if self.shows(mount, snapshot)}
        return self._affinity.consumers_of(mount, [reader for reader in readers if reader.snapshot in shown])

    def mounts_of(self, consumer: str, snapshot: str) -> Collection[str]:
        """Return the ids of the mounts through which *consumer* may read *snapshot*; none where the consumer is on
        another node."""
        if consumer not in self._jobs.consumer_keys:
            return ()
        return self._affinity.mounts_of(consumer) or self._mounts_that_show(snapshot)

    def _mounts_that_show(self, snapshot: str) -> list[str]:
        """Return the ids of the mounts that show *snapshot*, as of some seconds ago at most.

        The prefetcher calls this for each consumer in each step, and the search visits all mounts and datasets.
        """
        if snapshot not in self._mounts_by_snapshot:
            records = [one.record for one in self._catalog if any(each.id == snapshot for each in one.record.snapshots)]
            self._mounts_by_snapshot[snapshot] = [
                one for one in self._mounts.ids if self._mounts.shows(one, snapshot, records)
            ]
        return self._mounts_by_snapshot[snapshot]

    def shows(self, mount: str, snapshot: str) -> bool:
        """Return whether *mount* shows files of *snapshot*."""
        return self._mounts.shows(mount, snapshot, [dataset.record for dataset in self._catalog])

    def note_reads(self, mount: str, own_reads: Mapping[str, int]) -> None:
        """Record own_reads: by key of the consumer, how many of its own reads came through *mount*."""
        self._affinity.note_reads(mount, own_reads)

    def forget_ended(self) -> None:
        """Forget consumers that have ended, and the mounts by snapshot. Call every few seconds."""
        self._affinity.forget_others(self._jobs.consumer_keys)
        self.forget_mounts()

    def forget_mounts(self) -> None:
        """Forget the mounts by snapshot, because there is a new mount."""
        self._mounts_by_snapshot.clear()


@dataclass(frozen=True, slots=True)
class ReportHandlers:
    """The parts of the node that process reports of mounts."""

    jobs: JobRegistry
    attribution: Attribution
    consumers_by_mount: JobConsumersByMount
    pushers: Pushers
    pace: StepTimer  # woken, since there may be more to fetch ahead
    # Receives how long reads of planned blocks have waited, the number of such reads, and the time.
    on_late_reads: Callable[[Sequence[float], int, float], None]
    # receives the mount's id and the keys that it has read, some of which may come from readahead
    on_readahead_reads: Callable[[str, Sequence[bytes]], None]
    # Learns that datasets are mounted: those for whose names the given function returns true.
    on_new_mount: Callable[[Callable[[str], bool]], None]


@dataclass(slots=True)
class _GatheredReports:
    """Reports of the workers of one mount, since they were last passed on."""

    # Keys of the blocks that were read, in the order of the reports.
    accessed: list[bytes] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)


class ReportDispatcher:
    """Receives reports and passes them on. Used from the event loop only."""

    def __init__(
        self, mounts: MountRegistry, listeners: ReportHandlers, tiering: Locked[Tiering], threads: Threads
    ) -> None:
        """tiering: counts the uses of blocks."""
        self._mounts = mounts
        self._handlers = listeners
        self._tiering = tiering
        self._threads = threads
        self._gathered: dict[str, _GatheredReports] = {}  # by id of the mount
        self._dispatch_task: asyncio.Task[None] | None = None  # until it takes the gathered reports

    async def on_mount_report(self, report: MountReport) -> None:
        """Process a report of a mount: a heartbeat, with the blocks that were read."""
        if self._mounts.add_report(report):
            self._handlers.consumers_by_mount.forget_mounts()
            self._handlers.on_new_mount(MountSpec.parse(report.spec).is_showing)
        if not report.accessed and not report.stalls:
            return
        gathered = self._gathered.setdefault(report.id, _GatheredReports())
        gathered.accessed += report.accessed
        gathered.stalls += report.stalls
        if self._dispatch_task is None:
            self._dispatch_task = asyncio.create_task(self._dispatch())
        await asyncio.shield(self._dispatch_task)

    async def _dispatch(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        gathered, self._gathered, self._dispatch_task = self._gathered, {}, None
        for mount, one in gathered.items():
            try:
                self._dispatch_reads(mount, one)
            except Exception:  # the other mounts' reads are still followed
                log.exception("failed to process the reads that mount %s reported", mount)
        accessed = [key for one in gathered.values() for key in one.accessed]
        if len(accessed) > MAX_COUNTED_ON_LOOP or not self._tiering.try_acquire():
            await self._threads.run(self._count_uses, accessed)
            return
        try:
            self._tiering.unlocked.note_accessed(accessed, time.monotonic())
        finally:
            self._tiering.release()

    def _dispatch_reads(self, mount: str, gathered: _GatheredReports) -> None:
        to, now = self._handlers, time.monotonic()
        observed = to.attribution.note_reads(gathered.accessed, gathered.stalls, now, to.pushers.pages_of(mount))
        to.on_late_reads(observed.late_seconds, sum(observed.own_reads.values()), now)
        to.consumers_by_mount.note_reads(mount, observed.own_reads)
        to.pushers.on_reads(mount, gathered.accessed, observed.tripwires_read)
        to.on_readahead_reads(mount, gathered.accessed)
        to.pace.wake()

    def on_job_progress(self, progress: JobProgress) -> JobProgressResponse:
        """Record a consumer's progress. Raises NotFound, ConfigError."""
        wanted = self._handlers.jobs.note_progress(progress)
        self.wake_fetching()
        return JobProgressResponse(
            wanted=wanted, troubles=self._handlers.jobs.troubles_of(self._handlers.jobs.get(progress.job))
        )

    def wake_fetching(self) -> None:
        """Wake prefetcher and pushers, because the plan has changed."""
        self._handlers.pace.wake()
        self._handlers.pushers.wake()

    def forget_ended(self) -> None:
        """Forget mounts and consumers that have ended, and update what page caches cover. Call every few seconds."""
        self._mounts.forget_ended()
        self._handlers.consumers_by_mount.forget_ended()
        self._handlers.pushers.forget_ended(self._mounts.is_alive)
        self._handlers.pushers.update_coverage()

    def _count_uses(self, accessed: list[bytes]) -> None:
        with self._tiering as tiering:
            tiering.note_accessed(accessed, time.monotonic())
