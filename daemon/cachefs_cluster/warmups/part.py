"""Fetches this node's part of a warm-up: the blocks, of those that were requested, that the node keeps.

A block's keeper is its home, or its holder where the sequences of jobs decide (`cachefs_cluster.placement`). Each block
therefore leaves the origin once, for all nodes. Blocks that a published job reads sooner come first.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from cachefs.backoff import Backoff
from cachefs.messages import WarmupRequest
from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.cluster.homes import blocks_at_home
from cachefs.planning.cluster.ownership import OwnedMarks
from cachefs.planning.cluster.rendezvous import space_hashes
from cachefs.planning.cluster.warmup import PartPlan, plan_part
from cachefs.snapshot import Snapshot
from cachefs_cluster.placement.holders import PlacementRing
from cachefs_cluster.placement.rebalance_status import ring_digest
from cachefs_cluster.placement.shared_snapshot import SharedSnapshot
from cachefs_cluster.sharing.sections import WarmupPart, WarmupTotals
from cachefs_daemon.content.warmup import WarmupBlocks, WarmupRun, Warmups, block_refs, plan_warmup
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.segment_writer import spans
from cachefs_daemon.store.storage import Storage

# Most times that the part is looked through for missing blocks after a run in which all blocks came.
MAX_PASSES: Final = 4
# Seconds before blocks that failed are tried again: the first pause, and the longest, each twice the last; and seconds
# without a block after which they count as failed.
RETRY_SECONDS: Final = 2.0
MAX_RETRY_SECONDS: Final = 30.0
GIVE_UP_SECONDS: Final = 300.0
# Seconds that a part waits until jobs' sequences are planned, and until holders follow a change of the ring.
PLANNED_SECONDS: Final = 5.0
FOLLOW_SECONDS: Final = 20.0
_CHECK_SECONDS: Final = 0.1
# Blocks looked up in the index at once.
_LOOKED_UP_AT_ONCE: Final = 1024


@dataclass(frozen=True, slots=True)
class PartTarget:
    """The members among which the blocks are divided, and the snapshot."""

    ring: PlacementRing
    snapshot: Snapshot

    @property
    def key(self) -> tuple[str, str]:
        """The fields of a WarmupPart that tell the same."""
        return ring_digest(self.ring.ids), self.snapshot.id


@dataclass(slots=True, eq=False)
class LocalPart:
    """This node's part of one warm-up, and its progress."""

    state: str = "waiting"
    # See `PartTarget.key`; ("", "") before the first plan.
    key: tuple[str, str] = ("", "")
    reason: str = ""
    # Why blocks come slowly now; "" for no known reason.
    slowness: str = ""
    # Whether the part could not be planned.
    has_failed: bool = False
    # Bytes and blocks of the whole warm-up, one copy of each: 0 before the first plan.
    selected: tuple[int, int] = (0, 0)
    # Requested paths that are not in the snapshot: their number, and the first.
    missing: tuple[int, str] = (0, "")
    # Totals apart from those of `run`.
    _planned: WarmupTotals = field(default_factory=WarmupTotals)
    _run: WarmupRun | None = None

    def note_planned(self, plan: PartPlan) -> None:
        """Count what a plan has found here; the run for the rest follows."""
        self._run = None
        self._planned = WarmupTotals(plan.blocks_here, plan.blocks, plan.bytes_here, plan.bytes, plan.without_room)

    def follow_run(self, run: WarmupRun) -> None:
        self._run = run

    @property
    def totals(self) -> WarmupTotals:
        planned, run = self._planned, self._run
        if self.has_failed:
            return replace(planned, failed=max(1, planned.blocks_total - planned.blocks - planned.skipped))
        if run is None:
            return planned
        return WarmupTotals(
            min(planned.blocks_total, planned.blocks + run.blocks),
            planned.blocks_total,
            min(planned.bytes_total, planned.bytes + run.bytes),
            planned.bytes_total,
            planned.skipped + run.skipped,
            run.failed,
        )

    def published(self) -> WarmupPart:
        """Return the part as other nodes see it."""
        slowness = self.slowness if self.state == "running" else ""
        return WarmupPart(self.state, *self.key, self.totals, self.reason or slowness)


@dataclass(frozen=True, slots=True)
class PartParts:
    """The parts of the node that `PartFetcher` uses."""

    # Id of this node.
    me: str
    warmups: Warmups
    fetcher: Fetcher
    catalog: Catalog
    storage: Storage
    threads: Threads
    # Returns the shared snapshot, if jobs read it.
    shared_snapshot: Callable[[str], SharedSnapshot | None]


