"""Weighted rendezvous hashing: each node has a score for each block, and the node with the highest is the block's home.

A node that joins takes blocks from all others, a node that leaves gives its blocks to all others, and no other block
moves. A node's share of all blocks is in proportion to its weight (Schindelhauer and Schomaker, "Weighted Distributed
Hash Tables", SPAA 2005: `weight / -ln u`, u uniform in (0, 1)). The function must not change: nodes with different
functions would not find each other's blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cachefs.block import KEY_SIZE
from cachefs.planning.blocks.space import BlockSpace

# Per block: a hash of its key, the same on all members. Shape (blocks,), uint64.
Hashes = npt.NDArray[np.uint64]
# Per block: a score. Shape (blocks,), float64.
Scores = npt.NDArray[np.float64]

# The constants of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
_INCREMENT: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)

_KEY: Final = np.dtype([("head", "<u8"), ("rest", "V8"), ("number", ">u4")])
_GIB: Final = 1 << 30
# Weights are powers of 2 ** (1 / _STEPS): steps of 1.1 %.
_STEPS: Final = 64


@dataclass(frozen=True, slots=True)
class RingMember:
    """A node that can be the home of blocks."""

    # The node's id, by which members are sorted.
    id: str
    # xxh3_64 of the id in UTF-8.
    seed: int
    # The node's share of all blocks is in proportion to its weight. Above 0.
    weight: float
    # Nodes of one zone may be lost together; "": not configured.
    zone: str = ""

    def __post_init__(self) -> None:
        if not (0 < self.weight < math.inf):
            raise ValueError(f"node {self.id} has the weight {self.weight}; a weight is a number above 0")


def weight_of(capacity: int) -> float:
    """Return the weight of a node whose tiers have room for *capacity* bytes: the capacity in GiB, in steps of 1.1 %.

    Rounding gives machines of one kind equal weights although their file systems differ by some blocks. Members of
    equal weight are compared without logarithms, which takes half the time.
    """
    return float(2.0 ** (round(math.log2(max(capacity, 1) / _GIB) * _STEPS) / _STEPS))


def mix_bits(values: Hashes) -> Hashes:
    """Apply splitmix64's finaliser, without its first increment: shape (n,), uint64. Changes and returns *values*."""
    values ^= values >> _S30
    values *= _FIRST
    values ^= values >> _S27
    values *= _SECOND
    values ^= values >> _S31
    return values


def key_hashes(keys: npt.NDArray[np.uint8]) -> Hashes:
    """Return the hashes of block keys (see cachefs.block.block_key). keys: shape (blocks, 20), uint8."""
    parts = np.ascontiguousarray(keys, np.uint8).reshape(-1, KEY_SIZE).view(_KEY)[:, 0]
    return _hashes(parts["head"].astype(np.uint64), parts["number"].astype(np.uint64))


def space_hashes(space: BlockSpace) -> Hashes:
    """Return the hashes of all blocks of *space*, equal to `key_hashes` of their keys: 30 ms per million."""
    return _hashes(*space.key_numbers())


def scores(hashes: Hashes, member: RingMember) -> Scores:
    """Return the score of *member* for each block: shape (blocks,), float64."""
    return score_of(draws(hashes, member.seed), member.weight)


def draws(hashes: Hashes, seed: int) -> Hashes:
    """Return the random number of a member with this *seed* for each block, below 2 ** 53. Among members of equal
    weight, the highest number wins."""
    return mix_bits(hashes ^ np.uint64(seed)) >> _S11


def score_of(drawn: Hashes, weight: float | Scores) -> Scores:
    """Return the scores for numbers of `draws`: shape (blocks,), float64."""
    uniform: Scores = (drawn.astype(np.float64) + 0.5) * 2.0**-53
    score: Scores = weight / -np.log(uniform)
    return score


def scores_of_block(hashed: np.uint64, seeds: Hashes, weights: Scores) -> Scores:
    """Return the scores of the members with these *seeds* and *weights* for one block: shape (members,), float64. A few
    hundred members take as long as ten."""
    return score_of(draws(seeds, int(hashed)), weights)


def rank_members(hashes: Hashes, members: Sequence[RingMember]) -> npt.NDArray[np.uint16]:
    """Return all members for each of a few blocks, highest score first, ties to the smaller id: indices in *members*,
    which are sorted by id. Shape (blocks, members), uint16. A node that cannot reach a block's home asks the next
    member.
    """
    table = np.stack([scores(hashes, member) for member in members], axis=1)
    order: npt.NDArray[np.uint16] = np.argsort(-table, axis=1, kind="stable").astype(np.uint16)
    return order


def _hashes(heads: Hashes, numbers: Hashes) -> Hashes:
    return mix_bits(heads + _INCREMENT * (numbers + np.uint64(1)))
