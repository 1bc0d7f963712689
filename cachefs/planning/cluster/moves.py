"""Coordinated MIN: decides which node holds the cluster's copy of each block, from one epoch to the next.

When a node has read a block, two nodes have it: the reader, and the holder from which it came. The copy stays with the
one that reads it sooner according to the published sequences. That is Belady's rule for all caches together: with one
copy of each block on N nodes, a read is local with probability 1 / Q(N) (see
cachefs.planning.cluster.scale.local_share) and not 1 / N. Every node computes the result from the same sequences: there
is no directory, and no message per block.

Several groups of consumers may read the blocks, each at its own pace. Their epochs are placed on the clock of one of
them, the leader (`cachefs.planning.cluster.schedule`), and holders are decided for one of its epochs after the other:
`next_holders` follows the reads of all groups in order of time, and returns `EpochMoves`.

Nodes have limited room. Moves are checked in windows of 1 % of an epoch, since the blocks that a node gives away in a
window make room for the blocks that it takes: if each move needed free room, full caches would deny all moves, and all
copies would stay at home for ever. Where not all moves of a window fit, the blocks read latest stay in place.

Where a job reads on some nodes only, more copies are wanted there than fit. A node's room then has a price, in reads
per epoch of the leader: a copy is worth the inverse of the time to its next read there, less the price (`room_prices`).
With a job on 4 nodes and one of half its pace on 2 of them, in caches for one dataset, .438 and .407 of their reads are
local, and .383 and .362 without prices. Prices are the multipliers of the rooms in the Lagrangian of the assignment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.cluster.copies import NodeBytes, held_bytes
from cachefs.planning.cluster.epoch_reads import LeaderTimes, ScheduledReads
from cachefs.planning.cluster.homes import NO_NODE, NodeNumbers

# Price of each node's room, and of NO_NODE at the end: shape (nodes + 1,), float32.
RoomPrices = npt.NDArray[np.float32]

# Windows of an epoch.
WINDOWS: Final = 100
# Time at which blocks without a move change hands.
NEVER: Final = 2.0
# Number of no epoch, and the most epochs that are compared.
NO_EVENT: Final = 0xFF
MAX_EVENTS: Final = NO_EVENT
# Blocks whose reads are compared at once, so that intermediate results stay in a processor's cache.
_BLOCKS_PER_PART: Final = 1 << 15
# Blocks by which prices are found: some parts of all.
_PARTS_PRICED: Final = 4
# Part of its room that a node may be short of before it has a price; rounds in which prices are raised; by how much for
# a room of which twice as much is wanted, times the number of nodes: copies are worth less where more nodes read them.
# More rounds give the same shares to .002, twice the step oscillates.
_PRICED_EXCESS: Final = 0.02
_PRICE_ROUNDS: Final = 8
_PRICE_STEP: Final = 6.0
# Least time to a read, in epochs: reads at one moment have no order.
_LEAST_TIME: Final = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class EpochMoves:
    """The blocks that change hands in one epoch of the leader, each at one read, and the holders at its end. A block
    that several nodes would take one after the other changes hands once: with two groups of one pace that costs .006
    of the local reads of 4 nodes, with three .017."""

    # Holder of each block at the end: shape (blocks,), uint16.
    following: NodeNumbers
    # Which of the epochs has the read at which the block changes hands, NO_EVENT where there is none: shape (blocks,),
    # uint8.
    events: npt.NDArray[np.uint8]
    # When that read comes; NEVER where there is none: shape (blocks,), float32.
    times: LeaderTimes

    @classmethod
    def of(
        cls,
        holders: NodeNumbers,
        blocks: npt.NDArray[np.intp],
        targets: NodeNumbers,
        events: npt.NDArray[np.uint8],
        times: LeaderTimes,
    ) -> "EpochMoves":
        """holders: of all blocks; the rest for each of some *blocks* that change hands: shape (n,)."""
        following, all_events = holders.copy(), np.full(len(holders), NO_EVENT, np.uint8)
        all_times = np.full(len(holders), NEVER, np.float32)
        following[blocks], all_events[blocks], all_times[blocks] = targets, events, times
        return cls(following, all_events, all_times)

    @classmethod
    def between(
        cls, holders: NodeNumbers, following: NodeNumbers, epochs: Sequence[ScheduledReads], since: float = 0.0
    ) -> "EpochMoves":
        """Return the moves that lead from *holders* to *following*, wherever these come from. The arguments are those
        of `next_holders`."""
        found = cls.of(holders, np.zeros(0, np.intp), holders[:0], np.zeros(0, np.uint8), np.zeros(0, np.float32))
        # Moves without a read from *since* on are those that an earlier schedule of the epoch decided.
        starts = dict.fromkeys((since, 0.0))
        for layers in chain.from_iterable(_layers_of(len(holders), epochs, start) for start in starts):
            before, after = holders[layers.part], following[layers.part]
            blocks = np.flatnonzero((before != after) & (found.events[layers.part] == NO_EVENT))
            layer = _taking_layer(layers, blocks, before[blocks], after[blocks])
            events, times = layers.reads_at(layer, blocks)
            found.events[blocks + layers.part.start], found.times[blocks + layers.part.start] = events, times
        return replace(found, following=following)

    def rescheduled(self, numbers: npt.NDArray[np.uint8], epochs: Sequence[ScheduledReads]) -> "EpochMoves":
        """Return the same moves as they are timed by another schedule. numbers: of each of the former epochs its number
        among *epochs*, NO_EVENT where it is not among them: shape (MAX_EVENTS + 1,), uint8; its moves keep their
        times."""
        events, times = numbers[self.events], self.times.copy()
        for number, epoch in enumerate(epochs):
            blocks = np.flatnonzero(events == number)
            times[blocks] = epoch.times(blocks)
        return EpochMoves(self.following, events, times)

    def holders_at(self, time: float, holders: NodeNumbers) -> NodeNumbers:
        """Return the holders at a time of the epoch. holders: at its start."""
        found: NodeNumbers = np.where(self.times < np.float32(time), self.following, holders)
        return found

    def keep_earlier(self, earlier: "EpochMoves", since: float) -> "EpochMoves":
        """Return these moves, decided anew in the middle of an epoch, with the *earlier* decision of the moves before
        *since*."""
        kept = earlier.times < np.float32(since)
        return EpochMoves(
            np.where(kept, earlier.following, self.following).astype(np.uint16),
            np.where(kept, earlier.events, self.events).astype(np.uint8),
            np.where(kept, earlier.times, self.times).astype(np.float32),
        )


def next_holders(
    holders: NodeNumbers,
    epochs: Sequence[ScheduledReads],
    rooms: NodeBytes,
    sizes: npt.NDArray[np.uint32],
    since: float = 0.0,
) -> EpochMoves:
    """Return the moves of one epoch of the leader, and so the holders at its end.

    holders: at its start, or NO_NODE: shape (blocks,), uint16; epochs: of all groups, at most MAX_EVENTS: those with
    reads in that epoch of the leader, and the known ones after it (half as many as nodes suffice, a quarter nearly);
    rooms: bytes that each node may hold (see `capacity_by_node`); sizes: bytes of each block, shape (blocks,), uint32;
    since: blocks stay at all reads before that time.

    A node that holds more than its room takes nothing until it has given enough away. Raises ValueError where the
    positions in an epoch that begins before time 1 are not known.
    """
    nodes = len(rooms)
    prices = room_prices(holders, epochs, rooms, sizes, since)
    desired = [
        _moves_of(holders[layers.part], _kept(holders[layers.part], layers, prices), layers)
        for layers in _layers_of(len(holders), epochs, since)
    ]
    blocks, soon, places, events, targets = (np.concatenate(parts) for parts in zip(*desired, strict=True))
    windows = np.minimum(places * np.float32(WINDOWS), WINDOWS - 1).astype(np.int64)
    moves = _CopyMoves.of(blocks, soon, targets, windows, sizes)
    sources = np.minimum(holders[blocks[moves.order]], nodes).astype(np.intp)
    free = np.append(rooms - held_bytes(holders, sizes, nodes), 0)  # the last element is for NO_NODE
    starts = np.searchsorted(moves.windows, np.arange(WINDOWS + 1)).tolist()
    fitting = np.zeros(len(blocks), np.bool_)
    for start, end in pairwise([*starts[:-1], len(sources)]):
        taken = _fitting_moves(moves.part(start, end), sources[start:end], free)
        fitting[moves.order[start:end]] = taken
    return EpochMoves.of(holders, blocks[fitting], targets[fitting], events[fitting], places[fitting])


@dataclass(frozen=True, slots=True, eq=False)
class _CopyMoves:
    """Desired moves of copies, as arrays with one element per move: ordered by window, then by target node, then by the
    time of the next read, soonest first."""

    # Place of each move among the moves as they were given: intp.
    order: npt.NDArray[np.intp]
    # The node that has read the block and will read it sooner than the holder: intp.
    targets: npt.NDArray[np.intp]
    # Window of the read: int64.
    windows: npt.NDArray[np.int64]
    # Bytes: int64.
    sizes: NodeBytes
    # Bytes of this move and of all earlier moves to the same node in the same window: int64.
    needed: NodeBytes

    @classmethod
    def of(
        cls,
        blocks: npt.NDArray[np.intp],
        soon: LeaderTimes,
        targets: NodeNumbers,
        windows: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.uint32],
    ) -> "_CopyMoves":
        """soon: when each of the blocks is read next by its target; sizes: of all blocks; the rest as the fields, in
        any order. The order of moves with equal times is kept."""
        group = windows << 16 | targets
        # The bit patterns of positive floats sort like the floats.
        order = np.argsort(group << 32 | soon.view(np.uint32), kind="stable")
        group = group[order]
        size = sizes[blocks[order]].astype(np.int64)
        ends = np.cumsum(size)
        first = np.flatnonzero(np.diff(group, prepend=-1))
        before = np.repeat((ends - size)[first], np.diff(first, append=len(group)))
        return cls(order, (group & NO_NODE).astype(np.intp), group >> 16, size, ends - before)

    def part(self, start: int, end: int) -> "_CopyMoves":
        part = slice(start, end)
        return _CopyMoves(self.order[part], self.targets[part], self.windows[part], self.sizes[part], self.needed[part])


class _ReadLayers:
    """The reads of some consecutive blocks in order of time: layer 0 has one read of each block at most, layer 1 one
    that comes later, and so on. Reads before a certain time are left out."""

    def __init__(self, epochs: Sequence[ScheduledReads], part: slice, since: float, *, is_sequence: bool) -> None:
        """is_sequence: whether each of the epochs begins after the one before it has ended."""
        self.part = part
        self._epochs = epochs
        # Indices of *epochs* by layer, and times: shape (layers, blocks). None if each epoch is a layer.
        self._events: npt.NDArray[np.uint8] | None = None
        self._times: LeaderTimes | None = None
        readers = [self._readers_since(one, since) for one in epochs]
        if is_sequence:
            self.readers = readers
            # Layers in which reads come before time 1.
            self.current = range(sum(one.begin < 1 for one in epochs))
            return
        times = np.stack(
            [np.where(who == NO_NODE, np.inf, one.times(part)) for who, one in zip(readers, epochs, strict=True)]
        )
        order = np.argsort(times, axis=0, kind="stable")
        self._times, self._events = np.take_along_axis(times, order, 0).astype(np.float32), order.astype(np.uint8)
        self.readers = list(np.take_along_axis(np.stack(readers), order, 0))
        self.current = range(int(np.count_nonzero((self._times < 1).any(axis=1))))

    def _readers_since(self, epoch: ScheduledReads, since: float) -> NodeNumbers:
        readers = epoch.reads.reader[self.part]
        if epoch.begin >= since:
            return readers
        return np.where(epoch.times(self.part) < np.float32(since), NO_NODE, readers).astype(np.uint16)

    def times(self, layer: int, blocks: npt.NDArray[np.intp]) -> LeaderTimes:
        """Return when the reads of a layer come. blocks: counted from the start of the part, each with a read there."""
        if self._times is None:
            return self._epochs[layer].times(blocks + self.part.start)
        found: LeaderTimes = self._times[layer, blocks]
        return found

    def reads_at(
        self, layers: npt.NDArray[np.intp], blocks: npt.NDArray[np.intp]
    ) -> tuple[npt.NDArray[np.uint8], LeaderTimes]:
        """Return the epochs and the times of the reads of *blocks* in *layers*, each of shape (n,): NO_EVENT and NEVER
        where the layer is negative."""
        events, times = np.full(len(blocks), NO_EVENT, np.uint8), np.full(len(blocks), NEVER, np.float32)
        for layer in self.current:
            here = np.flatnonzero(layers == layer)
            events[here] = layer if self._events is None else self._events[layer, blocks[here]]
            times[here] = self.times(layer, blocks[here])
        return events, times


def room_prices(
    holders: NodeNumbers,
    epochs: Sequence[ScheduledReads],
    rooms: NodeBytes,
    sizes: npt.NDArray[np.uint32],
    since: float = 0.0,
) -> RoomPrices:
    """Return the prices at which about as much is wanted of each node's room as it has. The arguments are those of
    `next_holders`."""
    nodes = len(rooms)
    prices = np.zeros(nodes + 1, np.float32)
    parts = list(_layers_of(len(holders), epochs, since))
    parts = parts[:: max(1, len(parts) // _PARTS_PRICED)]
    blocks = np.concatenate([np.arange(layers.part.start, layers.part.stop) for layers in parts])
    share = sizes[blocks].sum(dtype=np.int64) / max(1, int(sizes.sum(dtype=np.int64)))
    for round_number in range(_PRICE_ROUNDS):
        kept = np.concatenate([_kept(holders[layers.part], layers, prices) for layers in parts])
        excess = held_bytes(kept, sizes[blocks], nodes) / np.maximum(1.0, rooms * share) - 1
        if not round_number and (excess < _PRICED_EXCESS).all():
            break
        raised = prices[:nodes] + np.float32(_PRICE_STEP / nodes) * np.minimum(excess, 1.0).astype(np.float32)
        prices[:nodes] = np.maximum(np.float32(0), raised)
    return prices


def _layers_of(blocks: int, epochs: Sequence[ScheduledReads], since: float) -> Iterator[_ReadLayers]:
    """Yield the reads of all blocks, part by part. Raises ValueError for too many epochs, or unknown positions."""
    if len(epochs) > MAX_EVENTS:
        raise ValueError(f"{len(epochs):,} epochs; at most {MAX_EVENTS} are compared")
    if any(one.reads.positions is None and one.begin < 1 for one in epochs):
        raise ValueError("the positions of reads in the current epoch are not known")
    is_sequence = all(one.begin + one.length <= later.begin for one, later in pairwise(epochs))
    for start in range(0, max(1, blocks), _BLOCKS_PER_PART):
        part = slice(start, min(start + _BLOCKS_PER_PART, blocks))
        yield _ReadLayers(epochs, part, since, is_sequence=is_sequence)


def _kept(holders: NodeNumbers, layers: _ReadLayers, prices: RoomPrices) -> NodeNumbers:
    """Return the holders of a part's blocks at the end of the leader's epoch if there was room for all: at each read
    before time 1 the copy goes to the reader if it is worth more there than with the holder."""
    kept, nodes = holders.copy(), len(prices) - 1
    for layer in layers.current:
        reader = layers.readers[layer]
        blocks = np.flatnonzero((reader != kept) & (reader < nodes))
        blocks = blocks[layers.times(layer, blocks) < 1]
        ours, theirs = kept[blocks], reader[blocks]
        if prices.any():
            now = layers.times(layer, blocks)
            wins = _worth(layers, layer, blocks, theirs, now, prices) > _worth(layers, layer, blocks, ours, now, prices)
        else:
            wins = _read_sooner(layers, layer, blocks, ours, theirs)
        kept[blocks[wins]] = theirs[wins]
    return kept


def _read_sooner(
    layers: _ReadLayers, layer: int, blocks: npt.NDArray[np.intp], ours: NodeNumbers, theirs: NodeNumbers
) -> npt.NDArray[np.bool_]:
    """Return which blocks are read again by *theirs*, after the read in *layer*, and by *ours* later or never. Quicker
    than to compare the times: most are decided in the next layers."""
    found, open_ones = np.zeros(len(blocks), np.bool_), np.arange(len(blocks))
    for following in layers.readers[layer + 1 :]:
        reads_next = following[blocks[open_ones]]
        wins = reads_next == theirs[open_ones]
        found[open_ones[wins]] = True
        open_ones = open_ones[~wins & ((reads_next != ours[open_ones]) | (reads_next == NO_NODE))]
        if not len(open_ones):
            break
    return found


def _worth(
    layers: _ReadLayers, layer: int, blocks: npt.NDArray[np.intp], nodes: NodeNumbers, now: LeaderTimes,
    prices: RoomPrices,
) -> npt.NDArray[np.float32]:  # fmt: skip
    """Return what each block is worth on its node after the read in *layer*: reads per epoch of the leader."""
    soon = _next_read(layers, np.full(len(blocks), layer), blocks, nodes)
    return (1 / (soon - now + np.float32(_LEAST_TIME)) - prices.take(nodes, mode="clip")).astype(np.float32)


def _next_read(
    layers: _ReadLayers, after: npt.NDArray[np.intp], blocks: npt.NDArray[np.intp], nodes: NodeNumbers
) -> LeaderTimes:
    """Return when each block is read by its node in a later layer than *after*: infinite where it is not."""
    soon = np.full(len(blocks), np.inf, np.float32)
    for layer in reversed(range(1, len(layers.readers))):
        readers = layers.readers[layer][blocks]
        reads = np.flatnonzero((readers == nodes) & (readers != NO_NODE) & (after < layer))
        soon[reads] = layers.times(layer, blocks[reads])
    return soon


def _moves_of(
    holders: NodeNumbers, kept: NodeNumbers, layers: _ReadLayers
) -> tuple[npt.NDArray[np.intp], LeaderTimes, LeaderTimes, npt.NDArray[np.uint8], NodeNumbers]:
    """Return the blocks of a part whose holder changes to that of *kept*; when each is read next by its new holder;
    when, and in which epoch, it is read as it changes hands; and the new holder."""
    blocks = np.flatnonzero(kept != holders)
    targets = kept[blocks]
    taken_at = _taking_layer(layers, blocks, holders[blocks], targets)
    events, times = layers.reads_at(taken_at, blocks)
    soon = _next_read(layers, taken_at, blocks, targets)
    return blocks + layers.part.start, soon, times, events, targets


def _taking_layer(
    layers: _ReadLayers, blocks: npt.NDArray[np.intp], ours: NodeNumbers, theirs: NodeNumbers
) -> npt.NDArray[np.intp]:
    """Return the layer at which each block goes from its holder to the next one: that of the first read by the next
    holder after all reads by the holder, else of its last read; -1 where the next holder does not read the block before
    time 1. ours, theirs: of each of *blocks*: shape (n,)."""
    chosen, last = np.full(len(blocks), -1, np.intp), np.full(len(blocks), -1, np.intp)
    for layer in layers.current:
        reader = layers.readers[layer][blocks]
        read = np.flatnonzero(((reader == ours) | (reader == theirs)) & (reader != NO_NODE))
        read = read[layers.times(layer, blocks[read]) < 1]
        by_holder = reader[read] == ours[read]
        chosen[read[by_holder]] = -1
        takes = read[~by_holder]
        last[takes] = layer
        chosen[takes[chosen[takes] < 0]] = layer
    return np.where(chosen < 0, last, chosen)


def _fitting_moves(moves: _CopyMoves, sources: npt.NDArray[np.intp], free: NodeBytes) -> npt.NDArray[np.bool_]:
    """Return which moves of one window are made: shape (moves,), bool. Updates *free*, the free bytes of each node.
    sources: the current holders of the blocks.

    A node takes moves in order as long as they fit into its free room and the room of the blocks it gives away. Each
    denied move leaves its source less room, so the check is repeated until all remaining moves fit. The order of nodes
    does not matter, since a denial can only lead to further denials.
    """
    taken = np.ones(len(sources), np.bool_)
    while True:
        # Sums of whole numbers below 2 ** 53 are exact in whatever order.
        freed = np.bincount(sources[taken], moves.sizes[taken], len(free)).astype(np.int64)
        fits = moves.needed <= (free + freed)[moves.targets]
        if (fits == taken).all():
            free += freed - np.bincount(moves.targets[taken], moves.sizes[taken], len(free)).astype(np.int64)
            return taken
        taken = fits
