"""Which parts of a dataset are on this node, for those datasets that somebody looks at."""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from cachefs.planning.blocks.presence import IN_MEMORY, IN_SSD
from cachefs.planning.blocks.shard_bytes import SHARDS
from cachefs.snapshot import Snapshot
from cachefs_daemon.node import Node

# How Residency calls those who look.
LOOKERS: Final = "web"
# Datasets that are looked at at once: of more, those that nobody has looked at for longest are counted anew.
MOST_MAPS: Final = 4
# Seconds after which nobody looks any more, and between two counts, at least.
FORGOTTEN: Final = 60.0
LEAST_PAUSE: Final = 1.0
# A count may take one part in so many of the time.
PART_OF_TIME: Final = 10


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Of one snapshot."""

    # It has too many files to be followed; of what is not, the rest is empty.
    is_too_large: bool
    # Bytes in each tier.
    memory: int
    ssd: int
    # Of each shard the part that is in the tier, 0 to 255; empty where nothing is on the node. A snapshot with fewer
    # blocks than shards has some blocks in several of them.
    in_memory: list[int]
    in_ssd: list[int]
    # Blocks of the snapshot; 0: nobody knows, as nothing is here.
    blocks: int


NOTHING: Final = ShardMap(False, 0, 0, [], [], 0)
TOO_LARGE: Final = ShardMap(True, 0, 0, [], [], 0)


class ShardMaps:
    """Used on the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._looked: dict[str, tuple[Snapshot, float]] = {}  # by id, and when somebody looked; latest last
        self._counting = asyncio.Lock()
        self._next = 0.0  # monotonic seconds: no count before
        self._counted: set[str] = set()  # ids of the snapshots of the last count

    async def of(self, snapshot: Snapshot) -> ShardMap:
        """It is at most some seconds old."""
        self._looked.pop(snapshot.id, None)
        self._looked[snapshot.id] = snapshot, time.monotonic()
        while len(self._looked) > MOST_MAPS:
            del self._looked[next(iter(self._looked))]
        async with self._counting:
            if snapshot.id not in self._counted or time.monotonic() >= self._next:
                await self._count()
        return self._map(snapshot.id)

    async def forget_unseen(self) -> None:
        """To be called every few seconds: what nobody looks at is followed no more."""
        now = time.monotonic()
        if not self._looked or any(now - looked < FORGOTTEN for _, looked in self._looked.values()):
            return
        async with self._counting:
            self._looked.clear()
            self._counted.clear()
            await self._node.threads.background(self._node.residency.forget, LOOKERS)

    async def _count(self) -> None:
        began = time.monotonic()
        wanted = {one: snapshot for one, (snapshot, _) in reversed(self._looked.items())}
        await self._node.threads.background(self._node.residency.follow, LOOKERS, wanted)
        self._counted = set(wanted)
        took = time.monotonic() - began
        self._next = time.monotonic() + max(LEAST_PAUSE, PART_OF_TIME * took)

    def _map(self, snapshot: str) -> ShardMap:
        counted = self._node.residency.of(snapshot)
        if counted is None:
            return TOO_LARGE if self._node.residency.is_too_large(snapshot) else NOTHING
        _, memory, ssd = counted.bytes.sum(axis=1).tolist()
        return ShardMap(
            is_too_large=False,
            memory=memory,
            ssd=ssd,
            in_memory=counted.parts_in(IN_MEMORY).tolist(),
            in_ssd=counted.parts_in(IN_SSD).tolist(),
            blocks=counted.space.count,
        )


assert SHARDS == 256, "page.js draws 16 rows of 16"
