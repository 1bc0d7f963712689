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

from cachefs.job_messages import JobProgress, JobProgressReply
from cachefs.messages import MountReport, Stall
from cachefs.mount_spec import MountSpec
from cachefs.planning.eviction.tiering import Tiering
from cachefs.planning.pagecache.lookahead import Reader
from cachefs.planning.pagecache.push_plan import Audience
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.fetch.pace import Pace
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
GATHERED: Final = 0.01
# Uses that are counted on the event loop while the store's lock is free: 1 us each, and a thread takes 100 us.
AT_ONCE: Final = 128


class JobAudiences:
    """The consumers for which pages are pushed into each mount: see `cachefs_daemon.mounts.pushers.Audiences`."""

    def __init__(self, mounts: MountRegistry, jobs: JobRegistry, catalog: Catalog) -> None:
        self._mounts = mounts
        self._jobs = jobs
        self._catalog = catalog
        self._affinity = MountAffinity()  # the mounts through which each consumer reads
        self._showing: dict[str, list[str]] = {}  # by snapshot: ids of the mounts that show it

    def readers(self) -> Sequence[Reader]:
        """Return all consumers of running jobs whose position is known."""
        return self._jobs.readers(0.0)

    def of(self, mount: str, latency: float) -> Audience:
        """Return the consumers that read what *mount* shows. latency: seconds that a command to the mount's pusher
        takes; blocks that a consumer reads within them would come too late."""
        readers = self._jobs.readers(latency)
        shown = {snapshot for snapshot in {one.snapshot for one in readers} if self.shows(mount, snapshot)}
        return self._affinity.audience(mount, [one for one in readers if one.snapshot in shown])

    def mounts_of(self, consumer: str, snapshot: str) -> Collection[str]:
        """Return the ids of the mounts through which *consumer* may read *snapshot*; none where the consumer is on
        another node."""
        if consumer not in self._jobs.consumer_keys:
            return ()
        return self._affinity.mounts_of(consumer) or self._mounts_showing(snapshot)

    def _mounts_showing(self, snapshot: str) -> list[str]:
        """Return the ids of the mounts that show *snapshot*, as of some seconds ago at most.

        The prefetcher calls this for each consumer in each step, and the search visits all mounts and datasets.
        """
        if snapshot not in self._showing:
            records = [one.record for one in self._catalog if any(each.id == snapshot for each in one.record.snapshots)]
            self._showing[snapshot] = [one for one in self._mounts.ids if self._mounts.shows(one, snapshot, records)]
        return self._showing[snapshot]

    def shows(self, mount: str, snapshot: str) -> bool:
        """Return whether *mount* shows files of *snapshot*."""
        return self._mounts.shows(mount, snapshot, [dataset.record for dataset in self._catalog])

    def note(self, mount: str, own_reads: Mapping[str, int]) -> None:
        """Record own_reads: by key of the consumer, how many of its own reads came through *mount*."""
        self._affinity.note(mount, own_reads)

    def forget_ended(self) -> None:
        """Forget consumers that have ended, and the mounts by snapshot. Call every few seconds."""
        self._affinity.forget_others(self._jobs.consumer_keys)
        self.look_again()

    def look_again(self) -> None:
        """Forget the mounts by snapshot, because there is a new mount."""
        self._showing.clear()


@dataclass(frozen=True, slots=True)
class Listeners:
    """The parts of the node that process reports of mounts."""

    jobs: JobRegistry
    attribution: Attribution
    audiences: JobAudiences
    pushers: Pushers
    pace: Pace  # woken, since there may be more to fetch ahead
    # Receives how long reads of planned blocks have waited, the number of such reads, and the time.
    late: Callable[[Sequence[float], int, float], None]
    # receives the mount's id and the keys that it has read, some of which may come from readahead
    guessed: Callable[[str, Sequence[bytes]], None]
    # Learns that datasets are mounted: those for whose names the given function returns true.
    mounted: Callable[[Callable[[str], bool]], None]


@dataclass(slots=True)
class _Heard:
    """Reports of the workers of one mount, since they were last passed on."""

    # Keys of the blocks that were read, in the order of the reports.
    accessed: list[bytes] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)


class Exchange:
    """Receives reports and passes them on. Used from the event loop only."""

    def __init__(self, mounts: MountRegistry, listeners: Listeners, tiering: Locked[Tiering], threads: Threads) -> None:
        """tiering: counts the uses of blocks."""
        self._mounts = mounts
        self._to = listeners
        self._tiering = tiering
        self._threads = threads
        self._heard: dict[str, _Heard] = {}  # by id of the mount
        self._passing_on: asyncio.Task[None] | None = None  # until it takes the gathered reports

    async def on_mount_report(self, report: MountReport) -> None:
        """Process a report of a mount: a heartbeat, with the blocks that were read."""
        if self._mounts.report(report):
            self._to.audiences.look_again()
            self._to.mounted(MountSpec.parse(report.spec).shows)
        if not report.accessed and not report.stalls:
            return
        heard = self._heard.setdefault(report.id, _Heard())
        heard.accessed += report.accessed
        heard.stalls += report.stalls
        if self._passing_on is None:
            self._passing_on = asyncio.create_task(self._pass_on())
        await asyncio.shield(self._passing_on)

    async def _pass_on(self) -> None:
        await asyncio.sleep(GATHERED)
        heard, self._heard, self._passing_on = self._heard, {}, None
        for mount, one in heard.items():
            try:
                self._on_reads(mount, one)
            except Exception:  # the other mounts' reads are still followed
                log.exception("what mount %s has read is not followed", mount)
        accessed = [key for one in heard.values() for key in one.accessed]
        if len(accessed) > AT_ONCE or not self._tiering.take_now():
            await self._threads.run(self._count_uses, accessed)
            return
        try:
            self._tiering.unlocked.accessed(accessed, time.monotonic())
        finally:
            self._tiering.give_back()

    def _on_reads(self, mount: str, heard: _Heard) -> None:
        to, now = self._to, time.monotonic()
        observed = to.attribution.on_reads(heard.accessed, heard.stalls, now, to.pushers.pages_of(mount))
        to.late(observed.late, sum(observed.own_reads.values()), now)
        to.audiences.note(mount, observed.own_reads)
        to.pushers.on_reads(mount, heard.accessed, observed.tripped)
        to.guessed(mount, heard.accessed)
        to.pace.wake()

    def on_job_progress(self, progress: JobProgress) -> JobProgressReply:
        """Record a consumer's progress. Raises NotFound, ConfigError."""
        wanted = self._to.jobs.progress(progress)
        self.wake()
        return JobProgressReply(wanted=wanted, troubles=self._to.jobs.troubles_of(self._to.jobs.get(progress.job)))

    def wake(self) -> None:
        """Wake prefetcher and pushers, because the plan has changed."""
        self._to.pace.wake()
        self._to.pushers.wake()

    def refresh(self) -> None:
        """Forget mounts and consumers that have ended, and update what page caches cover. Call every few seconds."""
        self._mounts.forget_gone()
        self._to.audiences.forget_ended()
        self._to.pushers.forget_gone(self._mounts.lives)
        self._to.pushers.show_cached()

    def _count_uses(self, accessed: list[bytes]) -> None:
        with self._tiering as tiering:
            tiering.accessed(accessed, time.monotonic())
