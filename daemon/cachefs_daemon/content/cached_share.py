"""Estimates how much of a snapshot is on this node, from a sample of its blocks: fast for a snapshot of any size.

`inventory.cached_bytes` reads all blocks, which is exact and takes seconds. Call in a thread.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Final

from cachefs.block import TIER_NAMES, block_count, block_key, block_length
from cachefs.errors import NotFound
from cachefs.messages import CachedDataset
from cachefs.snapshot import Snapshot
from cachefs_daemon.store.index_writer import IndexWriter

# Blocks in the sample: the standard deviation of a share is at most 2 % if files have one size. Takes 5 ms.
SAMPLED_BLOCKS: Final = 600


def cached_share(index: IndexWriter, snapshot: Snapshot, name: str, most: int = SAMPLED_BLOCKS) -> CachedDataset:
    """Return the cached bytes of the dataset *name*, estimated from about *most* blocks, or exact if it has no more.
    The sample is the same each time, so that the result changes only with the cache."""
    lengths: list[int] = []
    keys: list[bytes] = []
    for length, key in _sample(snapshot, most):
        lengths.append(length)
        keys.append(key)
    found = [0] * len(TIER_NAMES)
    for length, location in zip(lengths, index.get_many(keys), strict=True):
        if location is not None:
            found[location.tier] += length
    looked_at = sum(lengths)
    scale = snapshot.bytes / looked_at if looked_at else 0.0
    memory, ssd = (round(scale * count) for count in found)
    return CachedDataset(
        name=name, bytes=snapshot.bytes, memory=memory, ssd=ssd, is_estimate=looked_at != snapshot.bytes
    )


def _sample(snapshot: Snapshot, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield length and key of sampled blocks: one file from each of equal parts of the snapshot, and likewise blocks of
    a file, as cached data is often a prefix, or one part in n."""
    entries = snapshot.files + snapshot.directories
    dice = random.Random(snapshot.id)
    numbers = _spread(entries, most, dice)
    each = max(1, most // max(1, min(len(numbers), snapshot.files)))
    for number in numbers:
        try:
            size, content = snapshot.size_and_content(number + 1)  # 0 is the root
        except NotFound:  # a directory
            continue
        for block in _spread(block_count(size, snapshot.block_size), each, dice):
            yield block_length(size, snapshot.block_size, block), block_key(content, block)


def _spread(count: int, most: int, dice: random.Random) -> list[int]:
    """Return *most* of the numbers below *count*: a random one from each of equal parts."""
    if count <= most:
        return list(range(count))
    bounds = [part * count // most for part in range(most + 1)]
    return [dice.randrange(first, end) for first, end in itertools.pairwise(bounds)]
