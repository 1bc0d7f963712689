"""Decides which blocks to fetch from the origins before they are read: earliest deadline first.

Into free room, blocks are fetched as far ahead as the plan goes. Where other blocks must be evicted for them, they are
fetched no further ahead than Little's law asks for: what is read during the latency of a fetch, times a safety factor.
A later eviction could choose better, since each block that is read meanwhile is needed only in the next epoch. Blocks
are fetched further ahead only where the origins' bandwidth would not suffice later (see
cachefs.planning.prefetch.fetch_window). Therefore no step evicts a block that is needed sooner than the fetched block.

Each job has places of its own for blocks in flight, so that no job waits for the places of another: which of them the
origin gets first is decided later (cachefs.planning.requests.shares). A block is urgent if its job needs it now
(cachefs.planning.prefetch.job_demand).

Blocks in the page cache of their reader are not fetched at all, while their pages were seen there recently (see
PageCacheModel.has in cachefs.planning.pagecache.model). Blocks that could not be fetched a moment ago wait
(`BlockBackoff`).

In a cluster, only blocks that are this node's to keep (see cachefs.planning.cluster.ownership) are fetched that far
ahead. Copies of other nodes' blocks are fetched within the window only, and no longer ahead than transfers between
nodes need: they would take the room of blocks of which the cluster has no other. Where the other node must first fetch
a block from the origin, it does so ahead by itself, as it knows the block's readers.

`PromotionPlan` decides which blocks of the SSD tier to bring nearer to their readers in advance. Into free room of the
memory tier, blocks are copied as far ahead as the plan goes. Beyond that, they are read into the kernel's page cache
shortly before they are needed, so that the mount's read does not wait. A copy into a full memory tier would push as
much back to the SSD, and write the whole dataset to it in every epoch.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.presence import ABSENT, IN_SSD, Presence
from cachefs.planning.blocks.space import Ids
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.prefetch.fetch_window import Bandwidth, FetchLatency, LearnedWindow, find_missing_reads
from cachefs.planning.prefetch.job_demand import JobDemand, find_demands
from cachefs.planning.prefetch.lookahead import BlockName, Lookahead, UpcomingBlock
from cachefs.planning.sequences.plan import Plan, job_of_consumer
from cachefs.planning.sequences.timeline import Seconds

# Seconds ahead of the readers that blocks are read into the page cache.
WINDOW_SECONDS: Final = 1.0
# Most blocks returned at once.
MAX_BLOCKS: Final = 256
# Seconds until a block that no tier took is requested again.
REFUSED_SECONDS: Final = 1.0
# Bounds of the seconds until a block that could not be fetched is requested again.
MIN_FAILED_SECONDS: Final = 1.0
MAX_FAILED_SECONDS: Final = 30.0
_GROWTH: Final = 1.1
# Most seconds ahead of the readers within which other blocks are evicted for fetched ones. Only a backlog may need
# more.
MAX_WINDOW_SECONDS: Final = 60.0
# The same for copies of other nodes' blocks. They arrive in milliseconds, while a window grows to seconds as soon as an
# origin is slow: with 4 s, 100 reads a second and 800 blocks per node, copies had half of the room in a first epoch.
MAX_COPY_WINDOW_SECONDS: Final = 0.5
# Seconds after a publication, or a jump of a consumer, in which late reads are not learned from.
SETTLE_SECONDS: Final = 3.0
# Seconds after which evicted, refused and failed blocks are considered again.
REFRESH_SECONDS: Final = 1.0
# Jobs that have all their places in flight at once. Where more jobs fetch ahead, they have these places together.
MAX_JOBS_AHEAD: Final = 8
_MIN_PLACES: Final = 4
# Seconds before a read, as a multiple of the window, within which its block is urgent; at least this many.
_URGENT_WINDOWS: Final = 2.0
_MIN_URGENT_SECONDS: Final = 1.0
# Part of the limit of blocks in flight from which the origins count as fully used. Below 1, as a finished fetch leaves
# its place free until the next step: with an origin that is too slow, 34 to 48 of 48 are in flight.
BUSY_SHARE: Final = 0.75


class PromotionPlan:
    """Chooses the blocks of the SSD tier to copy to memory, and those to read ahead."""

    def __init__(self, plan: Plan, presence: Presence, page_cache_bytes: int) -> None:
        """page_cache_bytes: most bytes that are read ahead at once."""
        self._plan = plan
        self._presence = presence
        self._page_cache_bytes = page_cache_bytes
        self._for_memory = Lookahead(plan, IN_SSD)  # for free room
        self._for_page_cache = Lookahead(plan, IN_SSD)  # for the page cache
        self._refreshed_at = -math.inf  # time of the last `refresh`

    def refresh(self, now: float) -> None:
        """Consider returned blocks again, once a second. To be called before each step. now: monotonic seconds."""
        if now - self._refreshed_at > REFRESH_SECONDS:
            self._refreshed_at = now
            self._for_memory.rewind()
            self._for_page_cache.rewind()

    def choose_for_memory(self, free: int) -> list[bytes]:
        """Return keys of blocks to copy into *free* bytes of the memory tier, soonest first."""
        if free <= 0:
            return []
        return self._keys(self._for_memory.take_blocks(self._presence.states, math.inf, MAX_BLOCKS, free))

    def choose_for_page_cache(self, margin: float) -> list[bytes]:
        """Return keys of blocks to read ahead, soonest first. margin: seconds by which readers may be ahead of their
        places in the plan."""
        return self._keys(
            self._for_page_cache.take_blocks(
                self._presence.states, margin + WINDOW_SECONDS, MAX_BLOCKS, self._page_cache_bytes
            )
        )

    def _keys(self, found: Sequence[UpcomingBlock]) -> list[bytes]:
        return [self._plan.spaces[one.snapshot].key(one.number) for one in found]


class BlockBackoff:
    """The pauses of blocks. Consecutive failures lengthen the pauses of further failures, until a fetch succeeds."""

    def __init__(self) -> None:
        self._until: dict[BlockName, float] = {}  # end of each pause, in monotonic seconds
        self._after_failure = MIN_FAILED_SECONDS  # pause of the next failing block, in seconds

    @property
    def paused(self) -> KeysView[BlockName]:
        """Blocks that pause, as of the last `forget_expired`."""
        return self._until.keys()

    def pause_refused(self, name: BlockName, now: float) -> None:
        """Pause a block that no tier took, as it would have been evicted for one that is needed sooner."""
        self._until[name] = now + REFUSED_SECONDS

    def pause_failed(self, name: BlockName, now: float) -> None:
        """Pause a block that could not be fetched."""
        self._until[name] = now + self._after_failure
        self._after_failure = min(MAX_FAILED_SECONDS, _GROWTH * self._after_failure)

    def reset(self) -> None:
        """Reset the backoff after a successful fetch: the origins work again."""
        self._after_failure = MIN_FAILED_SECONDS

    def forget_expired(self, now: float) -> None:
        """Forget the pauses that are over at *now*."""
        self._until = {name: until for name, until in self._until.items() if until > now}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits how far ahead blocks are fetched, and how much at once."""

    # Factor on the latency of a fetch: how far ahead of the readers other blocks are evicted for fetched ones.
    safety: float
    # Bytes from the origins that a second of stall is worth.
    stall_worth: float
    # Most bytes in flight of one job.
    max_bytes: int
    # Most blocks in flight of one job, including those that wait for a free connection to an origin.
    max_blocks: int
    # Weights of jobs; 1 where missing. They change.
    weights: Mapping[str, float] = field(default_factory=dict)