class PartFetcher:
    """Plans and fetches parts of warm-ups. Used on the event loop; plans in threads."""

    def __init__(self, parts: PartParts) -> None:
        self._parts = parts

    async def fetch(self, number: int, request: WarmupRequest, target: PartTarget, part: LocalPart) -> None:
        """Fetch the part, until all of it that fits is here, or nothing has come for GIVE_UP_SECONDS. part: is kept up
        to date. Raises CachefsError where the part cannot be planned.

        The index is looked through again after each run: jobs may have moved blocks to this node meanwhile.
        """
        part.state, part.reason, part.key = "planning", "", target.key
        if request.before:
            await self._wait(lambda: target.snapshot.id in self._parts.storage.planning.plan.spaces, PLANNED_SECONDS)
        loop, passes = asyncio.get_running_loop(), 0
        # Blocks of runs without failures. Where others displace them, they are not fetched again.
        fetched = np.zeros(0, np.int32)
        retry, came_at = Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS), loop.time()
        while True:
            space, plan = await self._plan(request, target, part, fetched)
            part.note_planned(plan)
            if not len(plan.ids):
                break
            part.state = "running"
            run = await self._run(number, request.dataset, space, plan, part)
            if run.blocks:
                came_at, retry = loop.time(), Backoff(RETRY_SECONDS, MAX_RETRY_SECONDS)
            part.reason = run.message
            if not run.failed:
                passes, fetched = passes + 1, np.concatenate((fetched, plan.ids))
            if run.skipped or passes >= MAX_PASSES or (run.failed and loop.time() - came_at > GIVE_UP_SECONDS):
                break
            if run.failed:
                await asyncio.sleep(retry.note_failure(loop.time()))
        part.state = "done"
        if not part.totals.failed:
            part.reason = ""

    async def _run(self, number: int, dataset: str, space: BlockSpace, plan: PartPlan, part: LocalPart) -> WarmupRun:
        size = int(space.sizes[plan.ids].sum(dtype=np.int64))
        blocks = WarmupBlocks(dataset, block_refs(space, plan.ids), len(plan.ids), size, snapshot=space.snapshot)
        run = self._parts.warmups.start_fetching(blocks, number)
        part.follow_run(run)
        try:
            await asyncio.wait([run.task])
        finally:
            run.task.cancel()
        return run

    async def _plan(
        self, request: WarmupRequest, target: PartTarget, part: LocalPart, fetched: Ids
    ) -> tuple[BlockSpace, PartPlan]:
        """Plan the blocks of the part that are missing, except for *fetched*. Raises CachefsError."""
        parts, snapshot = self._parts, target.snapshot
        planning, plan = parts.threads.planning, parts.storage.planning.plan
        shared = parts.shared_snapshot(snapshot.id)
        if shared is not None:
            await self._wait(lambda: shared.is_up_to_date, FOLLOW_SECONDS)
        known = plan.spaces.get(snapshot.id)
        space = known if known is not None else await planning(BlockSpace.of, snapshot)
        chosen, part.missing = await parts.threads.background(_chosen_blocks, snapshot, request, space)
        part.selected = int(space.sizes[chosen].sum(dtype=np.int64)), len(chosen)
        owned = parts.storage.planning.standing.owned if parts.storage.planning.standing is not None else {}
        marks = owned.get(snapshot.id) if shared is not None else None
        ids = await planning(_kept_blocks, space, chosen, marks, target.ring, parts.me)
        is_here = await parts.threads.background(self._are_here, space, ids)
        is_here |= np.isin(ids, fetched)
        next_use = await planning(plan.next_use_of, snapshot.id, ids) if snapshot.id in plan.spaces else None
        sizes = space.sizes[ids].astype(np.int64)
        taken = await planning(spans, sizes)
        room = await self._room(request.dataset, int(taken[is_here].sum()))
        never = np.full(len(ids), np.inf)
        return space, plan_part(ids, sizes, taken, is_here, never if next_use is None else next_use, room)

    async def _room(self, dataset: str, taken: int) -> int:
        """Return the bytes of tiers that the part may take. taken: by its blocks that are here.

        Where policies evict, the whole of the tiers may become this part's, but no more; where they do not, what is
        free.
        """
        storage, tiering = self._parts.storage, self._parts.storage.tiering.unlocked
        limits = [tier.limit for tier in await self._parts.threads.background(storage.usage) if not tier.problem]
        if (found := self._parts.catalog.find(dataset)) is not None:
            limits = [int(min(found.record.share * limit, found.record.most or limit)) for limit in limits]
        room = sum(limits) - tiering.max_extra_bytes
        return room if tiering.can_keep_copies else min(room, taken + sum(tiering.free_by_tier))

    def _are_here(self, space: BlockSpace, ids: Ids) -> npt.NDArray[np.bool_]:
        here = np.zeros(len(ids), np.bool_)
        for start in range(0, len(ids), _LOOKED_UP_AT_ONCE):
            keys = space.keys(ids[start : start + _LOOKED_UP_AT_ONCE])
            here[start : start + len(keys)] = [self._parts.storage.blocks.get(key) is not None for key in keys]
        return here

    def slowness_reason(self, dataset: str) -> str:
        """Return why blocks of the dataset come slowly to this node; "" for no known reason."""
        found = self._parts.catalog.find(dataset)
        if found is not None and found.origin.endpoint.status().silent > 0:
            return "its origin does not answer it"
        return "reads that programs wait for go first" if self._parts.fetcher.has_waiting_reader else ""

    @staticmethod
    async def _wait(is_met: Callable[[], bool], seconds: float) -> None:
        """Wait until the condition is met, for at most *seconds*."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not is_met() and loop.time() < until:  # noqa: ASYNC110 - no event
            await asyncio.sleep(_CHECK_SECONDS)


def _chosen_blocks(snapshot: Snapshot, request: WarmupRequest, space: BlockSpace) -> tuple[Ids, tuple[int, str]]:
    """Return the requested blocks, and the number and the first of paths that are not in the snapshot."""
    plan = plan_warmup(snapshot, request)
    _, ids = space.blocks_of(np.frombuffer(plan.files, np.uint64).astype(np.int64))
    return ids, (len(plan.missing), next(iter(plan.missing), ""))


def _kept_blocks(space: BlockSpace, chosen: Ids, marks: OwnedMarks | None, ring: PlacementRing, me: str) -> Ids:
    """Return which of the blocks *chosen* this node keeps. marks: as decided by jobs; None: by homes alone."""
    mine = marks if marks is not None else blocks_at_home(space_hashes(space), ring.members, me)
    kept: Ids = chosen[mine[chosen]]
    return kept
