"""All pushers of the node's mounts, and the contents of each mount's page cache, for as long as the mount lives."""

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cachefs.messages import MountView
from cachefs.planning.blocks.presence import Presence
from cachefs.planning.blocks.space import Ids
from cachefs.planning.pagecache.push_lookahead import PushReader, all_tripwires
from cachefs.planning.pagecache.push_plan import FileBlocks, MountConsumers, PushPlan
from cachefs.planning.pagecache.states import HELD, NO_PAGES, Coverage, PageStates, bytes_of
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import Seconds
from cachefs.push_messages import PushCommand, PushReport, PushSubscription
from cachefs.sizes import format_size
from cachefs_daemon.mounts.push_stream import PushStream

log = logging.getLogger(__name__)


class MountConsumersSource(Protocol):
    """Knows for which consumers pages are pushed."""

    def readers(self) -> Sequence[PushReader]:
        """Return all consumers for which pages are pushed into any mount."""

    def consumers_of(self, mount: str, latency: float) -> MountConsumers:
        """Return the consumers that read what *mount* shows. latency: seconds that a command to the mount's pusher
        takes; blocks that a consumer reads within them would come too late."""

    def mounts_of(self, consumer: str, snapshot: str) -> Collection[str]:
        """Return the ids of the mounts through which *consumer* may read *snapshot*; none where the consumer is on
        another node."""

    def shows(self, mount: str, snapshot: str) -> bool:
        """Return whether *mount* shows files of *snapshot*."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Figures of the tiers, and of fetches into them, that pushing needs."""

    lead: Callable[[], float]  # seconds before its read that a block must be fetched
    capacity: Callable[[], float]  # bytes of blocks that all tiers together keep


