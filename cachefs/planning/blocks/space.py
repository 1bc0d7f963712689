"""Block numbers: the blocks of one snapshot counted 0, 1, 2, ..., so that plans can be arrays.

Blocks are numbered in order of entries and, within a file, of offsets. Keys turn into numbers and back for whole arrays
at a time. With 1.3 million files a space takes 47 MB, and 1.7 s of processor time to build. It turns 1,000 keys into
numbers, or numbers into keys, in 0.14 ms, and a single one in 2 us.

`Samples` maps a job's samples to block numbers, and orders of samples to orders of reads.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from cachefs.block import KEY_SIZE, block_key, block_number
from cachefs.errors import ConfigError

# Numbers of blocks.
Ids = npt.NDArray[np.int32]

Number = TypeVar("Number", np.int32, np.int64)

# Block numbers used as indices. With another type than numpy's own for indices, which is int64, each look-up takes 4
# times as long, and releases the interpreter lock.
Numbers = npt.NDArray[np.integer]

# Stands for the number of a block that the space does not have.
NO_BLOCK: Final = -1

# Most blocks of a space, and of all its samples. An array of so many numbers takes half a gigabyte.
MAX_BLOCKS: Final = 1 << 27

# Most remembered results of `find`, in all spaces together, in 1 MB: a block that comes, and one that is evicted for
# it, are looked up some 10 times within a moment, at 2.3 us each.
_MAX_RECENT_NUMBERS: Final = 4096

# Numbers that are written at once while other threads wait: 10 ms.
_RUN_PART: Final = 1 << 20
# Bytes, more than any file: larger offsets are behind the end.
_BEYOND: Final = 1 << 61

# A content id as two numbers, and the block number, as cachefs.block.block_key lays them out.
_KEY: Final = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", ">u4")])
_CONTENT: Final = np.dtype([("high", "<u8"), ("low", "<u8")])


_serials: Final = itertools.count()  # of spaces
_recent_numbers: Final[dict[tuple[int, bytes], int]] = {}  # recent results of `find`, by serial of the space and key


class SnapshotContents(Protocol):
    """The part of a snapshot that a space uses; cachefs.snapshot.Snapshot is one."""

    id: str
    block_size: int  # bytes
    directories: int  # without the root
    files: int

    def contents(self) -> Iterable[tuple[int, int, bytes]]:
        """Yield (number, size in bytes, content id of 16 bytes) of each entry that is a file."""


class BlockSpace:
    """The numbered blocks of one snapshot. Immutable, so any thread may use it."""

    def __init__(
        self, snapshot: str, block_size: int, file_sizes: npt.NDArray[np.int64], contents: npt.NDArray[np.void]
    ) -> None:
        """file_sizes: bytes per entry, 0 for a directory, shape (entries,), int64. contents: content ids of the entries
        (16 bytes each), shape (entries,), structured with fields `high` and `low` of type uint64.

        Raises ConfigError for more than MAX_BLOCKS blocks."""
        self.snapshot = snapshot  # its id
        self.block_size = block_size  # bytes
        counts = -(-file_sizes // block_size)
        if (total := int(counts.sum(dtype=np.float64))) > MAX_BLOCKS:
            raise ConfigError(
                f"snapshot {snapshot} has {total:,} blocks, more than the {MAX_BLOCKS:,} that can be planned; "
                "nothing is read ahead for its jobs. A larger daemon.block_size makes them fewer"
            )
        # Entry e has the blocks first_block[e] up to first_block[e + 1]: shape (entries + 1,), int32.
        self.first_block = np.zeros(len(file_sizes) + 1, np.int32)
        np.cumsum(counts, out=self.first_block[1:])
        self.count = int(self.first_block[-1])  # blocks
        self.bytes = int(file_sizes.sum())  # of all blocks
        # Bytes per block: shape (count,), uint32.
        self.sizes = np.full(self.count, block_size, np.uint32)
        has_blocks = counts > 0
        last = self.first_block[1:][has_blocks] - 1
        self.sizes[last] = file_sizes[has_blocks] - (counts[has_blocks] - 1) * block_size
        # Content ids of the entries, and the entries sorted by the first halves of the ids.
        self._high = contents["high"].copy()
        self._low = contents["low"].copy()
        self._order = np.argsort(self._high, kind="stable").astype(np.uint32)
        self._sorted_high = self._high[self._order]
        self._serial = next(_serials)  # identifies it in `_recent_numbers`
        # Views for single look-ups, where a call of numpy takes longer than the look-up.
        self._sorted_view, self._order_view = self._sorted_high.data, self._order.data
        self._first_view = self.first_block.data
        self._high_view, self._low_view = self._high.data, self._low.data

    @classmethod
    def of(cls, snapshot: SnapshotContents) -> "BlockSpace":
        """Build the space of a snapshot. Reads it whole, so call it in a thread. Raises SnapshotDamaged."""
        entries = 1 + snapshot.directories + snapshot.files
        sizes = np.zeros(entries, np.int64)
        contents = np.zeros(entries, _CONTENT)
        raw = memoryview(contents.view(np.uint8).data)
        for number, size, content in snapshot.contents():
            sizes[number] = size
            raw[16 * number : 16 * number + 16] = content
        return cls(snapshot.id, snapshot.block_size, sizes, contents)

    def ids(self, keys: Sequence[bytes]) -> Ids:
        """Return the number of each block key, NO_BLOCK for keys of other snapshots: shape (keys,), int32."""
        parts = np.frombuffer(b"".join(keys), _KEY)
        high, low = parts["high"], parts["low"]
        found = np.full(len(parts), NO_BLOCK, np.int32)
        index = np.searchsorted(self._sorted_high, high)
        open_ones = np.arange(len(parts))
        # Repeats only where content ids agree in their first 8 bytes.
        while len(open_ones := open_ones[index[open_ones] < len(self._order)]):
            open_ones = open_ones[self._sorted_high[index[open_ones]] == high[open_ones]]
            entries = self._order[index[open_ones]]
            same = self._low[entries] == low[open_ones]
            block = self.first_block[entries] + parts["number"][open_ones].astype(np.int64)
            within = same & (block < self.first_block[entries.astype(np.int64) + 1])
            found[open_ones[within]] = block[within]
            open_ones = open_ones[~same]
            index[open_ones] += 1
        return found

    def find(self, key: bytes) -> int:
        """Return the number of one block key; NO_BLOCK for a key of another snapshot."""
        name = self._serial, key
        number = _recent_numbers.get(name)
        if number is None:
            if len(_recent_numbers) >= _MAX_RECENT_NUMBERS:
                _recent_numbers.clear()
            number = _recent_numbers[name] = self._search(key)
        return number

    def _search(self, key: bytes) -> int:
        high, low = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:16], "little")
        sorted_high = self._sorted_view
        index = bisect_left(sorted_high, high)
        while index < len(sorted_high) and sorted_high[index] == high:
            entry = self._order_view[index]
            if self._low_view[entry] == low:
                block = self._first_view[entry] + block_number(key)
                return block if block < self._first_view[entry + 1] else NO_BLOCK
            index += 1
        return NO_BLOCK

    def counterparts(self, other: "BlockSpace") -> Ids | None:
        """Return the number in *other* of each block of this space, or NO_BLOCK: shape (count,), int32. None where the
        two have no block in common.

        Of contents that agree in the first 8 bytes of their ids only one is found. A missed block costs no more than a
        worse estimate of its next read.
        """
        index = np.searchsorted(self._sorted_high, other._sorted_high)
        index[index == len(self._order)] = 0
        ours, theirs = self._order[index].astype(np.int64), other._order.astype(np.int64)
        same = (self._high[ours] == other._high[theirs]) & (self._low[ours] == other._low[theirs])
        ours, theirs = ours[same], theirs[same]
        starts, blocks = self.blocks_of(ours)
        if not len(blocks):
            return None
        found = np.full(self.count, NO_BLOCK, np.int32)
        found[blocks] = blocks - np.repeat(self.first_block[ours] - other.first_block[theirs], np.diff(starts))
        return found

    def keys(self, ids: npt.NDArray[np.integer]) -> list[bytes]:
        """Return the key of each of the blocks *ids*: shape (n,), any integer type."""
        entries, numbers = self.refs(ids)
        parts = np.empty(len(ids), _KEY)
        parts["high"], parts["low"], parts["number"] = self._high[entries], self._low[entries], numbers
        raw = parts.tobytes()
        return [raw[start : start + KEY_SIZE] for start in range(0, len(raw), KEY_SIZE)]

    def key(self, number: int) -> bytes:
        """Return the key of one block."""
        entry = bisect_right(self._first_view, number) - 1
        content = self._high_view[entry].to_bytes(8, "little") + self._low_view[entry].to_bytes(8, "little")
        return block_key(content, number - self._first_view[entry])

    def key_numbers(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return the parts of the keys of all blocks: the first 8 bytes as a little-endian number, and the block's
        number in its file. Two arrays of shape (count,), uint64."""
        counts = np.diff(self.first_block)
        numbers = np.arange(self.count, dtype=np.int64) - np.repeat(self.first_block[:-1].astype(np.int64), counts)
        return np.repeat(self._high, counts).astype(np.uint64, copy=False), numbers.astype(np.uint64)

    def refs(self, ids: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the entry of each of the blocks *ids* (shape (n,), any integer type), and its number within the entry:
        two arrays of shape (n,), int64."""
        entries = np.searchsorted(self.first_block, ids.astype(np.int32), side="right") - 1
        return entries, ids.astype(np.int64) - self.first_block[entries]

    def blocks_of(
        self,
        entries: npt.NDArray[np.integer],
        offsets: npt.NDArray[np.integer] | None = None,
        lengths: npt.NDArray[np.integer] | None = None,
    ) -> tuple[npt.NDArray[np.int64], Ids]:
        """Return the blocks of whole entries, or of the bytes [offset, offset + length) of each entry.

        entries: numbers of entries, shape (n,); offsets, lengths: bytes, shape (n,); all of any integer type. The
        result is (starts, ids): entries[i] has the blocks ids[starts[i]:starts[i + 1]]. starts has shape (n + 1,),
        int64; ids has one dimension, int32. An unknown entry has no blocks, nor have bytes beyond the end of a file.

        Raises ConfigError for more than MAX_BLOCKS blocks.
        """
        entries = np.asarray(entries, np.int64)
        known = (entries >= 0) & (entries < len(self.first_block) - 1)
        safe = np.where(known, entries, 0)
        first = self.first_block[safe].astype(np.int64)
        end = np.where(known, self.first_block[safe + 1], first)
        if offsets is not None and lengths is not None:
            offset, length = _bounded(offsets), _bounded(lengths)
            stop = first + -(-(offset + length) // self.block_size)
            first, end = np.minimum(first + offset // self.block_size, end), np.minimum(stop, end)
            end = np.where(length > 0, np.maximum(end, first), first)
        counts = end - first
        starts = np.zeros(len(entries) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        if len(counts) == starts[-1] and (counts == 1).all():
            return starts, first.astype(np.int32)
        check_block_count(int(starts[-1]))
        return starts, expand_runs(first, starts[1:], np.int32)


def check_block_count(blocks: int) -> None:
    """Raise ConfigError where a sequence of *blocks* blocks is too long to be planned."""
    if blocks > MAX_BLOCKS:
        raise ConfigError(
            f"the samples are {blocks:,} blocks, more than the {MAX_BLOCKS:,} that can be planned; "
            "nothing is read ahead for this job"
        )


def distinct(ids: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return each number once, in ascending order, like numpy.unique, which takes 60 us longer."""
    ids = np.sort(ids)
    if len(ids) < 2:
        return ids
    first = np.empty(len(ids), np.bool_)
    first[0] = True
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    return ids if first.all() else ids[first]


def expand_runs(first: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], dtype: type[Number]) -> npt.NDArray[Number]:
    """Return runs of numbers, one after the other: run i counts up from first[i], and ends before index ends[i].

    first, ends: shape (runs,), int64. The result has shape (ends[-1],), of type *dtype*. It is written part by part,
    since numpy.repeat lets no other thread run: 0.2 s for 14 million runs.
    """
    found = np.empty(int(ends[-1]) if len(ends) else 0, dtype)
    start = begin = 0
    while start < len(ends):
        stop = max(start + 1, int(np.searchsorted(ends, begin + _RUN_PART, side="right")))
        counts = np.diff(ends[start:stop], prepend=begin)
        end = int(ends[stop - 1])
        found[begin:end] = np.arange(begin, end) + np.repeat(first[start:stop] - (ends[start:stop] - counts), counts)
        start, begin = stop, end
    return found


