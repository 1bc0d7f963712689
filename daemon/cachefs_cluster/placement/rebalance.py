"""Rebalances: fetches blocks that this node keeps and lacks from other nodes.

A node that joins or comes back fills up this way. A node that drains pushes nothing: the nodes that take over its
blocks pull them. Blocks that are read next come first. No block comes from an origin: a block that no node has is
fetched when it is read, or as planned by a job.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from cachefs.errors import CachefsError
from cachefs.planning.cluster.ownership import Ownership
from cachefs.planning.sequences.plan import Plan
from cachefs.sizes import format_size
from cachefs.snapshot import Snapshot
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.peers.client import PeerClient
from cachefs_cluster.placement.block_pull import BlockPuller
from cachefs_cluster.placement.holders import PlacementRing
from cachefs_cluster.placement.missing_blocks import MissingBlocks, MissingBlockSearch, RingChange
from cachefs_cluster.placement.rebalance_status import ring_digest
from cachefs_cluster.placement.shared_snapshot import SharedSnapshot
from cachefs_cluster.sharing.sections import REBALANCE, REBALANCE_NAME, RebalanceFacts
from cachefs_cluster.sharing.state import SharedState
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

log = logging.getLogger(__name__)

# Seconds for which membership must be stable before blocks are moved: nodes that join or leave together count as one
# change, and shared snapshots have followed it by then.
SETTLE_SECONDS: Final = 1.0
# Seconds between checks for new snapshots.
CHECK_SECONDS: Final = 2.0
# Longest wait in seconds for snapshots on their way from other nodes.
PENDING_SECONDS: Final = 30.0
# Seconds between reports of missing blocks to all other nodes.
PUBLISH_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class RebalanceParts:
    """The parts of the node that the rebalance uses."""

    membership: Membership
    shared: SharedState
    client: PeerClient
    blocks: BlockStore
    plan: Plan
    standing: Ownership
    threads: Threads
    # Returns the snapshots of this node's datasets; and whether any is on its way from another node.
    snapshots: Callable[[], Iterable[Snapshot]]
    is_snapshot_pending: Callable[[], bool]
    # Returns the shared snapshot, if jobs read it.
    shared_snapshot: Callable[[str], SharedSnapshot | None]
    # Returns the free bytes of the tiers.
    free_bytes: Callable[[], int]
    replicas: int
    # Bytes per second.
    bandwidth: int


class Rebalance:
    """Fetches the blocks that this node has to keep after changes of the ring. Used on the event loop.

    Handles one snapshot at a time, as its block space may take as much memory as all other state of a node.
    """

    def __init__(self, parts: RebalanceParts, ring: PlacementRing) -> None:
        """ring: the current members."""
        self.blocks = 0  # left to fetch since the ring changed
        self.bytes = 0
        self._parts = parts
        self._search = MissingBlockSearch(parts.plan, parts.standing, parts.blocks, parts.threads)
        self._puller = BlockPuller(parts.membership, parts.client, parts.blocks, parts.threads, parts.bandwidth)
        self._ring = ring
        self._target_ring = PlacementRing(0, (), ())  # the ring for which the rebalance is running or done
        self._complete_ring = ring  # the last ring for which all blocks were moved
        self._done_snapshots: set[str] = set()  # snapshots done for that ring
        self._searched_snapshots: set[str] = set()  # snapshots for which lost blocks have been searched
        self._incomplete_snapshots: set[str] = set()  # snapshots that did not fit completely
        self._published_at = 0.0  # loop time of the last report
        self._ring_changed = asyncio.Event()
        self._ring_changed.set()  # initially, to find what is missing

    def set_ring(self, ring: PlacementRing) -> None:
        """Note the current members."""
        if ring.ids != self._ring.ids:
            self._ring_changed.set()
        self._ring = ring

    def is_searching(self, snapshot: str) -> bool:
        """Return whether other nodes may have blocks of the snapshot that this one lost, or that were fetched while it
        was away."""
        return snapshot not in self._searched_snapshots

    @property
    def fetched_blocks(self) -> int:
        """Blocks that the rebalance has fetched since the daemon started."""
        return self._puller.blocks

    async def run(self) -> None:
        """Rebalance after each change, as long as the daemon runs."""
        while True:
            await self._wait_for_work()
            if self._ring.ids != self._target_ring.ids:
                self._ring_changed.clear()
                await asyncio.sleep(SETTLE_SECONDS)
                if self._ring_changed.is_set():
                    continue
                self._target_ring, self._done_snapshots = self._ring, set()
                await self._wait_for_snapshots()
            self._ring_changed.clear()
            try:
                if await self._rebalance_after(self._complete_ring, self._target_ring):
                    self._complete_ring = self._target_ring
            except Exception:
                log.exception("the rebalance failed; missing blocks are fetched when they are read")
                self._done_snapshots = {one.id for one in self._parts.snapshots()}
            self.blocks = self.bytes = 0
            self._publish_status()

    async def _wait_for_work(self) -> None:
        """Wait until the ring changes, or a new snapshot appears."""
        while not self._ring_changed.is_set():
            known = {one.id for one in self._parts.snapshots()}
            self._done_snapshots &= known
            if known - self._done_snapshots:
                return
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._ring_changed.wait()
            except TimeoutError:
                pass

    async def _wait_for_snapshots(self) -> None:
        """Wait until no snapshot is on its way from another node, for at most PENDING_SECONDS."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PENDING_SECONDS
        while self._parts.is_snapshot_pending() and loop.time() < until and not self._ring_changed.is_set():  # noqa: ASYNC110 - no event
            await asyncio.sleep(SETTLE_SECONDS / 10)

    def _publish_status(self) -> None:
        self._published_at = asyncio.get_running_loop().time()
        facts = RebalanceFacts(ring_digest(self._target_ring.ids), self.blocks, self.bytes)
        self._parts.shared.publish(REBALANCE, REBALANCE_NAME, facts)

    async def _rebalance_after(self, complete: PlacementRing, now: PlacementRing) -> bool:
        """Fetch missing blocks. complete: the last ring for which all blocks were moved. Returns False if the ring
        changes before the end."""
        parts = self._parts
        change = RingChange(complete, now, parts.membership.view.me, parts.replicas)
        new = [one for one in parts.snapshots() if one.id not in self._done_snapshots]
        lost = [one for one in new if one.id not in self._searched_snapshots]
        self._incomplete_snapshots &= {one.id for one in parts.snapshots()}
        if change.me in now.ids:
            moved = [one for one in new if await self._count_moved_blocks(one, change)]
            self._publish_status()
            if self.blocks:
                what = f"{self.blocks:,} blocks ({format_size(self.bytes)})"
                log.info("rebalance: fetching %s that other nodes have kept until now", what)
            # Moved blocks come first: a draining node waits for them.
            if not (
                await self._pull_all(moved, change, moved=True) and await self._pull_all(lost, change, moved=False)
            ):
                return False
            known = {one.id for one in parts.snapshots()}
            self._searched_snapshots = known & (
                self._searched_snapshots | ({one.id for one in lost} - self._incomplete_snapshots)
            )
        self._done_snapshots |= {one.id for one in new}
        return True

    async def _count_moved_blocks(self, snapshot: Snapshot, change: RingChange) -> bool:
        """Count the blocks of a snapshot to move here, and return whether there are any."""
        lacks = await self._find_missing(snapshot, change, moved=True)
        if lacks is not None:
            self.blocks, self.bytes = self.blocks + len(lacks.ids), self.bytes + lacks.size
        return lacks is not None

    async def _pull_all(self, snapshots: Sequence[Snapshot], change: RingChange, *, moved: bool) -> bool:
        """Pull the missing blocks of the snapshots. Returns False if the ring changes before the end."""
        got = 0
        for snapshot in snapshots:
            lacks = await self._find_missing(snapshot, change, moved=moved)
            if self._ring_changed.is_set():
                return False
            if lacks is not None:
                got += await self._puller.pull_blocks(
                    lacks, self._note_moved if moved else partial(self._has_room, snapshot.id)
                )
        if got:
            log.info("rebalance: fetched %d blocks from other nodes", got)
        return not self._ring_changed.is_set()

    async def _find_missing(self, snapshot: Snapshot, change: RingChange, *, moved: bool) -> MissingBlocks | None:
        try:
            return await self._search.find_missing(
                snapshot, self._parts.shared_snapshot(snapshot.id), change, moved=moved
            )
        except CachefsError as error:
            log.warning("snapshot %s is left out of the rebalance: %s", snapshot.id, error)
            return None

    def _note_moved(self, blocks: int, size: int) -> bool:
        """Subtract handled blocks, and return whether to go on."""
        self.blocks, self.bytes = max(0, self.blocks - blocks), max(0, self.bytes - size)
        if asyncio.get_running_loop().time() - self._published_at >= PUBLISH_SECONDS:
            self._publish_status()
        return not self._ring_changed.is_set()

    def _has_room(self, snapshot: str, blocks: int, size: int) -> bool:
        """Return whether to go on with blocks that were this node's before: none is evicted for them."""
        if self._parts.free_bytes() <= size:
            self._incomplete_snapshots.add(snapshot)
            return False
        return not self._ring_changed.is_set()
