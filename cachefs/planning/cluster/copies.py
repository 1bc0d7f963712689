"""Coordinated MIN: who holds the cluster's copy of each block, from one epoch to the next.

When a node has read a block, two nodes have it: that one, and the holder from which it came. The copy stays with
whichever of the two reads it sooner, as the published sequences say. That is Belady's rule for all caches together:
with one copy of each block on N nodes, a read is local with probability 1 / Q(N) (see
cachefs.planning.cluster.scale.local_share) and not 1 / N. Every node computes it by itself from the same sequences: no
directory, and no message per block.

Nodes have room for so many bytes. An epoch is looked at in windows of 1 %, since what a node gives away in a window
makes room for what it takes: were each move asked for room alone, full caches would deny every one of them, and all
copies would stay at home for ever. Of what does not fit into a window, that which is read latest stays where it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.planning.cluster.homes import NOBODY, Nodes, reindexed
from cachefs.planning.cluster.reads import Places, Reads

# Per node: bytes. Shape (nodes,), int64.
Bytes = npt.NDArray[np.int64]

# The windows that an epoch is looked at in.
WINDOWS: Final = 100
# What nodes may hold more than their parts, where all together have no room for everything. Without it .446 of all
# reads are local with 4 nodes and .302 with 8, and with it .451 and .308.
SLACK: Final = 0.01
# Of sqrt(blocks / nodes) blocks. One node in forty has so much more than its part when readers choose by chance.
RESERVED_DEVIATIONS: Final = 2.0
# Epochs ahead that say who reads a block sooner: a quarter of the nodes, within these limits. With 4, 8 and 64 nodes
# that gives .451, .306 and .102 local reads; all of the future gives .451, .309 and .103. Each takes 2 bytes per block.
_LEAST_AHEAD: Final = 4
_MOST_AHEAD: Final = 16


def next_holders(holders: Nodes, epochs: Sequence[Reads], rooms: Bytes, sizes: npt.NDArray[np.uint32]) -> Nodes:
    """Who holds each block at the start of the next epoch: shape (blocks,), uint16.

    holders: at the start of this one, NOBODY where nobody does; epochs: this one, whose places must be known, and those
    ahead as far as they are known (half as many as there are nodes say all that counts, a quarter nearly all); rooms:
    bytes that each node may hold (see `rooms`); sizes: bytes of each block, shape (blocks,), uint32.

    Who holds more than there is room for takes nothing until it has given enough away. Raises ValueError where the
    places in this epoch are not known.
    """
    nodes, now, found = len(rooms), epochs[0], holders.copy()
    if now.when is None:
        raise ValueError("the places of reads in the current epoch are not known")
    blocks, soon = _wanted(holders, epochs, nodes)
    moves = _Moves.of(
        blocks, soon, now.reader[blocks], (now.when[blocks] * np.float32(WINDOWS)).astype(np.int64), sizes
    )
    sources = np.minimum(holders[moves.blocks], nodes).astype(np.intp)
    free = np.append(rooms - held(holders, sizes, nodes), 0)  # the last one is nobody's
    starts = np.searchsorted(moves.windows, np.arange(WINDOWS + 1)).tolist()
    for start, end in pairwise([*starts[:-1], len(sources)]):
        fitting = _fitting(moves.part(start, end), sources[start:end], free)
        taken = np.flatnonzero(fitting) + start
        found[moves.blocks[taken]] = moves.targets[taken]
    return found


def epochs_ahead(nodes: int) -> int:
    """How many epochs beyond the current one are worth looking at, with so many nodes."""
    return min(max(math.ceil(nodes / 4), _LEAST_AHEAD), _MOST_AHEAD)


def held(holders: Nodes, sizes: npt.NDArray[np.uint32], nodes: int) -> Bytes:
    """Bytes of the blocks that each of so many nodes holds: shape (nodes,), int64."""
    # Sums of whole numbers below 2 ** 53 are exact in whatever order.
    sums: Bytes = np.bincount(np.minimum(holders, nodes), sizes, nodes + 1)[:nodes].astype(np.int64)
    return sums


def rooms(capacities: Bytes, sizes: npt.NDArray[np.uint32], slack: float = SLACK) -> Bytes:
    """Bytes that each node may hold of a snapshot whose blocks have these *sizes*: shape (nodes,), int64.

    capacities: bytes that each node has for it: shape (nodes,), int64. As far as there is enough, some is left for what
    is on its way. Where all nodes together have no room for all blocks, nobody can keep all that it holds: each holds
    what it *would* keep, a part in proportion to its capacity, and its tiers evict of that what is read last.
    """
    total, blocks, pooled = int(sizes.sum(dtype=np.int64)), len(sizes), int(capacities.sum())
    if not total or not pooled:
        return capacities
    on_its_way = RESERVED_DEVIATIONS * math.sqrt(blocks / np.count_nonzero(capacities)) * total / blocks
    if pooled >= total:
        slack = min(slack, (pooled / total - 1) / 2)
    parts = (capacities * ((1 + slack) * total / pooled)).astype(np.int64)
    found: Bytes = np.maximum(parts, capacities - np.int64(on_its_way))
    return found


def after_change(
    holders: Nodes,
    before: Sequence[str],
    after: Sequence[str],
    homes: Nodes,
    old_homes: Nodes | None = None,
    second: Nodes | None = None,
) -> Nodes:
    """The holders when other nodes are members, as places in the new list of members: shape (blocks,), uint16.

    holders: as places in the old list; before, after: the ids of the members, both sorted; homes: those of the ring
    with the new members, as places in the new list; old_homes: those of the old ring, as places in the old list;
    second: who has the second copy of each, as places in the old list.

    What somebody held who has left is with who has its second copy, and else goes to its new home. With *old_homes*,
    what has its home on somebody who has come goes there, so that a node without readers takes its part too; everything
    else stays where it is.
    """
    moved = reindexed(holders, before, after)
    if second is not None:
        moved = np.where(moved == NOBODY, reindexed(second, before, after), moved)
    gone = moved == NOBODY
    if old_homes is not None:
        known = set(before)
        came = np.array([name not in known for name in after] + [False])
        gone |= came.take(homes, mode="clip") & (homes != reindexed(old_homes, before, after))
    return np.where(gone, homes, moved).astype(np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """Copies that had better move, as arrays with one element per move: in the order of windows, in each of these by
    the node that they would go to, and among those of one node the soonest read first."""

    # Numbers of the blocks: intp.
    blocks: npt.NDArray[np.intp]
    # The node that has read the block and will read it sooner than who has it: intp.
    targets: npt.NDArray[np.intp]
    # In which window it is read: int64.
    windows: npt.NDArray[np.int64]
    # Bytes: int64.
    sizes: Bytes
    # Bytes of it and of all before it that would go to the same node in the same window: int64.
    needed: Bytes

    @classmethod
    def of(
        cls,
        blocks: npt.NDArray[np.intp],
        soon: Places,
        targets: Nodes,
        windows: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.uint32],
    ) -> "_Moves":
        """soon: when each of the blocks is read next, in epochs. sizes: of all blocks. The rest as in the record, in
        any order; of two that are read at the same time the first stays the first."""
        group = windows << 16 | targets
        # Floats above 0 are in the order of their bits.
        order = np.argsort(group << 32 | soon.view(np.uint32), kind="stable")
        blocks, group = blocks[order], group[order]
        size = sizes[blocks].astype(np.int64)
        ends = np.cumsum(size)
        first = np.flatnonzero(np.diff(group, prepend=-1))
        before = np.repeat((ends - size)[first], np.diff(first, append=len(group)))
        return cls(blocks, (group & NOBODY).astype(np.intp), group >> 16, size, ends - before)

    def part(self, start: int, end: int) -> "_Moves":
        part = slice(start, end)
        return _Moves(self.blocks[part], self.targets[part], self.windows[part], self.sizes[part], self.needed[part])


def _wanted(holders: Nodes, epochs: Sequence[Reads], nodes: int) -> tuple[npt.NDArray[np.intp], Places]:
    """The blocks whose reader in this epoch reads them again sooner than their holder, and when: in how many epochs,
    counted from the start of the next one."""
    reader = epochs[0].reader
    blocks = np.flatnonzero((reader != holders) & (reader < nodes))
    ours, theirs = holders[blocks], reader[blocks]
    found, soon = [np.zeros(0, np.intp)], [np.zeros(0, np.float32)]
    for ahead, epoch in enumerate(epochs[1:]):
        following = epoch.reader[blocks]
        wins = following == theirs
        found.append(blocks[wins])
        places = np.zeros(len(found[-1]), np.float32) if epoch.when is None else epoch.when[found[-1]]
        soon.append(places + np.float32(ahead))
        open_ones = ~wins & (following != ours)
        blocks, ours, theirs = blocks[open_ones], ours[open_ones], theirs[open_ones]
    return np.concatenate(found), np.concatenate(soon)


def _fitting(moves: _Moves, sources: npt.NDArray[np.intp], free: Bytes) -> npt.NDArray[np.bool_]:
    """Which of the moves of one window are made: shape (moves,), bool. *free*, bytes of each node, is brought up to
    date. sources: who has the block.

    A node takes moves in their order as long as they fit into what is free and what it gives away. Each one that it
    denies leaves another node less room, so this is repeated until all fit. It makes no difference which node is looked
    at first: what is denied only ever leads to more that is denied.
    """
    taken = np.ones(len(sources), np.bool_)
    while True:
        # Sums of whole numbers below 2 ** 53 are exact in whatever order.
        given = np.bincount(sources[taken], moves.sizes[taken], len(free)).astype(np.int64)
        fits = moves.needed <= (free + given)[moves.targets]
        if (fits == taken).all():
            free += given - np.bincount(moves.targets[taken], moves.sizes[taken], len(free)).astype(np.int64)
            return taken
        taken = fits
