"""What mounts, jobs and pushers tell each other: the one place of the node where they meet.

A mount says which blocks it has read. Jobs learn from that where their consumers are, pushers what is in the mount's
page cache, the prefetcher that it is time to look again, and the tiers' policies what was used. Pushers ask for whom
they push: for the jobs' consumers that read what their mount shows.
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

# Seconds for which reports are gathered: to follow the reads of several takes as long as those of one, 0.4 ms. Workers
# that report at about the same time are answered at the same time, so they do from then on.
GATHERED: Final = 0.01
# Uses that are counted on the event loop where nobody has the store's lock: 1 us each, and a thread takes 100.
AT_ONCE: Final = 128


class JobAudiences:
    """For whom pages are pushed into each mount: see `cachefs_daemon.mounts.pushers.Audiences`."""

    def __init__(self, mounts: MountRegistry, jobs: JobRegistry, catalog: Catalog) -> None:
        self._mounts = mounts
        self._jobs = jobs
        self._catalog = catalog
        self._affinity = MountAffinity()  # through which mounts each consumer reads
        self._showing: dict[str, list[str]] = {}  # by snapshot: ids of the mounts that show it

    def readers(self) -> Sequence[Reader]:
        """All consumers of running jobs whose place is known."""
        return self._jobs.readers(0.0)

    def of(self, mount: str, latency: float) -> Audience:
        """The consumers that read what the mount with that id shows. latency: seconds that an order to the mount's
        pusher takes; blocks that a consumer reads within them come too late."""
        readers = self._jobs.readers(latency)
        shown = {snapshot for snapshot in {one.snapshot for one in readers} if self.shows(mount, snapshot)}
        return self._affinity.audience(mount, [one for one in readers if one.snapshot in shown])

    def mounts_of(self, consumer: str, snapshot: str) -> Collection[str]:
        """Ids of the mounts through which *consumer*, which reads *snapshot*, may read; none where it is not of this
        node."""
        if consumer not in self._jobs.consumer_keys:
            return ()
        return self._affinity.mounts_of(consumer) or self._mounts_showing(snapshot)

    def _mounts_showing(self, snapshot: str) -> list[str]:
        """Return ids of the mounts that show *snapshot*, as they were at most some seconds ago.

        This is asked for each consumer in each step of the prefetcher, and looks at all mounts and datasets.
        """
        if snapshot not in self._showing:
            records = [one.record for one in self._catalog if any(each.id == snapshot for each in one.record.snapshots)]
            self._showing[snapshot] = [one for one in self._mounts.ids if self._mounts.shows(one, snapshot, records)]
        return self._showing[snapshot]

    def shows(self, mount: str, snapshot: str) -> bool:
        """Are files of *snapshot* among those that the mount with that id shows?"""
        return self._mounts.shows(mount, snapshot, [dataset.record for dataset in self._catalog])

    def note(self, mount: str, own_reads: Mapping[str, int]) -> None:
        """own_reads: by key of the consumer, how many of its own reads came through *mount*."""
        self._affinity.note(mount, own_reads)

    def forget_ended(self) -> None:
        """Forget consumers that have ended, and which mounts show what. To be called every few seconds."""
        self._affinity.forget_others(self._jobs.consumer_keys)
        self.look_again()

    def look_again(self) -> None:
        """Forget which mounts show what, as there is another mount."""
        self._showing.clear()


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who learns from reports where consumers are."""

    jobs: JobRegistry
    attribution: Attribution
    audiences: JobAudiences
    pushers: Pushers
    pace: Pace  # is woken, as there may be something to fetch ahead
    # Is told how long reads of planned blocks have waited, of how many such reads, and the time.
    late: Callable[[Sequence[float], int, float], None]
    guessed: Callable[[str, Sequence[bytes]], None]  # is told which mount has read which blocks, as some were guessed
    # Is told that datasets are mounted: those whose names the function that it gets knows.
    mounted: Callable[[Callable[[str], bool]], None]


@dataclass(slots=True)
class _Heard:
    """What the workers of one mount have reported since it was last looked at."""

    # Keys of the blocks that were read, in order of the reports.
    accessed: list[bytes] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)


class Exchange:
    """Used from the event loop only."""

    def __init__(self, mounts: MountRegistry, listeners: Listeners, tiering: Locked[Tiering], threads: Threads) -> None:
        """tiering: is told which blocks were used."""
        self._mounts = mounts
        self._to = listeners
        self._tiering = tiering
        self._threads = threads
        self._heard: dict[str, _Heard] = {}  # by id of the mount
        self._passing_on: asyncio.Task[None] | None = None  # until it takes what was heard

    async def on_mount_report(self, report: MountReport) -> None:
        """A mount says what it has read, and that it is there."""
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
            except Exception:  # the other mounts' reads are followed all the same
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
        """A consumer says how far it is. Raises NotFound, ConfigError."""
        wanted = self._to.jobs.progress(progress)
        self.wake()
        return JobProgressReply(wanted=wanted, troubles=self._to.jobs.troubles_of(self._to.jobs.get(progress.job)))

    def wake(self) -> None:
        """Have fetching ahead and pushing look at once: there is news of what will be read."""
        self._to.pace.wake()
        self._to.pushers.wake()

    def refresh(self) -> None:
        """Forget mounts and consumers that have ended, and say anew what page caches cover. To be called every few
        seconds."""
        self._mounts.forget_gone()
        self._to.audiences.forget_ended()
        self._to.pushers.forget_gone(self._mounts.lives)
        self._to.pushers.show_cached()

    def _count_uses(self, accessed: list[bytes]) -> None:
        with self._tiering as tiering:
            tiering.accessed(accessed, time.monotonic())