def _bounded(sizes: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return the sizes as int64, bounded so that two can be added: shape (n,)."""
    signed = np.minimum(sizes, np.uint64(_BEYOND)) if sizes.dtype == np.uint64 else sizes
    bounded: npt.NDArray[np.int64] = np.clip(signed.astype(np.int64), 0, _BEYOND)
    return bounded


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Samples:
    """The blocks of each sample of a dataset: sample s has the blocks ids[starts[s]:starts[s + 1]] of *space*."""

    space: BlockSpace
    # Shape (samples + 1,), int64.
    starts: npt.NDArray[np.int64]
    # Numbers of blocks, one sample after the other: one dimension, int32.
    ids: Ids

    def __len__(self) -> int:
        return len(self.starts) - 1

    def block_mask(self) -> npt.NDArray[np.bool_] | None:
        """Return which blocks of the space the samples have, shape (blocks of the space,), bool. None: all."""
        own = np.zeros(self.space.count, np.bool_)
        own[self.ids] = True
        return None if own.all() else own

    def reads_in_order(self, order: npt.NDArray[np.uint32]) -> "EpochReads":
        """Return the reads of an epoch with samples in this *order*: sample numbers, shape (samples of the epoch,),
        uint32. Samples that do not exist are left out, and counted. Raises ConfigError for more than
        cachefs.planning.blocks.space.MAX_BLOCKS reads."""
        known = order if not len(order) or int(order.max()) < len(self) else order[order < len(self)]
        unknown = len(order) - len(known)
        if len(self.ids) == len(self):  # one block each
            return EpochReads(self.ids[known], None, len(known), unknown)
        first = self.starts[known]
        counts = self.starts[known.astype(np.int64) + 1] - first
        ends = np.zeros(len(counts), np.int64)
        np.cumsum(counts, out=ends)
        check_block_count(int(ends[-1]) if len(ends) else 0)
        return EpochReads(self.ids[expand_runs(first, ends, np.int64)], ends, len(known), unknown)


@dataclass(frozen=True, slots=True)
class EpochReads:
    """The reads of one epoch of a consumer, and the samples that they make up."""

    # The block of each read, in order: shape (reads,), int32.
    blocks: Ids
    # Per sample, the read after its last one: shape (samples,), int64. None where each sample is one read.
    ends: npt.NDArray[np.int64] | None
    # Samples of the epoch that exist.
    samples: int
    # Samples of the published order that do not exist.
    unknown: int

    def reads_after(self, samples: int) -> int:
        """Return how many reads are done when the first *samples* samples are."""
        samples = max(0, min(samples, self.samples))
        if self.ends is None:
            return samples
        return int(self.ends[samples - 1]) if samples else 0

    def samples_after(self, reads: int) -> int:
        """Return how many samples are complete after *reads* reads."""
        return reads if self.ends is None else int(np.searchsorted(self.ends, reads, side="right"))
