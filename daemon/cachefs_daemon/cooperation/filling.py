"""Getting from other nodes what is this node's to keep, since other members count for placement.

A node that joins fills up by this, and a node that drains is emptied: it pushes nothing, those who take over its blocks
pull them. What is read next comes first. Nothing comes from an origin: what nobody has comes when it is read, or as a
job's plan says.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.messages import BlockRef
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.cluster.homes import NOBODY, Homes, Nodes
from cachefs.planning.cluster.rendezvous import space_hashes
from cachefs.planning.cluster.standing import Standing
from cachefs.planning.sequences.plan import Plan
from cachefs.sizes import format_size
from cachefs.snapshot import Snapshot
from cachefs_daemon.cluster.membership import Membership
from cachefs_daemon.cluster.view import NodeRecord
from cachefs_daemon.cooperation.holders import Ring
from cachefs_daemon.cooperation.shared_snapshot import SharedSnapshot
from cachefs_daemon.peers.answers import How, PeerAnswer, PeerBlock, Wanted
from cachefs_daemon.peers.client import PeerClient
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.sharing.sections import FILLING, FILLING_NAME, FillingFacts
from cachefs_daemon.sharing.state import SharedState
from cachefs_daemon.store.block_store import BlockStore, Put

log = logging.getLogger(__name__)

# Seconds for which the members stay the same before anything is moved: those that join or leave together count as one
# change, and shared snapshots have followed it.
SETTLED: Final = 1.0
# Seconds within which they have followed it, mostly: it takes some 0.5 s per million blocks.
FOLLOW_SECONDS: Final = 20.0
# Blocks that are asked for at once, and their bytes.
BATCH: Final = 64
BATCH_BYTES: Final = 16 << 20
# Seconds between two times that all others are told how much is missing still.
TOLD: Final = 1.0
# Seconds within which a batch has to come; what has not is not asked for again.
BATCH_SECONDS: Final = 20.0


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
    # The snapshots of this node's datasets, and what is known of one that jobs read.
    snapshots: Callable[[], Iterable[Snapshot]]
    cooperating: Callable[[str], SharedSnapshot | None]
    replicas: int
    # Bytes per second.
    bandwidth: int


@dataclass(frozen=True, slots=True, eq=False)
class _Missing:
    """Blocks of one snapshot that are this node's to keep and are not here, those that are read next first."""

    space: BlockSpace
    # Their numbers: shape (n,), int32.
    ids: npt.NDArray[np.int32]
    # Who has held each of them: shape (n,), uint16, places in *nodes*.
    sources: Nodes
    # Ids.
    nodes: tuple[str, ...]

    @property
    def size(self) -> int:
        return int(self.space.sizes[self.ids].sum(dtype=np.int64))


