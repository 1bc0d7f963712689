"""Getting from other nodes what is this node's to keep and is not here.

A node that joins or comes back fills up by this, and a node that drains is emptied: it pushes nothing, those who take
over its blocks pull them. What is read next comes first. Nothing comes from an origin: what nobody has comes when it is
read, or as a job's plan says.
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

# Seconds for which the members stay the same before anything is moved: those that join or leave together count as one
# change, and shared snapshots have followed it.
SETTLED: Final = 1.0
# Seconds between two looks for snapshots that have come meanwhile.
LOOK: Final = 2.0
# Seconds for which it is waited for snapshots that are on their way from other nodes.
PENDING_SECONDS: Final = 30.0
# Seconds between two times that all others are told how much is missing still.
TOLD: Final = 1.0


@dataclass(frozen=True, slots=True)
class FillingParts:
    """The parts of the node that it works with."""

    membership: Membership
    shared: SharedState
    client: PeerClient
    blocks: BlockStore
    plan: Plan
    standing: Standing
    threads: Threads
    # The snapshots of this node's datasets, and whether some are on their way from other nodes.
    snapshots: Callable[[], Iterable[Snapshot]]
    pending: Callable[[], bool]
    # What is known of a snapshot that jobs read.
    cooperating: Callable[[str], SharedSnapshot | None]
    # Bytes of the tiers that nothing takes.
    free: Callable[[], int]
    replicas: int
    # Bytes per second.
    bandwidth: int


class Filling:
    """Used on the event loop.

    One snapshot is looked at at a time, as its block space may take as much memory as all else that a node knows.
    """

    def __init__(self, parts: FillingParts, ring: Ring) -> None:
        """ring: the members that count now."""
        self.blocks = 0  # to be had since other members count
        self.bytes = 0
        self._parts = parts
        self._lacking = Lacking(parts.plan, parts.standing, parts.blocks, parts.threads)
        self._pulling = Pulling(parts.membership, parts.client, parts.blocks, parts.threads, parts.bandwidth)
        self._ring = ring
        self._filled = Ring(0, (), ())  # the ring for which it fills up, or has
        self._whole = ring  # the last ring of which all was moved
        self._seen: set[str] = set()  # snapshots of which all was moved for that ring
        self._searched: set[str] = set()  # those of which what this node has lost was looked for
        self._cut_short: set[str] = set()  # those of which not all had room
        self._told = 0.0  # loop time
        self._news = asyncio.Event()
        self._news.set()  # what is missing as it begins

    def follow(self, ring: Ring) -> None:
        """These count for placement now."""
        if ring.ids != self._ring.ids:
            self._news.set()
        self._ring = ring

    def is_filling(self, snapshot: str) -> bool:
        """May other nodes have blocks of it that this one has lost, or that were brought while it was away?"""
        return snapshot not in self._searched

    async def run(self) -> None:
        """Runs as long as the daemon."""
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
        """Until other members count, or there is a snapshot that was not looked at."""
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
        """Until no snapshot is on its way from another node, which this one may have to fill up: for a while."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PENDING_SECONDS
        while self._parts.pending() and loop.time() < until and not self._news.is_set():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(SETTLED / 10)

    def _tell(self) -> None:
        self._told = asyncio.get_running_loop().time()
        facts = FillingFacts(ring_digest(self._filled.ids), self.blocks, self.bytes)
        self._parts.shared.publish(FILLING, FILLING_NAME, facts)

    async def _fill(self, whole: Ring, now: Ring) -> bool:
        """whole: of which all was moved last. False where others count before it is done."""
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
            # What has moved comes first: a node that drains waits for it.
            if not (
                await self._fill_all(moved, change, moved=True) and await self._fill_all(lost, change, moved=False)
            ):
                return False
            known = {one.id for one in parts.snapshots()}
            self._searched = known & (self._searched | ({one.id for one in lost} - self._cut_short))
        self._seen |= {one.id for one in new}
        return True

    async def _count(self, snapshot: Snapshot, change: Change) -> bool:
        """Is anything of it to be moved here?"""
        lacks = await self._look(snapshot, change, moved=True)
        if lacks is not None:
            self.blocks, self.bytes = self.blocks + len(lacks.ids), self.bytes + lacks.size
        return lacks is not None

    async def _fill_all(self, snapshots: Sequence[Snapshot], change: Change, *, moved: bool) -> bool:
        """False where others count before it is done."""
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
        """So much was asked for. Is it to go on?"""
        self.blocks, self.bytes = max(0, self.blocks - blocks), max(0, self.bytes - size)
        if asyncio.get_running_loop().time() - self._told >= TOLD:
            self._tell()
        return not self._news.is_set()

    def _has_room(self, snapshot: str, blocks: int, size: int) -> bool:
        """The same of what was this node's before: for that nothing is evicted."""
        if self._parts.free() <= size:
            self._cut_short.add(snapshot)
            return False
        return not self._news.is_set()