class PageCacheLookup(Protocol):
    """Tells what the page caches of this node's mounts have."""

    def are_cached(self, consumer: str, snapshot: str, ids: Ids, left: Seconds, now: float) -> npt.NDArray[np.bool_]:
        """Return whether *consumer* will find these blocks in the page caches of all mounts that it may read through:
        shape (n,), bool. ids: shape (n,); left: seconds until each must be fetched otherwise, negative where the fetch
        is overdue, shape (n,); now: seconds."""


@dataclass(frozen=True, slots=True)
class FetchBatch:
    """Blocks to fetch, for which other blocks may be evicted."""

    # Soonest first; never empty.
    blocks: list[UpcomingBlock]
    # Only blocks needed after the block with this key may be evicted.
    last_key: bytes


class FetchPlan:
    """Chooses the next blocks to fetch, and tracks fetches in flight and failures.

    A block that was returned is not returned again while it is in flight or pauses. The caller reports the blocks that
    it really fetches with `note_started`, and then each of them with one of `note_landed`, `note_refused`,
    `note_failed` and `note_dropped`. Times are monotonic seconds.
    """

    def __init__(
        self,
        plan: Plan,
        presence: Presence,
        limits: FetchLimits,
        now: float,
        ownership: Ownership | None = None,
        page_caches: PageCacheLookup | None = None,
    ) -> None:
        """ownership: which blocks are this node's to keep; None without other nodes. page_caches: of the mounts that
        consumers read through; None where unknown."""
        self._page_caches = page_caches
        self._now = now  # time of the last step
        self._plan = plan
        self._ownership = ownership
        self._presence = presence
        self._limits = limits
        spared = self._is_cached if page_caches is not None else None
        self._cached_filter = spared
        self._for_free_room = Lookahead(plan, ABSENT, ownership, spared)  # for free room
        self._for_window = Lookahead(plan, ABSENT, None, spared)  # for the window
        self._for_own_window = Lookahead(plan, ABSENT, ownership, spared)  # for the window, where there are copies
        self._for_backlog = Lookahead(plan, ABSENT, ownership, spared)  # for the backlog
        self.demands: Mapping[str, JobDemand] = {}  # by job, as of the last `refresh`
        self._bandwidth = Bandwidth(now)
        self._in_flight: dict[BlockName, UpcomingBlock] = {}
        self._bytes_in_flight = 0  # their sum
        self._job_blocks: Counter[str] = Counter()  # in flight, by job
        self._job_bytes: Counter[str] = Counter()
        self._backoff = BlockBackoff()
        self._learned_window = LearnedWindow(limits.stall_worth)
        self._window = 0.0  # last result of `update_window`, in seconds
        self._is_full = False  # True without free room or with copies: only then does the window limit fetches
        self._price, self._priced_at = 0.0, -math.inf  # of a second of window, and when it was computed
        self._refreshed_at = -math.inf  # time of the last `refresh`
        self._version, self._replanned_at = plan.version, -math.inf  # of the plan, and when its change was noticed

    # --- what to fetch ------------------------------------------------------------------------------------------------

    def refresh(self, now: float, delivered: int) -> None:
        """Consider blocks again that were returned before, and find the jobs' demands, once a second. To be called
        before each step.

        delivered: bytes that origins have delivered since the start.
        """
        self._now = now
        if now - self._refreshed_at <= REFRESH_SECONDS:
            return
        self._refreshed_at = now
        if self._version != self._plan.version:
            self._version, self._replanned_at = self._plan.version, now
        self._for_free_room.rewind()
        self._backoff.forget_expired(now)
        self._bandwidth.measure(delivered, now)
        owned = self._ownership.owned if self._ownership is not None else {}
        missing = find_missing_reads(self._plan, self._presence.states, owned, self._cached_filter)
        self.demands = find_demands(missing, self._bandwidth.value, self._limits.weights, self._window)
        self._for_backlog.rewind()

    def _is_cached(self, consumer: str, snapshot: str, ids: Ids, seconds: Seconds) -> npt.NDArray[np.bool_]:
        """Implement `CachedReadFilter`. A block whose pages were seen recently is fetched once they are known to be
        gone, or were not seen for too long: in time, which is a window before the read."""
        assert self._page_caches is not None
        return self._page_caches.are_cached(consumer, snapshot, ids, seconds - self._window, self._now)

    def update_window(self, margins: Mapping[str, float], latency: FetchLatency, now: float) -> float:
        """Return the seconds ahead of the readers within which other blocks are evicted for fetched ones.

        margins: by consumer, seconds by which it may be ahead of its place in the plan, added to the window; latency:
        recent latency of fetches.
        """
        self._for_window.margins = self._for_own_window.margins = self._for_backlog.margins = margins
        expected = self._limits.safety * (latency.mean + 2 * latency.deviation)
        self._window = min(MAX_WINDOW_SECONDS, expected + self._learned_window.extra_seconds(now))
        return self._window

    @property
    def last_window(self) -> float:
        """The last result of `update_window`, in seconds."""
        return self._window

    @property
    def copy_window(self) -> float:
        """Seconds ahead of the readers within which copies of other nodes' blocks are fetched."""
        return min(self._window, MAX_COPY_WINDOW_SECONDS)

    def note_late_reads(self, waits: Sequence[float], reads: int, now: float) -> None:
        """Record late reads: how long each waited for its block from an origin, in seconds, and how many planned reads
        there were in all."""
        since = now - self._replanned_at  # reads planned only recently are late whatever the window
        if self._is_full and self._bandwidth.has_spare and since > max(SETTLE_SECONDS, self._window):
            self._learned_window.note_late_reads(waits, reads, self._window, self._window_cost(now), now)

    def choose_for_free_room(self, free: int) -> list[UpcomingBlock]:
        """Return blocks for *free* bytes of the tiers. Bytes in flight are subtracted here."""
        free -= self._bytes_in_flight
        # Copies are fetched within the window, however much is free.
        self._is_full = free <= 0 or (self._ownership is not None and bool(self._ownership.owned))
        return self._choose(self._for_free_room, math.inf, free) if free > 0 else []

    def choose_for_window(self, window: float) -> FetchBatch | None:
        """Return blocks that are read within *window* seconds; copies, those read within `MAX_COPY_WINDOW_SECONDS`."""
        # The window is short, and its content changes, so it is examined from its start each time.
        self._for_window.rewind()
        marks = self._ownership.owned if self._ownership is not None else {}
        if not marks or window <= MAX_COPY_WINDOW_SECONDS:
            chosen = self._choose(self._for_window, window, self._limits.max_bytes)
        else:
            self._for_own_window.rewind()
            near = self._choose(self._for_window, MAX_COPY_WINDOW_SECONDS, self._limits.max_bytes)
            own = self._choose(self._for_own_window, window, self._limits.max_bytes)
            chosen = near + [one for one in own if one.seconds > MAX_COPY_WINDOW_SECONDS]
        return self._make_batch(chosen, chosen[-1].snapshot, chosen[-1].number) if chosen else None

    def split_copies(self, batch: FetchBatch) -> list[FetchBatch]:
        """Split a batch into blocks that are this node's to keep, and copies of other nodes' blocks. Copies have less
        room, since no block that is this node's is evicted for them."""
        marks = self._ownership.owned if self._ownership is not None else {}
        if not marks:
            return [batch]
        mine: list[UpcomingBlock] = []
        copies: list[UpcomingBlock] = []
        for block in batch.blocks:
            is_mine = block.snapshot not in marks or marks[block.snapshot][block.number]
            (mine if is_mine else copies).append(block)
        parts = (self._make_batch(part, part[-1].snapshot, part[-1].number) for part in (mine, copies) if part)
        return [part for part in parts if part is not None]

    def choose_for_backlog(self, window: float) -> list[FetchBatch]:
        """Return for each job blocks beyond the *window* that would come too late if their fetch began within it."""
        batches: list[FetchBatch] = []
        backlogs = [(job, one) for job, demand in self.demands.items() if (one := demand.backlog) is not None]
        late = [(job, backlog) for job, backlog in backlogs if backlog.seconds > window]
        readers = self._readers_by_job() if late else {}
        for job, backlog in late:
            own = {job: readers.get(job, ())}
            chosen = self._choose(self._for_backlog, backlog.seconds, self._limits.max_bytes, own)
            batch = self._make_batch(chosen, backlog.snapshot, backlog.last_block) if chosen else None
            if batch is not None:
                batches.append(batch)
        return batches

    def urgent_after(self, block: UpcomingBlock) -> float:
        """Return the seconds until the block is urgent; 0 if it is now."""
        demand = self.demands.get(job_of_consumer(block.consumer))
        urgent = max(_MIN_URGENT_SECONDS, _URGENT_WINDOWS * self._window)
        if demand is not None and demand.backlog is not None:
            urgent = max(urgent, demand.backlog.seconds)
        return max(0.0, block.seconds - urgent)

    def fit_into_room(self, blocks: Sequence[UpcomingBlock], room: int) -> list[UpcomingBlock]:
        """Return the first *blocks* that fit into *room* bytes. Bytes in flight are subtracted here."""
        room -= self._bytes_in_flight
        ends = itertools.accumulate(block.size for block in blocks)
        return [one for one, end in zip(blocks, ends, strict=True) if end <= room]

    def note_idle(self) -> None:
        """Record whether much more could be in flight now; bandwidth is then no limit. To be called after each step."""
        limits = self._limits
        if len(self._in_flight) < BUSY_SHARE * limits.max_blocks and self._bytes_in_flight < limits.max_bytes // 2:
            self._bandwidth.note_idle()

    def _window_cost(self, now: float) -> float:
        """Return the bytes per second from the origins that one more second of window takes (see LearnedWindow), at
        most a second old. Takes 0.4 ms per million blocks, and 10 us per consumer."""
        if now - self._priced_at <= REFRESH_SECONDS:
            return self._price
        self._priced_at = now
        totals = {snapshot: int(space.sizes.sum(dtype=np.int64)) for snapshot, space in self._plan.spaces.items()}
        taken = 0.0
        for consumer in self._plan.consumers():
            window = self._plan.window(consumer, 0, 1)
            space = self._plan.spaces.get(snapshot := self._plan.generation(consumer)[0])
            if window is not None and space is not None and space.count:
                taken += totals[snapshot] / space.count / window.period
        total = sum(totals.values())
        self._price = taken * taken / total if total else 0.0
        return self._price

    def _readers_by_job(self) -> Mapping[str, Sequence[str]]:
        """Return the consumers of each job."""
        readers: dict[str, list[str]] = {}
        for consumer in self._plan.consumers():
            readers.setdefault(job_of_consumer(consumer), []).append(consumer)
        return readers

    def _choose(
        self, lookahead: Lookahead, seconds: float, room: int, readers: Mapping[str, Sequence[str]] | None = None
    ) -> list[UpcomingBlock]:
        """Return blocks that are read within *seconds*, soonest first, at most *room* bytes. readers: by job, the
        consumers that read them; None: all."""
        readers = self._readers_by_job() if readers is None else readers
        # Jobs that want nothing take no places.
        all_places = MAX_JOBS_AHEAD * self._limits.max_blocks
        places = max(_MIN_PLACES, min(self._limits.max_blocks, all_places // max(1, len(self.demands))))
        known = self._in_flight.keys() | self._backoff.paused
        chosen: list[list[UpcomingBlock]] = []
        for job, consumers in readers.items():
            max_blocks = places - self._job_blocks[job]
            max_bytes = min(room, self._limits.max_bytes - self._job_bytes[job])
            if max_blocks <= 0 or max_bytes <= 0:
                continue
            found = lookahead.take_blocks(self._presence.states, seconds, max_blocks, max_bytes, known, consumers)
            if found and found[0].size > max_bytes:
                lookahead.rewind()  # the block must be found again later
            elif found:
                chosen.append(found)
        if len(chosen) < 2:
            return chosen[0] if chosen else []
        return self._merge_soonest(lookahead, chosen, room)

    @staticmethod
    def _merge_soonest(lookahead: Lookahead, chosen: list[list[UpcomingBlock]], room: int) -> list[UpcomingBlock]:
        """Return the blocks of several jobs as one list, soonest first, at most *room* bytes."""
        merged: dict[BlockName, UpcomingBlock] = {}
        for block in sorted(itertools.chain.from_iterable(chosen), key=lambda one: one.seconds):
            if block.name in merged:
                continue
            room -= block.size
            if room < 0:
                lookahead.rewind()  # the others must be found again later
                break
            merged[block.name] = block
        return list(merged.values())

    def _make_batch(self, chosen: list[UpcomingBlock], snapshot: str, last: int) -> FetchBatch | None:
        space = self._plan.spaces.get(snapshot)
        return FetchBatch(chosen, space.key(last)) if space is not None else None

    # --- what became of it --------------------------------------------------------------------------------------------

    def note_started(self, blocks: Iterable[UpcomingBlock]) -> None:
        """Record that fetches of the blocks begin."""
        for block in blocks:
            self._in_flight[block.name] = block
            self._count_in_flight(block, 1)

    def note_landed(self, one: UpcomingBlock) -> None:
        """Record that the block is in a tier."""
        self.note_dropped(one)
        self._backoff.reset()

    def note_refused(self, one: UpcomingBlock, now: float) -> None:
        """Record that no tier took the block, as it would have been evicted for one that is needed sooner."""
        self.note_dropped(one)
        self._backoff.pause_refused(one.name, now)

    def note_failed(self, one: UpcomingBlock, now: float) -> None:
        """Record that the block could not be fetched."""
        self.note_dropped(one)
        self._backoff.pause_failed(one.name, now)

    def note_dropped(self, one: UpcomingBlock) -> None:
        """Record that the block's fetch has ended without any result."""
        started = self._in_flight.pop(one.name, None)
        if started is not None:
            self._count_in_flight(started, -1)

    def _count_in_flight(self, block: UpcomingBlock, sign: int) -> None:
        job = job_of_consumer(block.consumer)
        self._bytes_in_flight += sign * block.size
        self._job_blocks[job] += sign
        self._job_bytes[job] += sign * block.size
        if not self._job_blocks[job]:
            del self._job_blocks[job], self._job_bytes[job]

    def bytes_in_flight(self, snapshot: str) -> int:
        """Return the bytes in flight of one snapshot."""
        return sum(block.size for name, block in self._in_flight.items() if name[0] == snapshot)

    # --- names of blocks ----------------------------------------------------------------------------------------------

    def key_of(self, one: UpcomingBlock) -> bytes:
        """Return the block's key. Raises KeyError where its snapshot is no longer planned."""
        return self._plan.spaces[one.snapshot].key(one.number)

    def file_blocks_of(self, blocks: Sequence[UpcomingBlock]) -> list[tuple[int, int]]:
        """Return for each block its entry in the snapshot, and its number within the entry. Raises KeyError as
        `key_of`."""
        found: list[tuple[int, int]] = []
        for snapshot, group in itertools.groupby(blocks, key=lambda one: one.snapshot):
            entries, numbers = self._plan.spaces[snapshot].refs(np.array([one.number for one in group], np.int32))
            found += zip(entries.tolist(), numbers.tolist(), strict=True)
        return found


def fit_into_quotas(blocks: Sequence[UpcomingBlock], left: Mapping[str, float]) -> list[UpcomingBlock]:
    """Return the *blocks* that fit into the quotas of their datasets.

    left: by limited snapshot, bytes that its dataset may still fetch. Other snapshots have no limit.
    """
    remaining = dict(left)
    kept = []
    for block in blocks:
        remaining[block.snapshot] = remaining.get(block.snapshot, math.inf) - block.size
        if remaining[block.snapshot] >= 0:
            kept.append(block)
    return kept
