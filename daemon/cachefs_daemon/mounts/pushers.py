"""All pushers of the node's mounts, and the contents of each mount's page cache, for as long as the mount lives."""

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cachefs.messages import MountView
from cachefs.planning.blocks.presence import Presence
from cachefs.planning.blocks.space import Ids
from cachefs.planning.pagecache.push_lookahead import PushReader, all_tripwires
from cachefs.planning.pagecache.push_plan import (
    NO_CONSUMERS,
    FileBlocks,
    MountConsumers,
    PageAction,
    PageCommand,
    PushPlan,
)
from cachefs.planning.pagecache.states import HELD, NO_PAGES, Coverage, PageStates, bytes_of
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import Seconds
from cachefs.push_messages import PushCommand, PushReport, PushSubscription, StoredPages
from cachefs.sizes import format_size

# Longest step between two questions to the plan; MIN_STEP_SECONDS is the shortest. One takes 0.3 ms beside readers at
# full speed, and a pusher has commands for longer than the shortest step.
STEP_SECONDS: Final = 0.05
# The step where nothing is to be pushed. A published job and further reads wake the stream at once.
IDLE_SECONDS: Final = 0.5
MIN_STEP_SECONDS: Final = 0.01
# A pusher without a command for this long gets an empty one, as a heartbeat of the daemon.
ALIVE_SECONDS: Final = 10.0
log = logging.getLogger(__name__)


class PushStream:
    """The stream of one mount, whichever process pushes for it: the mount's pages outlive that process."""

    def __init__(self, plan: PushPlan, audience: Callable[[float], MountConsumers], lead: Callable[[], float]) -> None:
        """plan: decides the commands; audience: returns the readers of what the mount shows, where a command takes the
        given seconds; lead: returns the seconds before its read that a block must be fetched."""
        self.pages = plan.pages  # the model of the mount's page cache
        self.is_listening = False  # a pusher takes commands
        self.pushes = True  # and does not only report which pages are there
        self.readahead_blocks = 0  # blocks to be pushed because of readahead
        self._plan = plan
        self._audience = audience
        self._lead = lead
        self._subscription = 0  # number of the latest one; earlier ones have ended
        self._closed = False
        self._counters: Counter[str] = Counter()  # as the present pusher last reported them
        self._ended_counters: Counter[str] = Counter()  # counters of pushers that have ended
        self._counters_before_start: Counter[str] = Counter()  # counted before the first subscription to this daemon
        self._wakeup = asyncio.Event()

    @property
    def can_push(self) -> bool:
        """Whether there is a pusher that may push."""
        return self.is_listening and self.pages.budget > 0

    @property
    def states(self) -> PageStates:
        """The states of `pages`, without those of snapshots that are read only through other mounts."""
        return self._plan.states

    @property
    def pushed_bytes(self) -> Mapping[str, int]:
        """Bytes that this daemon has pushed for reads of jobs, by snapshot."""
        return self._plan.stored_bytes

    @property
    def counters(self) -> dict[str, int]:
        """The counters of all pushers of the mount, since the first of them began."""
        return {name: self._ended_counters[name] + value for name, value in self._counters.items()}

    @property
    def counters_since_start(self) -> dict[str, int]:
        """The counters of `counters`, since this daemon started."""
        return {name: value - self._counters_before_start[name] for name, value in self.counters.items()}

    async def commands(self, request: PushSubscription) -> AsyncGenerator[PushCommand, None]:
        """Yield the commands for the pusher that sends *request*, as they are decided. They end when the pusher listens
        no longer, or when another pusher of the mount subscribes."""
        files = [_file_blocks(one) for one in request.held]
        self._plan.start_pusher(request.budget, files, asyncio.get_running_loop().time(), pushes=request.pushes)
        self.is_listening, self.pushes = True, request.pushes
        if not self._subscription:
            self._counters_before_start = Counter(request.counters)
        self._subscription += 1
        self._wakeup.set()  # commands to an earlier pusher end
        subscription = self._subscription
        try:
            async for order in self._commands_of(subscription):
                yield order
        finally:
            if subscription == self._subscription or self._closed:
                self.is_listening = False

    async def _commands_of(self, subscription: int) -> AsyncGenerator[PushCommand, None]:
        now = asyncio.get_running_loop().time
        last_command_at = now()
        while subscription == self._subscription:
            self._wakeup.clear()
            for order in self._next_commands(now()):
                last_command_at = now()
                yield _encode_command(order)
                if subscription != self._subscription:
                    return
            if now() - last_command_at > ALIVE_SECONDS:
                last_command_at = now()
                yield PushCommand(serial=0, snapshot="", entries=b"", numbers=b"")
            await asyncio.sleep(MIN_STEP_SECONDS)
            if not self._wakeup.is_set():  # a timeout takes longer than a check
                step = IDLE_SECONDS if self._plan.is_idle else STEP_SECONDS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(step - MIN_STEP_SECONDS):
                        await self._wakeup.wait()

    def _next_commands(self, now: float) -> Iterator[PageCommand]:
        audience = self._audience(self._plan.latency) if self._plan.needs_consumers else NO_CONSUMERS
        return self._plan.next_commands(audience, now, self._lead())

    def close(self) -> None:
        """End the stream: the pusher subscribes again, to the next daemon."""
        self._closed = True
        self._subscription += 1
        self._wakeup.set()

    def wake(self) -> None:
        """Wake the stream after further reads."""
        self._wakeup.set()

    def push_readahead(self, files: FileBlocks, size: int) -> None:
        """Push these blocks, of *size* bytes, which are probably read next, although no published sequence has them."""
        if self.can_push:
            self.readahead_blocks += len(files)
            self._plan.queue_readahead(files, size)
            self._wakeup.set()

    def handle_report(self, report: PushReport) -> None:
        """Process the results of commands. The plan has forgotten those of an earlier subscription."""
        self.pages.set_budget(report.budget)
        if any(report.counters.get(name, 0) < value for name, value in self._counters.items()):
            self._ended_counters.update(self._counters)  # the report is from another process
        self._counters = Counter(report.counters)
        now = asyncio.get_running_loop().time()
        for done in report.done:
            self._plan.note_done(done.serial, np.frombuffer(done.failed, "<u4"), now)
        self._wakeup.set()


def _encode_command(order: PageCommand) -> PushCommand:
    return PushCommand(
        serial=order.serial,
        snapshot=order.files.snapshot,
        entries=order.files.entries.astype("<u8").tobytes(),
        numbers=order.files.numbers.astype("<u4").tobytes(),
        drop=order.action is PageAction.DROP,
        check=order.action is PageAction.CHECK,
    )


def _file_blocks(pages: StoredPages) -> FileBlocks:
    entries, numbers = np.frombuffer(pages.entries, "<u8"), np.frombuffer(pages.numbers, "<u4")
    return FileBlocks(pages.snapshot, entries.astype(np.int64), numbers.astype(np.int64))


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
