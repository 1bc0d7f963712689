"""Block spaces of given sizes, and Belady's MIN by bytes, to which policies are compared."""

import heapq
from collections.abc import Sequence

import numpy as np

from cachefs.planning.blocks.space import BlockSpace
from cachefs_bench.simulated_jobs import ReadingJob, merge_reads


def space_of(sizes: Sequence[int], name: str = "space", block_size: int = 1 << 20, seed: int = 0) -> BlockSpace:
    """A snapshot of files of these sizes. Equal seeds give equal contents."""
    contents = np.frombuffer(np.random.default_rng(seed).bytes(16 * len(sizes)), [("high", "<u8"), ("low", "<u8")])
    return BlockSpace(name, block_size, np.asarray(sizes, np.int64), contents)


def belady_bytes(space: BlockSpace, jobs: Sequence[ReadingJob], capacity: int) -> int:
    """What Belady's MIN fetches for the merged sequence: for equal sizes, nobody fetches less. In whole seconds of
    nothing but the sequence itself, so that it proves the plan and is not proven by it."""
    sequence = [int(job.epochs[epoch][read]) for _, job, epoch, read in merge_reads(jobs)]
    sizes = space.sizes.tolist()
    never = len(sequence)
    following = [never] * len(sequence)
    upcoming: dict[int, int] = {}
    for place in range(len(sequence) - 1, -1, -1):
        following[place] = upcoming.get(sequence[place], never)
        upcoming[sequence[place]] = place
    inside: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    free, fetched = capacity, 0
    for place, block in enumerate(sequence):
        known = block in inside
        fetched += 0 if known else sizes[block]
        free -= 0 if known else sizes[block]
        inside[block] = following[place]
        heapq.heappush(furthest, (-following[place], block))
        while free < 0:
            use, victim = heapq.heappop(furthest)
            if inside.get(victim) == -use:
                del inside[victim]
                free += sizes[victim]
    return fetched
