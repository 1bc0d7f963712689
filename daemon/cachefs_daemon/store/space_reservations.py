"""Room for blocks that a fetch process writes: reserved before it begins, entered or given back when it has ended.

Room belongs to the process that writes into it until that process has reported the result, or has ended. Readers find a
block only after it was entered; a block whose daemon is killed before that is found at the next start.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cachefs.block import BlockLocation
from cachefs.planning.eviction.tiering import IncomingBlock, Tiering
from cachefs_daemon.runtime.locked import Locked
from cachefs_daemon.store.index_writer import IndexWriter
from cachefs_daemon.store.segment_writer import Record, span
from cachefs_daemon.store.tier import Tier
from cachefs_daemon.store.transfers import Transfers


@dataclass(frozen=True, slots=True)
class ExpectedBlock:
    """A block that will be written."""

    key: bytes
    # Bytes of the block.
    length: int
    # Id of the snapshot for which the block is fetched.
    snapshot: str


@dataclass(frozen=True, slots=True)
class ReservedSpace:
    """The room for one block."""

    key: bytes
    # Bytes of the block.
    length: int
    # Number of the tier, of the segment in it, and offset of the record in the segment.
    tier: int
    segment: int
    start: int
    # True where the block was counted for a dataset when the room was reserved.
    is_quota_counted: bool


@dataclass(frozen=True, slots=True)
class WritableSegment:
    """A segment into which blocks will be written."""

    tier: int
    number: int
    # Open for writing; the receiver closes it.
    descriptor: int
    # Whether each record must be an extent of its own.
    allocate: bool


class SpaceReservations:
    """Reserves room for writers in other processes. Thread-safe and blocking."""

    def __init__(
        self, tiers: Sequence[Tier], index: IndexWriter, tiering: Locked[Tiering], transfers: Transfers
    ) -> None:
        self._tiers = tiers
        self._index = index
        self._tiering = tiering
        self._transfers = transfers

    def reserve(self, blocks: Sequence[ExpectedBlock]) -> tuple[list[ReservedSpace | None], list[WritableSegment]]:
        """Reserve room for blocks, for which others are evicted. Return the rooms, and their segments. A room is None
        for a block that no tier takes, and for one that is on the node already."""
        rooms: list[ReservedSpace | None] = [None] * len(blocks)
        claimed: set[int] = set()
        try:
            self._find_space(blocks, rooms, claimed)
        except Exception:
            self.free_spaces([room for room in rooms if room is not None])
            self._settle_quotas([blocks[n].key for n in claimed if rooms[n] is None])
            raise
        return self._with_open_segments(rooms)

    def _find_space(
        self, blocks: Sequence[ExpectedBlock], rooms: list[ReservedSpace | None], claimed: set[int]
    ) -> None:
        """Fill *rooms*, and *claimed* with the numbers of the blocks that count for a dataset."""
        there = self._index.get_many([block.key for block in blocks])
        left = [number for number, location in enumerate(there) if location is None]
        now = time.monotonic()
        with self._tiering as tiering:
            claimed.update(n for n in left if tiering.quotas.expect_fetch(blocks[n].key, blocks[n].snapshot, now))
        for tier in self._tiers:
            incoming = [IncomingBlock(blocks[n].key, span(blocks[n].length)) for n in left]
            for n, allocated in zip(left, self._transfers.reserve(tier, incoming), strict=True):
                if allocated is not None:
                    rooms[n] = ReservedSpace(
                        blocks[n].key, blocks[n].length, tier.number, *allocated, is_quota_counted=n in claimed
                    )
            left = [n for n in left if rooms[n] is None]
        self._settle_quotas([blocks[n].key for n in left if n in claimed])
        claimed.difference_update(left)

    def publish_blocks(self, written: Sequence[tuple[ReservedSpace, bytes]]) -> list[BlockLocation]:
        """Make blocks that were written into their rooms visible to readers. Return their locations, which are others
        for blocks that arrived in another way meanwhile. With each room come the checksums of the block's pieces."""
        rooms = [room for room, _ in written]
        try:
            entered = self._transfers.publish(
                [(room.key, _location_of(room, checksums)) for room, checksums in written]
            )
        except Exception:
            # Blocks that readers may find, and those whose room may have been freed already, stay as they are.
            lost = {room.key for room in rooms if self._index.get(room.key) is None}
            kept = [room for room in rooms if room.key not in lost]
            self._end_writes(kept)
            self._settle_quotas([room.key for room in kept if room.is_quota_counted])
            self.free_spaces([room for room in rooms if room.key in lost])
            raise
        self._end_writes(rooms)
        self._settle_quotas([room.key for room in rooms if room.is_quota_counted])
        return entered

    def publish_and_reserve(
        self, written: Sequence[tuple[ReservedSpace, bytes]], blocks: Sequence[ExpectedBlock]
    ) -> tuple[list[BlockLocation], list[ReservedSpace | None], list[WritableSegment]]:
        """Call `publish_blocks` and `reserve`: handing a call to a thread and back costs as much as either."""
        entered = self.publish_blocks(written) if written else []
        return (entered, *(self.reserve(blocks) if blocks else ([], [])))

    def free_spaces(self, rooms: Sequence[ReservedSpace]) -> None:
        """Free room into which no process writes any more, whatever has been written there."""
        with self._tiering as tiering:
            for room in rooms:
                tiering.quotas.note_written(room.key)
        for tier in self._tiers:
            tier.free_unused(
                [(room.segment, room.start, span(room.length)) for room in rooms if room.tier == tier.number]
            )
        self._end_writes(rooms)
        self._settle_quotas([room.key for room in rooms if room.is_quota_counted])

    def _with_open_segments(
        self, rooms: list[ReservedSpace | None]
    ) -> tuple[list[ReservedSpace | None], list[WritableSegment]]:
        """Return the rooms whose segments can be opened, and those segments."""
        found: dict[tuple[int, int], WritableSegment | None] = {}
        for room in rooms:
            if room is not None and (room.tier, room.segment) not in found:
                found[room.tier, room.segment] = self._open_segment(room.tier, room.segment)
        shut = [room for room in rooms if room is not None and found[room.tier, room.segment] is None]
        if shut:
            self.free_spaces(shut)
        kept = [room if room is not None and found[room.tier, room.segment] is not None else None for room in rooms]
        return kept, [one for one in found.values() if one is not None]

    def _open_segment(self, tier: int, segment: int) -> WritableSegment | None:
        try:
            descriptor = self._tiers[tier].open_segment(segment)
        except OSError:
            return None
        return WritableSegment(tier, segment, descriptor, self._tiers[tier].extent_per_record)

    def _end_writes(self, rooms: Sequence[ReservedSpace]) -> None:
        for tier in self._tiers:
            tier.note_ended_writes([room.segment for room in rooms if room.tier == tier.number])

    def _settle_quotas(self, keys: Sequence[bytes]) -> None:
        """Settle the quotas for blocks that count for a dataset, after they have arrived or failed."""
        if keys:
            with self._tiering as tiering:
                for key, location in zip(keys, self._index.get_many(keys), strict=True):
                    tiering.quotas.end_expected_fetch(key, is_here=location is not None)


def _location_of(room: ReservedSpace, checksums: bytes) -> BlockLocation:
    return Record(room.key, room.start, room.length, checksums).location(room.tier, room.segment)


def close_segments(segments: Sequence[WritableSegment]) -> None:
    """Close the descriptors of these segments."""
    for segment in segments:
        os.close(segment.descriptor)
