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
from cachefs.planning.cluster.standing import Standing
from cachefs.planning.sequences.plan import Plan
from cachefs.sizes import format_size
from cachefs.snapshot import Snapshot
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cooperation.filled import ring_digest
from cachefs_daemon.cooperation.holders import Ring
from cachefs_daemon.cooperation.lacking import Change, Lacking, Lacks
from cachefs_daemon.cooperation.pulling import Pulling
from cachefs_daemon.cooperation.shared_snapshot import SharedSnapshot
from cachefs_daemon.peers.client import PeerClient
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.sharing.sections import FILLING, FILLING_NAME, FillingFacts
from cachefs_daemon.sharing.state import SharedState
from cachefs_daemon.store.block_store import BlockStore

log = logging.getLogger(__name__)

# Seconds for which membership must be stable before blocks are moved: nodes that join or leave together count as one
# change, and shared snapshots have followed it by then.
SETTLED: Final = 1.0
# Seconds between checks for new snapshots.
LOOK: Final = 2.0
# Longest wait in seconds for snapshots on their way from other nodes.
PENDING_SECONDS: Final = 30.0
# Seconds between reports of missing blocks to all other nodes.
TOLD: Final = 1.0


@dataclass(frozen=True, slots=True)
class FillingParts:
    """The parts of the node that filling uses."""

    membership: Membership
    shared: SharedState
    client: PeerClient
    blocks: BlockStore
    plan: Plan
    standing: Standing
    threads: Threads
    # Returns the snapshots of this node's datasets; and whether any is on its way from another node.
    snapshots: Callable[[], Iterable[Snapshot]]
    pending: Callable[[], bool]
    # Returns the shared snapshot, if jobs read it.
    cooperating: Callable[[str], SharedSnapshot | None]
    # Returns the free bytes of the tiers.
    free: Callable[[], int]
    replicas: int
    # Bytes per second.
    bandwidth: int


