"""What mounts and jobs report, carried to whoever must know of it: the one place where jobs and pushers meet.

A mount says which blocks it has read. Jobs learn from that where their consumers are, pushers what is in the mount's
page cache, the prefetcher that it is time to look again, and the tiers' policies what was used.
"""

import time
from dataclasses import dataclass

from cachefs.job_messages import JobProgress
from cachefs.messages import MountReport
from cachefs.planning.eviction.tiering import Tiering
from cachefs_daemon.fetch.prefetcher import Prefetcher
from cachefs_daemon.jobs.attribution import Attribution
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.mounts.pushers import Pushers
from cachefs_daemon.mounts.registry import MountRegistry
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.runtime.threads import Threads


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who learns from reports where consumers are."""

    jobs: JobRegistry
    attribution: Attribution
    pushers: Pushers
    prefetcher: Prefetcher


class Exchange:
    """Used from the event loop only."""

    def __init__(self, mounts: MountRegistry, listeners: Listeners, tiering: Locked[Tiering], threads: Threads) -> None:
        self._mounts = mounts
        self._jobs = listeners.jobs
        self._attribution = listeners.attribution
        self._pushers = listeners.pushers
        self._prefetcher = listeners.prefetcher
        self._tiering = tiering
        self._threads = threads

    async def on_mount_report(self, report: MountReport) -> None:
        self._mounts.report(report)
        if report.accessed or report.stalls:
            pages = self._pushers.pages_of(report.id)
            observed = self._attribution.on_reads(report.accessed, report.stalls, time.monotonic(), pages)
            self._pushers.note_own_reads(report.id, observed.own_reads)
            self._pushers.on_reads(report.id, report.accessed, observed.tripped)
            self._prefetcher.wake()
        if report.accessed:
            await self._threads.run(self._count_uses, report.accessed)

    def on_job_progress(self, progress: JobProgress) -> None:
        """Raises NotFound, ConfigError."""
        self._jobs.progress(progress)
        self._pushers.wake()

    def _count_uses(self, accessed: list[bytes]) -> None:
        with self._tiering as tiering:
            tiering.accessed(accessed, time.monotonic())
