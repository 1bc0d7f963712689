"""Shows which parts of a dataset are on this node, for datasets that a browser requests."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Final

from cachefs.errors import CachefsError
from cachefs.planning.blocks.presence import IN_MEMORY, IN_SSD, SHARDS
from cachefs.snapshot import Snapshot
from cachefs_daemon.node import Node

log = logging.getLogger(__name__)

# The web page's name in Residency.
RESIDENCY_CLIENT: Final = "web"
# Most datasets at once, and most files of all of these that no job reads: 75 MB. Of more, the latest ones stay.
MAX_MAPS: Final = 4
MAX_FILES: Final = 1 << 21
# Seconds after the last request until a dataset is dropped; least seconds between two counts; most seconds that a
# response waits for one.
FORGET_SECONDS: Final = 60.0
MIN_PAUSE: Final = 1.0
WAIT_SECONDS: Final = 3.0
# Pause after a count, as a multiple of its duration.
PAUSE_FACTOR: Final = 4


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The parts of one snapshot."""

    # Reasons for an empty map: the snapshot has too many files, and no job reads it; it is being counted.
    is_too_large: bool = False
    is_counting: bool = False
    # Bytes in each tier.
    memory: int = 0
    ssd: int = 0
    # Of each shard the part that is in the tier, 0 to 255; empty where nothing is on the node. A snapshot with fewer
    # blocks than shards has some blocks in several of them.
    in_memory: list[int] = field(default_factory=list)
    in_ssd: list[int] = field(default_factory=list)
    # Blocks of the snapshot; 0: unknown, as nothing is here.
    blocks: int = 0


EMPTY_MAP: Final = ShardMap()
TOO_LARGE: Final = ShardMap(is_too_large=True)
COUNTING: Final = ShardMap(is_counting=True)


class ShardMaps:
    """Makes shard maps of datasets that a browser requests. Used on the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._requested: dict[str, tuple[Snapshot, float]] = {}  # by id, with the time of the last request; latest last
        self._counted: set[str] = set()  # ids of the snapshots of the last count
        self._count_task: asyncio.Task[None] | None = None  # the one in progress
        # Monotonic seconds: of the earliest next count; of the earliest one of snapshots that are counted already.
        self._next_allowed = self._next_regular = 0.0

    async def map_of(self, snapshot: Snapshot) -> ShardMap:
        """Return the map, which is at most some seconds old."""
        if not self._note_request(snapshot):
            return TOO_LARGE
        for _ in range(2):  # a count in progress may be of others
            pause = self._next_allowed - time.monotonic()
            if snapshot.id not in self._counted and 0 < pause < WAIT_SECONDS:
                await asyncio.sleep(pause)
            self._start_count_if_due()
            if self._count_task is not None:
                await asyncio.wait({self._count_task}, timeout=WAIT_SECONDS)
            if snapshot.id in self._counted:
                return self._make_map(snapshot.id)
        return COUNTING

    def _note_request(self, snapshot: Snapshot) -> bool:
        """Record a request. Return False where the snapshot has too many files."""
        if self._files(snapshot) > MAX_FILES:
            return False
        self._requested.pop(snapshot.id, None)
        self._requested[snapshot.id] = snapshot, time.monotonic()
        while (
            len(self._requested) > MAX_MAPS or sum(self._files(one) for one, _ in self._requested.values()) > MAX_FILES
        ):
            del self._requested[next(iter(self._requested))]
        return True

    def _files(self, snapshot: Snapshot) -> int:
        """Return the files that take memory: the blocks of a snapshot that a job reads are in the plan already."""
        return 0 if snapshot.id in self._node.storage.planning.plan.spaces else snapshot.files

    def _start_count_if_due(self) -> None:
        is_behind = not self._counted.issuperset(self._requested)
        if self._count_task is None and time.monotonic() >= (self._next_allowed if is_behind else self._next_regular):
            self._count_task = asyncio.create_task(self._count_blocks())

    async def _count_blocks(self) -> None:
        began = time.monotonic()
        wanted = {one: snapshot for one, (snapshot, _) in reversed(self._requested.items())}
        try:
            await self._node.threads.background(self._node.residency.count_changes, RESIDENCY_CLIENT, wanted)
            self._counted = set(wanted)
        except CachefsError as error:
            log.warning("the blocks of datasets on this node are not counted: %s", error)
        except Exception:
            log.exception("the blocks of datasets on this node are not counted")
        finally:
            ended = time.monotonic()
            self._next_allowed = ended + PAUSE_FACTOR * (ended - began)
            self._next_regular = max(self._next_allowed, ended + MIN_PAUSE)
            self._count_task = None

    def forget_unseen(self) -> None:
        """Drop snapshots that no browser requests any more. Call every few seconds."""
        now = time.monotonic()
        is_seen = any(now - looked < FORGET_SECONDS for _, looked in self._requested.values())
        if not self._requested or is_seen or self._count_task is not None:
            return
        self._requested.clear()
        self._counted.clear()
        self._count_task = asyncio.create_task(self._forget())

    async def _forget(self) -> None:
        try:
            await self._node.threads.background(self._node.residency.forget, RESIDENCY_CLIENT)
        finally:
            self._count_task = None

    def close(self) -> None:
        if self._count_task is not None:
            self._count_task.cancel()

    def _make_map(self, snapshot: str) -> ShardMap:
        counted = self._node.residency.counts_of(snapshot)
        if counted is None:
            return TOO_LARGE if self._node.residency.is_too_large(snapshot) else EMPTY_MAP
        _, memory, ssd = counted.bytes.sum(axis=1).tolist()
        return ShardMap(
            memory=memory,
            ssd=ssd,
            in_memory=counted.shard_parts_in(IN_MEMORY).tolist(),
            in_ssd=counted.shard_parts_in(IN_SSD).tolist(),
            blocks=counted.space.count,
        )


assert SHARDS == 256, "page.js draws as many"