class Filling:
    """Fills this node up after changes of the ring. Used on the event loop.

    Handles one snapshot at a time, as its block space may take as much memory as all other state of a node.
    """

    def __init__(self, parts: FillingParts, ring: Ring) -> None:
        """ring: the current members."""
        self.blocks = 0  # left to fetch since the ring changed
        self.bytes = 0
        self._parts = parts
        self._lacking = Lacking(parts.plan, parts.standing, parts.blocks, parts.threads)
        self._pulling = Pulling(parts.membership, parts.client, parts.blocks, parts.threads, parts.bandwidth)
        self._ring = ring
        self._filled = Ring(0, (), ())  # the ring for which filling is running or done
        self._whole = ring  # the last ring for which all blocks were moved
        self._seen: set[str] = set()  # snapshots done for that ring
        self._searched: set[str] = set()  # snapshots for which lost blocks have been searched
        self._cut_short: set[str] = set()  # snapshots that did not fit completely
        self._told = 0.0  # loop time of the last report
        self._news = asyncio.Event()
        self._news.set()  # initially, to find what is missing

    def follow(self, ring: Ring) -> None:
        """Note the current members."""
        if ring.ids != self._ring.ids:
            self._news.set()
        self._ring = ring

    def is_filling(self, snapshot: str) -> bool:
        """Return whether other nodes may have blocks of the snapshot that this one lost, or that were fetched while it
        was away."""
        return snapshot not in self._searched

    @property
    def got(self) -> int:
        """Blocks fetched by filling since the daemon started."""
        return self._pulling.blocks

    async def run(self) -> None:
        """Fill after each change, as long as the daemon runs."""
        while True:
            await self._until_work()
            if self._ring.ids != self._filled.ids:
                self._news.clear()
                await asyncio.sleep(SETTLED)
                if self._news.is_set():
                    continue
                self._filled, self._seen = self._ring, set()
                await self._until_known()
            self._news.clear()
            try:
                if await self._fill(self._whole, self._filled):
                    self._whole = self._filled
            except Exception:
                log.exception("filling up from other nodes has failed; what is missing comes when it is read")
                self._seen = {one.id for one in self._parts.snapshots()}
            self.blocks = self.bytes = 0
            self._tell()

    async def _until_work(self) -> None:
        """Wait until the ring changes, or a new snapshot appears."""
        while not self._news.is_set():
            known = {one.id for one in self._parts.snapshots()}
            self._seen &= known
            if known - self._seen:
                return
            try:
                async with asyncio.timeout(LOOK):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _until_known(self) -> None:
        """Wait until no snapshot is on its way from another node, for at most PENDING_SECONDS."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PENDING_SECONDS
        while self._parts.pending() and loop.time() < until and not self._news.is_set():  # noqa: ASYNC110 - no event
            await asyncio.sleep(SETTLED / 10)

    def _tell(self) -> None:
        self._told = asyncio.get_running_loop().time()
        facts = FillingFacts(ring_digest(self._filled.ids), self.blocks, self.bytes)
        self._parts.shared.publish(FILLING, FILLING_NAME, facts)

    async def _fill(self, whole: Ring, now: Ring) -> bool:
        """Fetch missing blocks. whole: the last ring for which all blocks were moved. Returns False if the ring changes
        before the end."""
        parts = self._parts
        change = Change(whole, now, parts.membership.view.me, parts.replicas)
        new = [one for one in parts.snapshots() if one.id not in self._seen]
        lost = [one for one in new if one.id not in self._searched]
        self._cut_short &= {one.id for one in parts.snapshots()}
        if change.me in now.ids:
            moved = [one for one in new if await self._count(one, change)]
            self._tell()
            if self.blocks:
                what = f"{self.blocks:,} blocks ({format_size(self.bytes)})"
                log.info("filling up with %s that other nodes have kept until now", what)
            # Moved blocks come first: a draining node waits for them.
            if not (
                await self._fill_all(moved, change, moved=True) and await self._fill_all(lost, change, moved=False)
            ):
                return False
            known = {one.id for one in parts.snapshots()}
            self._searched = known & (self._searched | ({one.id for one in lost} - self._cut_short))
        self._seen |= {one.id for one in new}
        return True

    async def _count(self, snapshot: Snapshot, change: Change) -> bool:
        """Count the blocks of a snapshot to move here, and return whether there are any."""
        lacks = await self._look(snapshot, change, moved=True)
        if lacks is not None:
            self.blocks, self.bytes = self.blocks + len(lacks.ids), self.bytes + lacks.size
        return lacks is not None

    async def _fill_all(self, snapshots: Sequence[Snapshot], change: Change, *, moved: bool) -> bool:
        """Pull the missing blocks of the snapshots. Returns False if the ring changes before the end."""
        got = 0
        for snapshot in snapshots:
            lacks = await self._look(snapshot, change, moved=moved)
            if self._news.is_set():
                return False
            if lacks is not None:
                got += await self._pulling.pull(lacks, self._moved if moved else partial(self._has_room, snapshot.id))
        if got:
            log.info("filled up with %d blocks of other nodes", got)
        return not self._news.is_set()

    async def _look(self, snapshot: Snapshot, change: Change, *, moved: bool) -> Lacks | None:
        try:
            return await self._lacking.of(snapshot, self._parts.cooperating(snapshot.id), change, moved=moved)
        except CachefsError as error:
            log.warning("nothing of snapshot %s is got ahead from other nodes: %s", snapshot.id, error)
            return None

    def _moved(self, blocks: int, size: int) -> bool:
        """Subtract handled blocks, and return whether to go on."""
        self.blocks, self.bytes = max(0, self.blocks - blocks), max(0, self.bytes - size)
        if asyncio.get_running_loop().time() - self._told >= TOLD:
            self._tell()
        return not self._news.is_set()

    def _has_room(self, snapshot: str, blocks: int, size: int) -> bool:
        """Return whether to go on with blocks that were this node's before: none is evicted for them."""
        if self._parts.free() <= size:
            self._cut_short.add(snapshot)
            return False
        return not self._news.is_set()
