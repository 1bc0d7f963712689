"""Which blocks of a snapshot are this node's to keep and are not here, and who may have them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.blocks.space import BlockSpace, Ids
from cachefs.planning.cluster.at_home import MayHave, at_home, may_have
from cachefs.planning.cluster.homes import NOBODY
from cachefs.planning.cluster.rendezvous import space_hashes
from cachefs.planning.cluster.standing import Mine, Standing
from cachefs.planning.sequences.plan import Plan
from cachefs.snapshot import Snapshot
from cachefs_daemon.cooperation.holders import Former, Ring
from cachefs_daemon.cooperation.shared_snapshot import SharedSnapshot
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.block_store import BlockStore

# Seconds within which shared snapshots have followed a change of the ring, mostly: it takes some 0.5 s per million
# blocks. And seconds between two looks.
FOLLOW_SECONDS: Final = 20.0
_LOOK: Final = 0.1
# Blocks that are looked for in the index in one go.
_LOOKED_UP: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Lacks:
    """Blocks of one snapshot, those that are read next first."""

    space: BlockSpace
    # Their numbers: shape (n,), int32.
    ids: Ids
    # Who may have them, most likely first: each of shape (n,).
    others: Sequence[MayHave]

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.space.sizes[self.ids].sum(dtype=np.int64))

    def whom(self, place: int, me: str) -> list[str]:
        """Ids of the other nodes that may have a block, most likely first."""
        numbers = ((one.ids, int(one.nodes[place])) for one in self.others)
        return list(dict.fromkeys(ids[number] for ids, number in numbers if number < len(ids) and ids[number] != me))


@dataclass(frozen=True, slots=True)
class Change:
    """Of who counts for placement."""

    # The members that counted, and that do.
    before: Ring
    now: Ring
    # Id of this node, and copies of each block that the cluster keeps.
    me: str
    replicas: int


class Lacking:
    """Used on the event loop; it computes in threads."""

    def __init__(self, plan: Plan, standing: Standing, blocks: BlockStore, threads: Threads) -> None:
        self._plan = plan
        self._standing = standing
        self._blocks = blocks
        self._threads = threads

    async def of(
        self, snapshot: Snapshot, shared: SharedSnapshot | None, change: Change, *, moved: bool
    ) -> Lacks | None:
        """What this node lacks of a snapshot; None: nothing. shared: what is known of it where jobs read it. moved:
        what another node was to keep until the change; else what this node was to keep before, too: it has lost that,
        or nobody has it yet. Raises CachefsError."""
        planning = self._threads.planning
        former: Former | None = None
        mine: Mine | None = None
        is_coordinated = False
        if shared is not None and shared.space is not None and shared.holders is not None:
            await _followed(shared)
            former, mine = shared.holders.former, self._standing.mine.get(snapshot.id)
            space, is_coordinated = shared.space, bool(shared.job)
        else:
            known = self._plan.spaces.get(snapshot.id)
            space = known if known is not None else await planning(BlockSpace.of, snapshot)
        if is_coordinated and not moved:
            return None  # it comes as the job's plan says
        ids = await planning(_own, space, mine, change)
        is_moved = await planning(_have_moved, space, ids, change, former, is_coordinated)
        ids = ids[is_moved == moved]
        ids = ids[await self._threads.background(self._are_absent, space, ids)]
        if not len(ids):
            return None
        if snapshot.id in self._plan.spaces:
            seconds = await planning(self._plan.next_use_of, snapshot.id, ids)
            ids = ids[np.argsort(seconds, kind="stable")]
        return Lacks(space, ids, await planning(_others, space, ids, change, former))

    def _are_absent(self, space: BlockSpace, ids: Ids) -> npt.NDArray[np.bool_]:
        absent = np.zeros(len(ids), np.bool_)
        for start in range(0, len(ids), _LOOKED_UP):
            part = space.keys(ids[start : start + _LOOKED_UP])
            absent[start : start + len(part)] = [self._blocks.get(key) is None for key in part]
        return absent


async def _followed(shared: SharedSnapshot) -> None:
    """Until it has followed the change of the ring, or for some seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + FOLLOW_SECONDS
    while not shared.is_up_to_date and loop.time() < until:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(_LOOK)


def _own(space: BlockSpace, mine: Mine | None, change: Change) -> Ids:
    """All that is this node's to keep. mine: as jobs have it; None: by homes alone."""
    if mine is None:
        mine = at_home(space_hashes(space), change.now.members, change.me, change.replicas)
    return np.flatnonzero(mine).astype(np.int32)


def _have_moved(
    space: BlockSpace, ids: Ids, change: Change, former: Former | None, is_coordinated: bool
) -> npt.NDArray[np.bool_]:
    """Which of these was another node's to keep before the change? Where copies go where they are read next, only who
    held each says so: shape (n,), bool."""
    moved = np.zeros(len(ids), np.bool_)
    if change.before.members and not is_coordinated:
        moved = ~at_home(space_hashes(space)[ids], change.before.members, change.me, change.replicas)
    if former is not None:
        held = MayHave(former.ids, former.holders[ids])
        moved |= ~held.among({change.me}) & (held.nodes != NOBODY)
    return moved


def _others(space: BlockSpace, ids: Ids, change: Change, former: Former | None) -> list[MayHave]:
    """Who has held them; their homes before and now; and whose they would be if this node were not there: those have
    brought them while it was away."""
    without = [one for one in change.now.members if one.id != change.me]
    found = may_have(space_hashes(space)[ids], (change.before.members, change.now.members, without), change.replicas)
    if former is not None:
        found = [*(MayHave(former.ids, nodes[ids]) for nodes in (former.holders, *former.besides)), *found]
    return found