class Filling:
    """Used on the event loop."""

    def __init__(self, parts: FillingParts, ring: Ring) -> None:
        """ring: the members that count now."""
        self.blocks = 0  # to be had
        self.bytes = 0
        self._parts = parts
        self._ring = self._filled = ring
        self._whole = ring  # the last ring of which all was moved
        self._news = asyncio.Event()

    def follow(self, ring: Ring) -> None:
        """These count for placement now."""
        if ring.ids != self._ring.ids:
            self._news.set()
        self._ring = ring

    async def run(self) -> None:
        """Runs as long as the daemon."""
        while True:
            self._tell()
            await self._news.wait()
            self._news.clear()
            await asyncio.sleep(SETTLED)
            if self._news.is_set():
                continue
            before, self._filled = self._filled, self._ring
            is_whole = True
            try:
                is_whole = await self._fill(self._whole, before, self._filled)
            except Exception:
                log.exception("filling up from other nodes has failed; what is missing comes when it is read")
            if is_whole:
                self._whole = self._filled
            self.blocks = self.bytes = 0

    def _tell(self) -> None:
        facts = FillingFacts(ring_digest(self._filled.ids), self.blocks, self.bytes)
        self._parts.shared.publish(FILLING, FILLING_NAME, facts)

    async def _fill(self, whole: Ring, before: Ring, now: Ring) -> bool:
        """whole: of which all was moved last; before: the last one, of which only some may have been. False where
        others count before it is done."""
        me = self._parts.membership.view.me
        if me not in now.ids or not before.ids:
            return True
        found = []
        for snapshot in self._parts.snapshots():
            missing = await self._missing(snapshot, whole, before, now)
            if missing is not None and len(missing.ids):
                found.append(missing)
        self.blocks, self.bytes = sum(len(one.ids) for one in found), sum(one.size for one in found)
        self._tell()
        if not self.blocks:
            return True
        log.info("filling up with %d blocks (%s) that other nodes have held", self.blocks, format_size(self.bytes))
        got = 0
        for missing in found:
            got += await self._fill_one(missing)
            if self._news.is_set():
                return False
        log.info("filled up with %d blocks; of what nobody had, nothing is missed before it is read", got)
        return True

    # --- what is missing ----------------------------------------------------------------------------------------------

    async def _missing(self, snapshot: Snapshot, whole: Ring, before: Ring, now: Ring) -> _Missing | None:
        parts, me = self._parts, self._parts.membership.view.me
        one = parts.cooperating(snapshot.id)
        if one is not None and one.space is not None and one.holders is not None:
            await self._followed(one)
            former, mine = one.holders.former, parts.standing.mine.get(snapshot.id)
            if former is None or mine is None or former.ids != before.ids:
                return None
            space, held, nodes = one.space, former.holders, former.ids
            ids = await parts.threads.planning(_newly_mine, mine, held, nodes, me)
        else:
            space = await parts.threads.planning(BlockSpace.of, snapshot)
            ids, held = await parts.threads.planning(_moved, space, whole, now, me, parts.replicas)
            nodes = whole.ids
        ids = ids[await parts.threads.background(self._are_absent, space, ids)]
        if snapshot.id in parts.plan.spaces:
            seconds = await parts.threads.planning(parts.plan.next_use_of, snapshot.id, ids)
            ids = ids[np.argsort(seconds, kind="stable")]
        return _Missing(space, ids.astype(np.int32), held[ids], nodes)

    async def _followed(self, one: SharedSnapshot) -> None:
        """Until it has followed the change of the ring, or for some seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + FOLLOW_SECONDS
        while not one.is_up_to_date and loop.time() < until:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(SETTLED / 10)

    def _are_absent(self, space: BlockSpace, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        absent = np.zeros(len(ids), np.bool_)
        for start in range(0, len(ids), BATCH * 16):
            part = space.keys(ids[start : start + BATCH * 16])
            absent[start : start + len(part)] = [self._parts.blocks.get(key) is None for key in part]
        return absent

    # --- getting it ---------------------------------------------------------------------------------------------------

    async def _fill_one(self, missing: _Missing) -> int:
        """How many blocks have come."""
        loop, got, start = asyncio.get_running_loop(), 0, 0
        told = loop.time()
        while start < len(missing.ids) and not self._news.is_set():
            end = start + 1
            size = int(missing.space.sizes[missing.ids[start]])
            while end < len(missing.ids) and end - start < BATCH:
                size += int(missing.space.sizes[missing.ids[end]])
                if size > BATCH_BYTES:
                    break
                end += 1
            began = loop.time()
            got += await self._batch(missing, start, end)
            done = missing.space.sizes[missing.ids[start:end]]
            self.blocks, self.bytes = self.blocks - len(done), self.bytes - int(done.sum(dtype=np.int64))
            if loop.time() - told >= TOLD:
                told = loop.time()
                self._tell()
            await asyncio.sleep(max(0.0, began + int(done.sum(dtype=np.int64)) / self._parts.bandwidth - loop.time()))
            start = end
        return got

    async def _batch(self, missing: _Missing, start: int, end: int) -> int:
        parts, space, ids = self._parts, missing.space, missing.ids[start:end]
        keys, (entries, numbers) = space.keys(ids), space.refs(ids)
        until = asyncio.get_running_loop().time() + BATCH_SECONDS
        waiting: list[asyncio.Future[PeerAnswer]] = []
        wanted: list[Wanted] = []
        for place, key in enumerate(keys):
            node = self._source(missing, start + place)
            if node is None or parts.blocks.get(key) is not None:
                continue  # a reader has brought it, or its holder is gone
            ref = BlockRef(space.snapshot, int(entries[place]), int(numbers[place]))
            wanted.append(Wanted(ref, key, int(space.sizes[ids[place]])))
            future: asyncio.Future[PeerAnswer] = asyncio.get_running_loop().create_future()
            waiting.append(future)
            parts.client.ask(node, wanted[-1], How(until, ahead=True), _settling(future))
        answers = await asyncio.gather(*waiting)
        puts = [
            Put(one.key, answer.data, False, space.snapshot, answer.checksums)
            for one, answer in zip(wanted, answers, strict=True)
            if isinstance(answer, PeerBlock)
        ]
        if puts:
            await parts.threads.ahead(parts.blocks.put_many, puts)
        return len(puts)

    def _source(self, missing: _Missing, place: int) -> NodeRecord | None:
        number = int(missing.sources[place])
        if number >= len(missing.nodes):
            return None
        node = self._parts.membership.view.get(missing.nodes[number])
        usable = node is not None and node.state != "away" and self._parts.client.usable(node.id)
        return node if usable else None


def ring_digest(ids: Sequence[str]) -> str:
    """By which nodes see that they mean the same members: 32 hex digits."""
    return hashlib.blake2b(" ".join(ids).encode(), digest_size=16).hexdigest()


def _settling(future: "asyncio.Future[PeerAnswer]") -> Callable[[PeerAnswer], None]:
    def settle(answer: PeerAnswer) -> None:
        if not future.done():
            future.set_result(answer)

    return settle


def _newly_mine(mine: npt.NDArray[np.bool_], held: Nodes, nodes: tuple[str, ...], me: str) -> npt.NDArray[np.intp]:
    before = nodes.index(me) if me in nodes else NOBODY
    return np.flatnonzero(mine & (held != before) & (held != NOBODY))


def _moved(space: BlockSpace, before: Ring, now: Ring, me: str, replicas: int) -> tuple[npt.NDArray[np.intp], Nodes]:
    """The blocks whose home is on this node now and was not before, and the homes of all before."""
    homes = Homes(space_hashes(space), replicas)
    homes.set_members(before.members)
    first, was = homes.first, before.ids.index(me) if me in before.ids else NOBODY
    had = (first == was) | (homes.second == was) if was != NOBODY else np.zeros(len(first), np.bool_)
    homes.set_members(now.members)
    has = (homes.first == now.ids.index(me)) | (homes.second == now.ids.index(me))
    return np.flatnonzero(has & ~had), first