class Pushers:
    """Manages a push stream for each mount. Used from the event loop only."""

    def __init__(
        self, plan: Plan, presence: Presence, coverage: Coverage, audiences: MountConsumersSource, tiers: TierFacts
    ) -> None:
        self._tiers = tiers
        self._plan = plan
        self._presence = presence
        self._coverage = coverage
        self._consumers_source = audiences
        self._streams: dict[str, PushStream] = {}  # by id of the mount
        self._ended_counters: Counter[str] = Counter()  # counters of mounts that have ended
        self._closed = False

    def has_active_pusher(self) -> bool:
        """Return whether there is a pusher that may push."""
        return any(stream.can_push for stream in self._streams.values())

    async def commands(self, request: PushSubscription) -> AsyncGenerator[PushCommand, None]:
        """Yield the commands for a mount's pusher until it disconnects; end at once while the daemon is stopping."""
        if self._closed:
            return
        stream = self._streams.get(request.mount)
        if stream is None:
            stream = self._streams[request.mount] = self._open(request.mount)
            self.update_coverage()
        if request.pushes:
            where = request.directory or request.mount
            log.info("the mount on %s accepts pages ahead of reads, up to %s", where, format_size(request.budget))
        async with contextlib.aclosing(stream.commands(request)) as orders:
            async for order in orders:
                yield order

    def _open(self, mount: str) -> PushStream:
        shows = functools.partial(self._consumers_source.shows, mount)
        # Serial numbers begin with the time since the machine started, which cannot be set back. So no command of an
        # earlier daemon has one of them.
        first = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        plan = PushPlan(self._plan, self._presence, shows, first, self._tiers.capacity)
        return PushStream(plan, functools.partial(self._consumers_source.consumers_of, mount), self._tiers.lead)

    def close(self) -> None:
        """End all streams of commands, which would keep the daemon from stopping until its grace is over (5 s)."""
        self._closed = True
        for stream in self._streams.values():
            stream.close()

    def forget_ended(self, is_alive: Callable[[str], bool]) -> None:
        """Forget the pages of mounts that have ended. is_alive: returns whether there is a mount with that id."""
        gone = [mount for mount, stream in self._streams.items() if not stream.is_listening and not is_alive(mount)]
        for mount in gone:
            self._ended_counters.update(_counters(self._streams.pop(mount)))

    def handle_report(self, report: PushReport) -> None:
        """Process a pusher's report on its commands."""
        stream = self._streams.get(report.mount)
        if stream is not None:
            stream.handle_report(report)

    def wake(self) -> None:
        """Wake all streams after further reads, to ask their plans at once."""
        for stream in self._streams.values():
            stream.wake()

    def update_coverage(self) -> None:
        """Tell the memory tier which blocks it need not keep. Call every few seconds, as tripwires change."""
        streams = list(self._streams.values())
        self._coverage.set_mounts(
            streams, all_tripwires(self._plan, self._consumers_source.readers()) if streams else {}
        )

    def pages_of(self, mount: str) -> PageStates:
        """Return the page cache of *mount*: by snapshot, the PageState of each block. Empty where the mount has no
        pusher."""
        stream = self._streams.get(mount)
        return stream.pages.states if stream is not None else NO_PAGES

    def are_cached(self, consumer: str, snapshot: str, ids: Ids, left: Seconds, now: float) -> npt.NDArray[np.bool_]:
        """See `cachefs.planning.prefetch.fetch_plan.PageCacheLookup`."""
        mounts = self._consumers_source.mounts_of(consumer, snapshot)
        found = np.full(len(ids), bool(mounts))
        for mount in mounts:
            stream = self._streams.get(mount)
            found &= stream is not None and stream.pages.are_present(snapshot, ids, left, now)
        return found

    def on_reads(self, mount: str, accessed: Sequence[bytes], tripped: Mapping[str, Ids]) -> None:
        """Process reads of *mount*. accessed: keys of the blocks; tripped: by snapshot, the numbers of those that were
        left out of the mount's page cache on purpose, shape (n,), int32."""
        stream = self._streams.get(mount)
        if stream is None:
            return
        stream.pages.note_read_keys(accessed, tripped, time.monotonic())
        stream.wake()

    def can_push(self, mount: str) -> bool:
        """Return whether pages are pushed to *mount*."""
        stream = self._streams.get(mount)
        return stream is not None and stream.can_push

    def push_readahead(self, mount: str, files: FileBlocks, size: int) -> None:
        """Push these blocks, of *size* bytes, which are probably read next, although no published sequence has them."""
        stream = self._streams.get(mount)
        if stream is not None:
            stream.push_readahead(files, size)

    def bytes_ahead(self, snapshot: str, blocks: Ids) -> int:
        """Return the bytes of these blocks of *snapshot* in the page cache of the mount that has most of them. blocks:
        numbers, shape (n,), int32; a block that occurs several times counts once."""
        most = 0
        for stream in self._streams.values():
            states = stream.pages.states.get(snapshot)
            if states is not None:
                stored = np.unique(blocks[states[blocks] == HELD])
                most = max(most, bytes_of(stream.pages.spaces[snapshot].sizes, stored))
        return most

    def counters(self) -> Counter[str]:
        """Return the sums over all mounts since this daemon started, including those that have ended."""
        total = Counter(self._ended_counters)
        for stream in self._streams.values():
            total.update(_counters(stream))
        return total

    def pushed_bytes(self) -> Counter[str]:
        """Return the bytes that were pushed for reads of jobs, by snapshot: into the page caches of the present mounts,
        while a job reads the snapshot."""
        total: Counter[str] = Counter()
        for stream in self._streams.values():
            total.update(stream.pushed_bytes)
        return total

    def page_cache_use(self) -> tuple[int, int]:
        """Return the bytes in the page caches of all mounts, and their budget."""
        pages = [stream.pages for stream in self._streams.values() if stream.pushes]
        return sum(one.used for one in pages), sum(one.budget for one in pages)

    def with_push_counters(self, view: MountView) -> MountView:
        """Return *view* with counters of pushes."""
        stream = self._streams.get(view.id)
        if stream is None or not stream.pushes:
            return view
        pages = stream.pages
        counters = {f"push_{name}": value for name, value in stream.counters.items()}
        counters |= {
            "push_guessed_blocks": stream.readahead_blocks,
            "push_late": pages.late_blocks,
            "push_wasted": pages.wasted_blocks,
            "push_held_bytes": pages.used,
            "push_budget": pages.budget,
        }
        return msgspec.structs.replace(view, counters={**view.counters, **counters})


def _counters(stream: PushStream) -> dict[str, int]:
    pages = stream.pages
    return {
        **stream.counters_since_start,
        "guessed_blocks": stream.readahead_blocks,
        "late": pages.late_blocks,
        "wasted": pages.wasted_blocks,
    }
