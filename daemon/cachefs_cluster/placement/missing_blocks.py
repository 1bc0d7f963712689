"""Finds the blocks of a snapshot that this node keeps and lacks, or keeps second copies of, and the nodes that may have
them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.presence import ABSENT, Presence
from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.cluster.copies import missing_second_copies, second_copy_room
from cachefs.planning.cluster.homes import NO_NODE, NodeCandidates, blocks_at_home, candidate_nodes
from cachefs.planning.cluster.ownership import OwnedMarks, Ownership
from cachefs.planning.cluster.rendezvous import space_hashes
from cachefs.planning.sequences.plan import Plan
from cachefs.snapshot import Snapshot
from cachefs_cluster.placement.holders import FormerHolders, PlacementRing, block_spans
from cachefs_cluster.placement.shared_snapshot import SharedSnapshot
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

# Seconds within which shared snapshots usually follow a change of the ring: some 0.5 s per million blocks. And seconds
# between two checks.
FOLLOW_SECONDS: Final = 20.0
_CHECK_SECONDS: Final = 0.1
# Blocks looked up in the index at once.
_LOOKED_UP_AT_ONCE: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class MissingBlocks:
    """Missing blocks of one snapshot, ordered by next use."""

    space: BlockSpace
    # Block numbers: shape (n,), int32.
    ids: Ids
    # Possible holders, most likely first: each of shape (n,).
    holder_candidates: Sequence[NodeCandidates]

    @property
    def size(self) -> int:
        """Total bytes."""
        return int(self.space.sizes[self.ids].sum(dtype=np.int64))

    def possible_holders(self, index: int, me: str) -> list[str]:
        """Return the ids of the other nodes that may have a block, most likely first."""
        numbers = ((candidate.ids, int(candidate.nodes[index])) for candidate in self.holder_candidates)
        return list(dict.fromkeys(ids[number] for ids, number in numbers if number < len(ids) and ids[number] != me))


@dataclass(frozen=True, slots=True)
class RingChange:
    """A change of the members that count for placement."""

    # The members before and now.
    before: PlacementRing
    now: PlacementRing
    # Id of this node, and most copies of each block in the cluster.
    me: str
    replicas: int


class MissingBlockSearch:
    """Computes missing blocks. Used on the event loop; computes in threads."""

    def __init__(
        self, plan: Plan, standing: Ownership, presence: Presence, blocks: BlockStore, threads: Threads
    ) -> None:
        self._plan = plan
        self._standing = standing
        self._presence = presence
        self._blocks = blocks
        self._threads = threads

    async def find_missing(
        self, snapshot: Snapshot, shared: SharedSnapshot | None, change: RingChange, *, moved: bool
    ) -> MissingBlocks | None:
        """Return the missing blocks of a snapshot; None if there are none. shared: if jobs read it. moved: blocks that
        another node kept until the change; otherwise blocks that this node kept before too, and has lost, or that no
        node has yet. Raises CachefsError."""
        planning = self._threads.planning
        former: FormerHolders | None = None
        mine: OwnedMarks | None = None
        is_coordinated = False
        if shared is not None and shared.space is not None and shared.holders is not None:
            await _wait_until_followed(shared)
            former, mine = shared.holders.former, self._standing.owned.get(snapshot.id)
            space, is_coordinated = shared.space, bool(shared.leader)
        else:
            known = self._plan.spaces.get(snapshot.id)
            space = known if known is not None else await planning(BlockSpace.of, snapshot)
        if is_coordinated and not moved:
            return None  # fetched as planned by the job
        ids = await planning(_kept_blocks, space, mine, change)
        is_moved = await planning(_are_moved, space, ids, change, former, is_coordinated)
        ids = ids[is_moved == moved]
        ids = ids[await self._threads.background(self._are_absent, space, ids)]
        if not len(ids):
            return None
        if snapshot.id in self._plan.spaces:
            seconds = await planning(self._plan.next_use_of, snapshot.id, ids)
            ids = ids[np.argsort(seconds, kind="stable")]
        return MissingBlocks(space, ids, await planning(_holder_candidates, space, ids, change, former))

    async def find_second_copies(self, shared: SharedSnapshot, free: int) -> MissingBlocks | None:
        """Return the second copies that this node lacks and has room for; None if there are none. free: bytes free in
        the tiers."""
        space, marks = shared.space, self._standing.second_copies.get(shared.snapshot)
        if not shared.has_readers or not shared.is_up_to_date or space is None or marks is None:
            return None
        owned, states = self._standing.owned.get(shared.snapshot), self._presence.states.get(shared.snapshot)
        if owned is None or states is None:
            return None
        planning = self._threads.planning
        room = free + await planning(self._room_of_copies)
        spans = await planning(block_spans, space.sizes)
        ids = await planning(missing_second_copies, marks & ~owned, states != ABSENT, spans, room)
        return MissingBlocks(space, ids, shared.nodes_with(ids)) if len(ids) else None

    def _room_of_copies(self) -> int:
        """Return the bytes that all snapshots together leave for second copies, beside what is free."""
        room = 0
        for snapshot, owned in self._standing.owned.items():
            space, states = self._plan.spaces.get(snapshot), self._presence.states.get(snapshot)
            if space is not None and states is not None and len(states) == len(owned) == space.count:
                soon = self._plan.next_use_of(snapshot, np.arange(space.count)) <= self._standing.copy_window
                second = self._standing.second_copies.get(snapshot)
                room += second_copy_room(owned, second, states != ABSENT, soon, block_spans(space.sizes))
        return room

    def _are_absent(self, space: BlockSpace, ids: Ids) -> npt.NDArray[np.bool_]:
        absent = np.zeros(len(ids), np.bool_)
        for start in range(0, len(ids), _LOOKED_UP_AT_ONCE):
            part = space.keys(ids[start : start + _LOOKED_UP_AT_ONCE])
            absent[start : start + len(part)] = [self._blocks.get(key) is None for key in part]
        return absent


async def _wait_until_followed(shared: SharedSnapshot) -> None:
    """Wait until the shared snapshot has followed the change of the ring, for at most FOLLOW_SECONDS."""
    loop = asyncio.get_running_loop()
    until = loop.time() + FOLLOW_SECONDS
    while not shared.is_up_to_date and loop.time() < until:  # noqa: ASYNC110 - no event
        await asyncio.sleep(_CHECK_SECONDS)


def _kept_blocks(space: BlockSpace, mine: OwnedMarks | None, change: RingChange) -> Ids:
    """Return the blocks that this node keeps. mine: as decided by jobs; None: by homes alone."""
    if mine is None:
        mine = blocks_at_home(space_hashes(space), change.now.members, change.me)
    return np.flatnonzero(mine).astype(np.int32)


def _are_moved(
    space: BlockSpace, ids: Ids, change: RingChange, former: FormerHolders | None, is_coordinated: bool
) -> npt.NDArray[np.bool_]:
    """Return which of these blocks another node kept before the change: shape (n,), bool. If copies are coordinated,
    only the former holders tell."""
    moved = np.zeros(len(ids), np.bool_)
    if change.before.members and not is_coordinated:
        moved = ~blocks_at_home(space_hashes(space)[ids], change.before.members, change.me)
    if former is not None:
        former_nodes = NodeCandidates(former.ids, former.holders[ids])
        moved |= ~former_nodes.are_among({change.me}) & (former_nodes.nodes != NO_NODE)
    return moved


def _holder_candidates(
    space: BlockSpace, ids: Ids, change: RingChange, former: FormerHolders | None
) -> list[NodeCandidates]:
    """Return the possible holders: former ones; homes before and now; and the homes without this node, which fetched
    the blocks while it was away."""
    without = [member for member in change.now.members if member.id != change.me]
    found = candidate_nodes(
        space_hashes(space)[ids], (change.before.members, change.now.members, without), change.replicas
    )
    if former is not None:
        nodes = (former.holders, *former.other_holders, *former.second_holders)
        found = [*(NodeCandidates(former.ids, one[ids]) for one in nodes), *found]
    return found
